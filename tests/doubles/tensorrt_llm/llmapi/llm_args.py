"""The module of TensorRT-LLM's settings classes."""

from tensorrt_llm.params import CacheTransceiverConfig, KvCacheConfig, TorchLlmArgs

__all__ = ["CacheTransceiverConfig", "KvCacheConfig", "TorchLlmArgs"]
