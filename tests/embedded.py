"""Embedded engines over the tiny checkpoint, with a transceiver inside the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.messages import Role
from tests.engine_calls import running
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.kv.transceiver import CacheTransceiver

BLOCK = 8  # tokens


def new_engine(
    checkpoint: Path, wire: CacheTransceiver | None = None, role: Role = Role.DECODE, **options: Any
) -> EmbeddedEngine:
    """An engine that is not started; `options` are settings, or those of the KV pool."""
    pool: dict[str, Any] = {
        name: options.pop(name) for name in ("enable_block_reuse", "max_tokens") if name in options
    }
    settings = EmbeddedSettings(
        kv_cache_config=KvCacheSettings(**{"tokens_per_block": BLOCK, "max_tokens": 2048, **pool}), **options
    )
    return EmbeddedEngine(settings, model_path=checkpoint, role=role, transceiver=wire)


@asynccontextmanager
async def started(
    checkpoint: Path, wire: CacheTransceiver | None = None, role: Role = Role.DECODE, **options: Any
) -> AsyncIterator[EmbeddedEngine]:
    """A started engine that must hold nothing at the end of the test."""
    async with running(new_engine(checkpoint, wire, role, **options)) as (engine,):
        yield engine
