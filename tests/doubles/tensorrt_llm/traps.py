"""The double's switches for TensorRT-LLM's occasional failures, each with its source."""

import dataclasses
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@dataclasses.dataclass
class Traps:
    """All off, unless the environment (`DOUBLE_TRTLLM_` and the name in capitals) or `sprung` says otherwise.

    * `build`: what `tensorrt_llm.__version__` is. From 1.4 on, Python and KV cache manager V2 are the
      default for every backend (#17495); 1.5 stands for a release without the C++ transceiver (#18248).
    * `dies_after`: the executor breaks after so many responses.
    * `gives_no_params`: a context_only result has no DisaggregatedParams.
    * `loads_s`, `imports_s`: how long the constructor or the import blocks. `prefill_s_a_token`: how slow a
      context_only request is.
    * `health_hangs`, `shutdown_hangs`: the calls never return, as with a dead rank; Dynamo calls
      `check_health` in a thread and bounds `shutdown` (engine_monitor.py)."""

    build: str = "1.3.0rc29+double"
    dies_after: int = -1
    gives_no_params: bool = False
    loads_s: float = 0.0
    imports_s: float = 0.0
    prefill_s_a_token: float = 0.0
    health_hangs: bool = False
    shutdown_hangs: bool = False

    @property
    def prefers_python(self) -> bool:
        """Whether the Python transceiver and KV cache manager V2 are the default."""
        return self.build.startswith(("1.4", "1.5"))


def _from_environment() -> Traps:
    given: dict[str, Any] = {}
    for name, default in dataclasses.asdict(Traps()).items():
        if (text := os.environ.get(f"DOUBLE_TRTLLM_{name.upper()}")) is not None:
            given[name] = type(default)(text)
    return Traps(**given)


TRAPS = _from_environment()
_released = threading.Event()


@contextmanager
def sprung(**traps: Any) -> Generator[None, None, None]:
    """Enable these traps in the context; at its end, hanging calls continue."""
    before = {name: getattr(TRAPS, name) for name in traps}
    for name, value in traps.items():
        setattr(TRAPS, name, value)
    _released.clear()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TRAPS, name, value)
        _released.set()


def hang() -> None:
    """Wait until `sprung` ends; forever without one."""
    _released.wait()
