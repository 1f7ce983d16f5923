"""A double of TensorRT-LLM: its LLM API and its traps, around the embedded engine."""

import sys
import time

from tensorrt_llm.llmapi import LLM
from tensorrt_llm.params import DisaggregatedParams, SamplingParams
from tensorrt_llm.traps import TRAPS

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams"]

if TRAPS.imports_s:
    sys.stderr.write("importing\n")
    time.sleep(TRAPS.imports_s)  # as long as an import takes


def __getattr__(name: str) -> str:
    if name == "__version__":
        return str(TRAPS.build)
    raise AttributeError(name)
