"""Builds the LLM in the main thread, and runs its first request."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.engines.trtllm.library import Library
from workers.engines.trtllm.model import ModelFacts
from workers.engines.trtllm.schema import first_invalid
from workers.settings import InvalidField, Loaded

log = logging.getLogger(__name__)

_WARM_UP_S = 300.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def open_llm(lib: Library, loaded: Loaded[dict[str, Any]]) -> Any:
    """The LLM, loaded. Blocks for minutes, and the event loop with it: TensorRT-LLM starts MPI and sets
    signal handlers, which wants the main thread, and nothing of this worker depends on the loop yet.

    Raises ValueError with one line for the user.
    """
    log.info("loading model=%s with TensorRT-LLM %s", loaded.settings["model"], lib.version)
    with _dying_at_once():
        try:
            return lib.llm(**loaded.settings)
        except ValueError as error:
            raise ValueError(_explained(first_invalid(error), loaded.sources)) from error
        except Exception as error:
            log.exception("TensorRT-LLM did not start")
            raise ValueError(f"TensorRT-LLM did not start: {type(error).__name__}: {error}") from error


async def warm_up(llm: Any, lib: Library, facts: ModelFacts) -> None:
    """One short request, prefill and decode: what is lazy happens before the first client comes.

    Raises TimeoutError, and whatever breaks the request.
    """
    params = lib.sampling_params(
        max_tokens=2, end_id=facts.eos_token_id, pad_id=facts.eos_token_id, ignore_eos=True, detokenize=False
    )
    async with asyncio.timeout(_WARM_UP_S):
        await llm.generate_async([0, 1, 2, 3], params).aresult()


@contextmanager
def _dying_at_once() -> Iterator[None]:
    """Let signals end the process by themselves: the loop cannot see them, and there is nothing to drain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explained(error: ValueError, sources: dict[str, str]) -> str:
    if isinstance(error, InvalidField) and error.name in sources:
        return f"{sources[error.name]}: {error.name}: {error}"
    return f"TensorRT-LLM refuses the settings: {error}"
