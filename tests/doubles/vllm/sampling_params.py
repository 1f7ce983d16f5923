"""The double's sampling parameters, with vLLM's validation."""

import enum
from typing import Any

from vllm.contract import FACTS, dataclass_of

RequestOutputKind = enum.Enum("RequestOutputKind", FACTS["RequestOutputKind"])  # type: ignore[misc]  # from facts

_BETWEEN = {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "temperature": (0, 2), "min_p": (0, 1)}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _check_sampling(self: Any) -> None:
    self.output_kind = RequestOutputKind(self.output_kind)
    self.stop_token_ids = self.stop_token_ids or []
    for name, (least, most) in _BETWEEN.items():
        if not least <= getattr(self, name) <= most:
            raise ValueError(f"{name} must be in [{least}, {most}], got {getattr(self, name)}.")
    if not 0 < self.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
    if self.top_k < -1:
        raise ValueError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
    if self.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.")
    if self.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
    if not 0 <= self.min_tokens <= self.max_tokens:
        raise ValueError(f"min_tokens must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}.")
    if self.stop and not self.detokenize:
        raise ValueError("stop strings are only supported when detokenize is True.")


def _check_constraints(self: Any) -> None:
    if sum(getattr(self, name) is not None for name in _CONSTRAINTS) != 1:
        raise ValueError("You must use one kind of structured outputs constraint")


SamplingParams = dataclass_of(
    "SamplingParams",
    known={"vllm.sampling_params.RequestOutputKind": RequestOutputKind},
    __post_init__=_check_sampling,
)
StructuredOutputsParams = dataclass_of("StructuredOutputsParams", __post_init__=_check_constraints)
