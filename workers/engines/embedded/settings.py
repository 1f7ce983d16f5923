"""The embedded engine's settings; keys are named as in TensorRT-LLM if they mean the same."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from workers.flags import Speculate
from workers.settings import AtLeastOne, NotNegative, require

OnlyOne = Annotated[int, msgspec.Meta(ge=1, le=1)]


@dataclass(frozen=True, kw_only=True)
class KvCacheSettings:
    """The paged KV pool. `tokens_per_block` must be equal on prefill and decode workers.

    The pool holds `max_tokens` tokens or, if less, what fits into `free_gpu_memory_fraction` of the GPU
    memory left after the weights; on a CPU, `max_tokens` or 1 GiB. `enable_block_reuse`: a prompt that begins
    as an earlier one of the same cache salt computes only the rest."""

    tokens_per_block: AtLeastOne = 32
    max_tokens: AtLeastOne | None = None
    free_gpu_memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    enable_block_reuse: bool = True


@dataclass(frozen=True, kw_only=True)
class CacheTransceiverSettings:
    """KV transfer between workers; a prefilled cache is kept for `kv_transfer_timeout_ms`."""

    backend: Literal["DEFAULT", "UCX", "TCP"] = "DEFAULT"
    kv_transfer_timeout_ms: AtLeastOne = 60_000


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """A step runs at most `max_batch_size` requests and `max_num_tokens` tokens; longer prompts run in parts.

    `max_seq_len` None is the model's context length. `max_queue_size` requests may wait. `dtype` "auto" is
    float32 on a CPU, bfloat16 on a GPU. `num_threads` is for torch on the compute thread.
    `enable_chunked_prefill` must be true, the parallel sizes 1. `speculate`: how the next tokens of
    answers are guessed."""

    max_batch_size: AtLeastOne = 32
    max_num_tokens: int = 512
    max_seq_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_queue_size: NotNegative = 256
    enable_chunked_prefill: bool = True
    kv_cache_config: KvCacheSettings = field(default_factory=KvCacheSettings)
    cache_transceiver_config: CacheTransceiverSettings = field(default_factory=CacheTransceiverSettings)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_threads: AtLeastOne = 1
    speculate: Speculate | None = None
    tensor_parallel_size: OnlyOne = 1
    moe_expert_parallel_size: OnlyOne = 1

    def __post_init__(self) -> None:
        require(
            self.max_num_tokens >= self.max_batch_size,
            "max_num_tokens",
            self.max_num_tokens,
            f"at least max_batch_size ({self.max_batch_size}): a step has one token of each request",
        )
        require(
            self.enable_chunked_prefill, "enable_chunked_prefill", False, "true: long prompts run in parts"
        )
