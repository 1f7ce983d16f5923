"""The vllm engine over vLLM's double, ready for tests."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.waiting import until
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
    model = read_model_facts(checkpoint)
    return LibraryEngine(VllmAdapter(loaded, lib, model), model)


@asynccontextmanager
async def started(
    checkpoint: Path, mode: DisaggregationMode = "prefill", **options: Any
) -> AsyncGenerator[LibraryEngine, None]:
    """A running new engine, which must hold nothing at the end of the test; see `new_engine`."""
    engine = new_engine(checkpoint, mode, **options)
    try:
        await engine.start()
        yield engine
        await until(lambda: is_idle(engine))
    finally:
        await engine.stop()


def is_idle(engine: LibraryEngine) -> bool:
    """Whether nothing runs, waits, is held or pinned, or the core is dead."""
    stats = engine.stats()
    held = (stats.num_running, stats.num_waiting, stats.kv_used_blocks, stats.kv_pinned_blocks)
    return not any(held) or engine._broke.is_set()  # noqa: SLF001  no other way to know


def core(engine: LibraryEngine) -> Any:
    """The double's core in the engine."""
    adapter: Any = engine.adapter
    return adapter.llm._core  # noqa: SLF001  only tests need it
