"""The double's parameter classes, with the checks that TensorRT-LLM makes when they are built."""

import dataclasses
from typing import Any

from tensorrt_llm.contract import dataclass_of, model_of, nested_models

_REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")

NESTED = nested_models()
KvCacheConfig = NESTED["KvCacheConfig"]
CacheTransceiverConfig = NESTED["CacheTransceiverConfig"]
TorchLlmArgs = model_of("BaseLlmArgs", "TorchLlmArgs", **NESTED)


def _check_sampling(self: Any) -> None:
    if self.top_p is not None and not 0 < self.top_p <= 1:
        raise ValueError(f"require 0 < top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.n > 1 and (self.best_of or self.n) < self.n:
        raise ValueError("best_of cannot be less than n")
    if self.n > 1 and self.greedy:
        raise ValueError("greedy decoding gives one answer: n must be 1")


def _greedy(self: Any) -> bool:
    unset = self.temperature is None and self.top_p is None and self.top_k is None
    return unset or self.temperature == 0


def _check_guided(self: Any) -> None:
    given = [self.json, self.regex, self.grammar, self.json_object or None, self.structural_tag]
    if sum(value is not None for value in given) > 1:
        raise ValueError("Only one guided decoding parameter may be given")


def _check_disaggregated(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in _REQUEST_TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}")


SamplingParams = dataclass_of("SamplingParams", __post_init__=_check_sampling, greedy=property(_greedy))
GuidedDecodingParams = dataclass_of("GuidedDecodingParams", __post_init__=_check_guided)
SchedulingParams = dataclass_of("SchedulingParams")
DisaggregatedParams = dataclass_of("DisaggregatedParams", __post_init__=_check_disaggregated)


@dataclasses.dataclass
class Logprob:
    """Log-probability of a token, and its rank among all (1 is the likeliest)."""

    logprob: float
    rank: int | None = None
