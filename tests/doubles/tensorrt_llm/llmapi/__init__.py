"""The public names of `tensorrt_llm.llmapi`."""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.params import (
    CacheTransceiverConfig,
    DisaggregatedParams,
    GuidedDecodingParams,
    KvCacheConfig,
    SamplingParams,
    SchedulingParams,
    TorchLlmArgs,
)

LlmArgs = TorchLlmArgs

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LlmArgs",
    "SamplingParams",
    "SchedulingParams",
    "TorchLlmArgs",
]
