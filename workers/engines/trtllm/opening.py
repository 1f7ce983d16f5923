"""Builds the LLM in the main thread and runs its first request."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from workers.engines.loading import dying_at_once
from workers.engines.model_facts import ModelFacts
from workers.engines.trtllm.library import Library
from workers.engines.trtllm.schema import first_invalid
from workers.engines.trtllm.watchdog import Leave, leaving_after
from workers.settings import InvalidField, Loaded

log = logging.getLogger(__name__)

_WARM_UP_S = 300.0


def open_llm(lib: Library, loaded: Loaded[dict[str, Any]], limit_s: float, leave: Leave) -> Any:
    """Load the LLM. Blocks the event loop for minutes: TensorRT-LLM starts MPI and sets signal handlers,
    which requires the main thread, and nothing in this worker depends on the loop yet. Ends the process
    through `leave` after `limit_s`.

    Raises ValueError with one line for the user.
    """
    log.info("loading model=%s with TensorRT-LLM %s", loaded.settings["model"], lib.version)
    with dying_at_once(), leaving_after(limit_s, leave, "loading the model"):
        try:
            return lib.llm(**loaded.settings)
        except ValueError as error:
            raise ValueError(_explained(first_invalid(error), loaded.sources)) from error
        except Exception as error:  # reported in one line to the operator
            log.exception("TensorRT-LLM did not start")
            raise ValueError(f"TensorRT-LLM did not start: {type(error).__name__}: {error}") from error


async def warm_up(llm: Any, lib: Library, facts: ModelFacts, options: Mapping[str, Any]) -> None:
    """Run one short request, prefill and decode, so that lazy initialisation precedes the first client.
    `options` are those of every request.

    Raises TimeoutError, and whatever breaks the request.
    """
    params = lib.sampling_params(
        max_tokens=2, end_id=facts.eos_token_id, pad_id=facts.eos_token_id, ignore_eos=True, detokenize=False
    )
    async with asyncio.timeout(_WARM_UP_S):
        await llm.generate_async([0, 1, 2, 3], params, **options).aresult()


def _explained(error: ValueError, sources: dict[str, str]) -> str:
    if isinstance(error, InvalidField) and error.name in sources:
        return f"{sources[error.name]}: {error.name}: {error}"
    return f"TensorRT-LLM refuses the settings: {error}"
