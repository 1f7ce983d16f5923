"""The module of TensorRT-LLM's settings classes."""

from typing import Any

from tensorrt_llm.params import CacheTransceiverConfig, KvCacheConfig, llm_args

__all__ = ["CacheTransceiverConfig", "KvCacheConfig"]


def __getattr__(name: str) -> Any:
    if name == "TorchLlmArgs":
        return llm_args()
    raise AttributeError(name)
