"""The trtllm engine over TensorRT-LLM's double, ready for tests."""

import dataclasses
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine_calls import running
from tests.waiting import scaled
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import read_model_facts
from workers.engines.trtllm.adapter import TrtllmAdapter
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.trtllm.watchdog import Leave, Patience
from workers.flags import DisaggregationMode

KV_TIMEOUT_S = scaled(1.0)
CONFIG: dict[str, Any] = {
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
    "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 4096},
    "cache_transceiver_config": {
        "backend": "UCX",
        "max_tokens_in_buffer": 256,
        "kv_transfer_timeout_ms": round(KV_TIMEOUT_S * 1000),
    },
}


# The watchdog never runs: a request must notice the failure.
NO_WATCHDOG = Patience(poll_s=3600)


def no_exit(status: int) -> None:
    """Replaces the process exit."""


def new_engine(
    checkpoint: Path,
    *,
    mode: DisaggregationMode = "decode",
    leave: Leave = no_exit,
    patience: Patience = Patience(),  # noqa: B008  frozen
    classes: dict[str, Any] | None = None,
    **config: Any,
) -> LibraryEngine:
    """An engine over the double with CONFIG and these settings, and `classes` of the double replaced."""
    lib = dataclasses.replace(load_library(mode), **(classes or {}))
    override = json.dumps(CONFIG | config)
    loaded = TRTLLM_RULES.load(lib.args, mode, override=override, typed={"model": str(checkpoint)})
    model = read_model_facts(checkpoint)
    return LibraryEngine(TrtllmAdapter(loaded, lib, model, leave=leave, patience=patience))


def executor(engine: LibraryEngine) -> Any:
    """The double's executor in the engine."""
    adapter: Any = engine.adapter
    return adapter.llm._executor  # noqa: SLF001  only tests need it


@asynccontextmanager
async def started(checkpoint: Path, **options: Any) -> AsyncGenerator[LibraryEngine, None]:
    """A running new engine; see `new_engine`."""
    async with running(new_engine(checkpoint, **options), may_fail=True) as (engine,):
        yield engine
