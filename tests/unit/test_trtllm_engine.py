"""The trtllm engine over TensorRT-LLM's double: what it announces, asks for and counts, and how it stops."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine_calls import ask, tokens
from tests.tiny_gpt_oss import CONTEXT_LENGTH
from tests.trtllm_engine import CONFIG, new_engine, started
from tests.waiting import PATIENCE_S, until
from workers.engines.library.engine import LibraryEngine
from workers.engines.trtllm.watchdog import Patience


def library(engine: LibraryEngine) -> Any:
    """The double's LLM in the engine."""
    adapter: Any = engine.adapter
    return adapter.llm


async def test_the_worker_announces_what_it_serves(checkpoint: Path) -> None:
    engine = new_engine(checkpoint)
    try:
        info = await engine.start()
    finally:
        await engine.stop()
    assert (info.engine, info.context_length) == ("trtllm", CONTEXT_LENGTH)
    assert info.kv_transfer == "ucx-cpp-v1 (tp 1)"
    assert (info.max_batch_size, info.max_queue_size) == (CONFIG["max_batch_size"], 256)
    layout = info.kv_layout
    assert layout is not None
    assert (layout.dtype, layout.tokens_per_block, layout.tensor_parallel_size) == ("bfloat16", 8, None)
    assert layout.max_handoff_tokens == 256


@pytest.mark.parametrize("reuses", [True, False])
async def test_what_was_answered_is_expected_in_the_cache_if_blocks_are_reused(
    checkpoint: Path, reuses: bool
) -> None:
    cache = CONFIG["kv_cache_config"] | {"enable_block_reuse": reuses}
    async with started(checkpoint, kv_cache_config=cache) as engine:
        await tokens(engine.decode(ask(117)))
        assert engine.num_lacking_tokens(ask(117)) == (117 - 64 if reuses else 117)


async def test_a_stopped_engine_is_shut_down_and_watched_no_more(checkpoint: Path) -> None:
    def watching() -> bool:
        return "trtllm-loop" in {thread.name for thread in threading.enumerate()}

    left: list[int] = []
    engine = new_engine(checkpoint, leave=left.append, patience=Patience(shut_down_s=PATIENCE_S))
    await engine.start()
    llm = library(engine)
    assert watching()
    await engine.stop()
    await until(lambda: not watching())
    assert llm._executor is None  # noqa: SLF001  the double is ours
    await engine.stop()
    assert left == []
