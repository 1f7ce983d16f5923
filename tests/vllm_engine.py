"""The vllm engine over vLLM's double, ready for tests."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine_calls import running
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import read_model_facts
from workers.engines.vllm.adapter import VllmAdapter
from workers.engines.vllm.library import load_library
from workers.engines.vllm.settings import VLLM_RULES
from workers.flags import DisaggregationMode

CONFIG: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 512,
}


def new_engine(checkpoint: Path, mode: DisaggregationMode = "prefill", **config: Any) -> LibraryEngine:
    """An engine in this mode over the double with CONFIG and these settings."""
    lib = load_library(mode=mode)
    typed = {"model": str(checkpoint)}
    loaded = VLLM_RULES.load(lib.engine_args, mode, override=json.dumps(CONFIG | config), typed=typed)
    return LibraryEngine(VllmAdapter(loaded, lib, read_model_facts(checkpoint)))


@asynccontextmanager
async def started(
    checkpoint: Path, mode: DisaggregationMode = "prefill", **options: Any
) -> AsyncGenerator[LibraryEngine, None]:
    """A running new engine, which must hold nothing at the end of the test; see `new_engine`."""
    async with running(new_engine(checkpoint, mode, **options), may_fail=True) as (engine,):
        yield engine


def core(engine: LibraryEngine) -> Any:
    """The double's core in the engine."""
    adapter: Any = engine.adapter
    return adapter.llm._core  # noqa: SLF001  only tests need it
