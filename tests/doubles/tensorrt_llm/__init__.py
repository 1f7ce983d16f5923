"""A double of TensorRT-LLM: its LLM API and its traps, around the embedded engine."""

from tensorrt_llm.llmapi import LLM
from tensorrt_llm.params import DisaggregatedParams, SamplingParams
from tensorrt_llm.traps import TRAPS

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return str(TRAPS.build)
    raise AttributeError(name)
