"""The warm-up of a new worker: a short request through each of its pairs, before clients use them."""

import asyncio
import logging
from contextlib import aclosing
from functools import partial

from baton.discovery import Discovery
from baton.messages import Role, WorkerInfo
from baton.pairing import trial_request, try_pair, why_not_paired
from baton.transport import Respond, Transport

log = logging.getLogger(__name__)

# Connecting takes milliseconds to seconds; slower peers are not waited for.
PAIR_TIMEOUT_S = 20.0


async def warm_up_pairs(
    card: WorkerInfo, respond: Respond, discovery: Discovery, transport: Transport
) -> tuple[str, ...]:
    """Try a handoff with each peer; returns the ids of those that failed within `PAIR_TIMEOUT_S`, each
    logged.

    The worker of `card` must already be registered and served by `respond`: of two workers that start
    together, at least one then sees the other.
    """
    if not card.kv_transfer:
        return ()
    peers = await _peers(card, discovery)
    are_warm = await asyncio.gather(*(_is_warmed_up(card, respond, peer, transport) for peer in peers))
    return tuple(peer.worker_id for peer, is_warm in zip(peers, are_warm, strict=True) if not is_warm)


async def _peers(card: WorkerInfo, discovery: Discovery) -> list[WorkerInfo]:
    """The pairable workers of the model's other role; logs why others are refused."""
    async with aclosing(discovery.watch()) as snapshots:
        fleet = await anext(snapshots)
    peers = []
    for peer in fleet:
        if peer.model != card.model or peer.role is card.role:
            continue
        prefill, decode = (card, peer) if card.role is Role.PREFILL else (peer, card)
        if reason := why_not_paired(prefill, decode):
            log.warning("refused pair %s", reason)
        else:
            peers.append(peer)
    return peers


async def _is_warmed_up(card: WorkerInfo, respond: Respond, peer: WorkerInfo, transport: Transport) -> bool:
    remote: Respond = partial(transport.call, peer.address)
    prefill, decode = (respond, remote) if card.role is Role.PREFILL else (remote, respond)
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(PAIR_TIMEOUT_S):
            await try_pair(prefill, decode, trial_request("warm-up", card, peer, deadline_s=PAIR_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001  a failing peer must not stop this worker's start
        log.warning("cold pair worker=%s peer=%s error=%r", card.worker_id, peer.worker_id, error)
        return False
    took_s = asyncio.get_running_loop().time() - began
    log.info("warm pair worker=%s peer=%s took_s=%.3f", card.worker_id, peer.worker_id, took_s)
    return True
