"""Embedded engines over the tiny checkpoint, with a transceiver inside the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.messages import Sampling
from tests.engine_calls import running
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.scheduler import Scheduler, Sequence
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.kv.transceiver import CacheTransceiver

BLOCK = 8  # tokens


def new_engine(checkpoint: Path, wire: CacheTransceiver | None = None, **options: Any) -> EmbeddedEngine:
    """An engine that is not started; `options` are settings, or those of the KV pool."""
    pool: dict[str, Any] = {
        name: options.pop(name) for name in ("enable_block_reuse", "max_tokens") if name in options
    }
    settings = EmbeddedSettings(
        kv_cache_config=KvCacheSettings(**{"tokens_per_block": BLOCK, "max_tokens": 2048, **pool}), **options
    )
    return EmbeddedEngine(settings, model_path=checkpoint, transceiver=wire)


@asynccontextmanager
async def started(
    checkpoint: Path, wire: CacheTransceiver | None = None, **options: Any
) -> AsyncIterator[EmbeddedEngine]:
    """A started engine that must hold nothing at the end of the test."""
    async with running(new_engine(checkpoint, wire, **options)) as (engine,):
        yield engine


def scheduler(*, num_blocks: int = 100, reuses_blocks: bool = False, **options: Any) -> Scheduler:
    """Blocks of 4 tokens, a context of 64; 4 sequences and 16 tokens in a step, unless `options` say more."""
    pool = KvCacheSettings(tokens_per_block=4, enable_block_reuse=reuses_blocks)
    values: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "kv_cache_config": pool}
    settings = EmbeddedSettings(**(values | options))
    return Scheduler(settings, num_blocks=num_blocks, context_length=64, vocab_size=1000)


def sequence(
    num_tokens: int, max_tokens: int = 3, *, pulls_kv: bool = False, hands_off: bool = False
) -> Sequence:
    return Sequence(
        token_ids=list(range(num_tokens)),
        num_prompt=num_tokens,
        sampling=Sampling(max_tokens=max_tokens, seed=0),
        num_reserved=num_tokens if hands_off else num_tokens + max_tokens,
        pulls_kv=pulls_kv,
        hands_off=hands_off,
    )
