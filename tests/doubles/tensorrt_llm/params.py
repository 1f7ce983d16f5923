"""The double's parameter classes, with TensorRT-LLM's validation."""

import dataclasses
from typing import Any

import pydantic

from tensorrt_llm.contract import dataclass_of, model_of
from tensorrt_llm.traps import TRAPS

_REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
_ENCODER_KEYS = ("num_tokens", "max_num_token", "seq_lens", "max_seq_len")
_DEFAULTS = {"max_batch_size": 2048, "max_input_len": 1024, "max_beam_width": 1, "max_num_tokens": 8192}


# The validators below are those of llm_args.py at 0004396 that concern what Baton sets, under their names.
@pydantic.model_validator(mode="after")
def _validate_base_cuda_graph_config(self: Any) -> Any:
    if self.batch_sizes:
        self.batch_sizes = sorted(self.batch_sizes)
        if self.max_batch_size not in (0, self.batch_sizes[-1]):
            raise ValueError(
                "CudaGraphConfig.max_batch_size is incompatible with CudaGraphConfig.batch_sizes. "
                f"max_batch_size must equal max(batch_sizes).\nbatch_sizes: {self.batch_sizes}"
            )
        self.max_batch_size = self.batch_sizes[-1]
    else:
        self.max_batch_size = self.max_batch_size or 128
        self.batch_sizes = [2**i for i in range(12) if 2**i < self.max_batch_size] + [self.max_batch_size]
    return self


@pydantic.field_validator("cuda_graph_config", mode="before")
def _infer_cuda_graph_config_mode(value: Any) -> Any:
    if isinstance(value, dict) and "mode" not in value:
        return {**value, "mode": "encode" if any(value.get(key) for key in _ENCODER_KEYS) else "decode"}
    return value


@pydantic.field_validator("free_gpu_memory_fraction")
def _validate_free_gpu_memory_fraction(value: Any) -> Any:
    if not 0 <= value <= 1:  # a TypeError of its own with null, which the field's type allows
        raise ValueError("kv_cache_config.free_gpu_memory_fraction must be a float between 0 and 1")
    return value


@pydantic.model_validator(mode="after")
def _normalize_optional_fields_to_defaults(self: Any) -> Any:
    for name, default in _DEFAULTS.items():
        if getattr(self, name) is None:
            setattr(self, name, default)
    return self


DecodeCudaGraphConfig = model_of("DecodeCudaGraphConfig", sizes=_validate_base_cuda_graph_config)
EncodeCudaGraphConfig = model_of("EncodeCudaGraphConfig", sizes=_validate_base_cuda_graph_config)
KvCacheConfig = model_of("KvCacheConfig", fraction=_validate_free_gpu_memory_fraction)
CacheTransceiverConfig = model_of("CacheTransceiverConfig")

TorchLlmArgs = model_of(
    "BaseLlmArgs",
    "TorchLlmArgs",
    nested={
        "KvCacheConfig": KvCacheConfig,
        "CacheTransceiverConfig": CacheTransceiverConfig,
        "MoeConfig": model_of("MoeConfig"),
        "AttentionDpConfig": model_of("AttentionDpConfig"),
        "DecodeCudaGraphConfig": DecodeCudaGraphConfig,
        "EncodeCudaGraphConfig": EncodeCudaGraphConfig,
    },
    infer_mode=_infer_cuda_graph_config_mode,
    defaults=_normalize_optional_fields_to_defaults,
)


def moves_kv_by_python(config: Any) -> bool:
    """Whether the Python transceiver runs: `auto` selects it with NIXL (#16479, #18134), later always."""
    is_chosen = config.backend in ("NIXL", "DEFAULT") or TRAPS.prefers_python
    return config.transceiver_runtime == "PYTHON" or (config.transceiver_runtime == "auto" and is_chosen)


def _check_sampling(self: Any) -> None:
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
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


def _check_disaggregated(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in _REQUEST_TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}")


_SAMPLING: dict[str, Any] = {"__post_init__": _check_sampling, "greedy": property(_greedy)}
SamplingParams = dataclass_of("SamplingParams", **_SAMPLING)
GuidedDecodingParams = dataclass_of("GuidedDecodingParams")
SchedulingParams = dataclass_of("SchedulingParams")
DisaggregatedParams = dataclass_of("DisaggregatedParams", __post_init__=_check_disaggregated)


@dataclasses.dataclass
class Logprob:
    """Log-probability of a token, and its rank among all (1 is the likeliest)."""

    logprob: float
    rank: int | None = None
