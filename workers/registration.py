"""A worker's entry in the registry, from its warm-up on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from baton.discovery import Discovery
from baton.messages import WorkerInfo
from baton.process import needed
from baton.streams import public_name
from workers.ready_file import beating

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0

WarmUp = Callable[[WorkerInfo], Awaitable[tuple[str, ...]]]
"""Tries the worker's pairs; returns the ids of the peers with which that failed."""


async def stay_registered(
    card: WorkerInfo,
    discovery: Discovery,
    *,
    registry_name: str,
    warm_up: WarmUp,
    kv_paths: Callable[[], str],
    ready_file: Path | None,
) -> None:
    """Stay registered until cancelled: visible to peers at once, to clients when every pair is warm.

    `kv_paths` names what KV transfers took so far; a new one is shown within a second.
    """
    async with AsyncExitStack() as registered:
        warming = msgspec.structs.replace(card, is_ready=False)
        await needed(registry_name, _replace(registered, discovery, warming))
        card = msgspec.structs.replace(card, cold_peers=await warm_up(card))
        shown = _labelled(card, kv_paths())
        await _replace(registered, discovery, shown)
        log.info(
            "ready worker=%s endpoint=%s address=%s kv=%s",
            card.worker_id,
            card.endpoint,
            public_name(card.address),
            shown.kv_transfer,
        )
        with beating(ready_file):
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                if (now := _labelled(card, kv_paths())) != shown:
                    shown = now
                    log.info("kv moves worker=%s kv=%s", card.worker_id, shown.kv_transfer)
                    await _replace(registered, discovery, shown)


def _labelled(card: WorkerInfo, kv_paths: str) -> WorkerInfo:
    label = f"{card.kv_transfer} ({kv_paths})" if kv_paths else card.kv_transfer
    return msgspec.structs.replace(card, kv_transfer=label)


async def _replace(registered: AsyncExitStack, discovery: Discovery, card: WorkerInfo) -> None:
    """Register `card` instead of what `registered` holds; one of the two is registered at any moment."""
    async with AsyncExitStack() as before:
        before.push_async_exit(registered.pop_all())
        await registered.enter_async_context(discovery.register(card))
