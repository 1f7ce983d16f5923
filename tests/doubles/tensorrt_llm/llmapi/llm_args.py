"""Where TensorRT-LLM keeps its settings classes."""

from tensorrt_llm.params import CacheTransceiverConfig, KvCacheConfig, TorchLlmArgs

__all__ = ["CacheTransceiverConfig", "KvCacheConfig", "TorchLlmArgs"]
