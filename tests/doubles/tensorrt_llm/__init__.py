"""A double of TensorRT-LLM: the LLM API's surface and its traps, around the embedded engine."""

from tensorrt_llm.llmapi import LLM
from tensorrt_llm.params import DisaggregatedParams, SamplingParams

__version__ = "1.3.0rc29+double"
__all__ = ["LLM", "DisaggregatedParams", "SamplingParams", "__version__"]
