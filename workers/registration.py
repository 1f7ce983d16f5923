"""A worker's entry in the registry, from its warm-up on."""

import asyncio
import logging
from contextlib import AsyncExitStack, ExitStack, aclosing
from functools import partial

import msgspec

from baton.discovery import Discovery
from baton.messages import Role, WorkerInfo
from baton.pace import Pulse
from baton.pairing import trial_request, try_pair, why_not_paired
from baton.process import needed
from baton.streams import public_name
from baton.telemetry import Line
from baton.transport import Respond, Transport
from workers.flags import WorkerSettings

log = logging.getLogger(__name__)

_TOUCH_EVERY_S = 1.0
# Connecting takes milliseconds to seconds; slower peers are not waited for.
PAIR_TIMEOUT_S = 20.0


async def stay_registered(
    card: WorkerInfo,
    respond: Respond,
    discovery: Discovery,
    transport: Transport,
    *,
    settings: WorkerSettings,
) -> None:
    """Stay registered until cancelled: visible to peers at once, to clients when every pair is warm."""
    async with AsyncExitStack() as registered:
        warming = msgspec.structs.replace(card, is_ready=False)
        await needed(settings.wires.registry_name(), _replace(registered, discovery, warming))
        is_dynamo = settings.wires.plane == "dynamo"  # a router of Dynamo's hands over, not its workers
        cold_peers = () if is_dynamo else await warm_up_pairs(card, respond, discovery, transport)
        card = msgspec.structs.replace(card, cold_peers=cold_peers)
        await _replace(registered, discovery, card)
        fields = {"worker": card.worker_id, "name": card.name, "endpoint": card.endpoint}
        log.info(Line("ready", **fields, address=public_name(card.address), kv=card.kv_transfer))
        with ExitStack() as fresh:
            if settings.ready_file is not None:
                settings.ready_file.touch()
                fresh.callback(settings.ready_file.unlink, missing_ok=True)
                fresh.callback(Pulse(_TOUCH_EVERY_S, settings.ready_file.touch).stop)
            await asyncio.Event().wait()


async def _replace(registered: AsyncExitStack, discovery: Discovery, card: WorkerInfo) -> None:
    """Register `card` instead of what `registered` holds; one of the two is registered at any moment."""
    async with AsyncExitStack() as before:
        before.push_async_exit(registered.pop_all())
        await registered.enter_async_context(discovery.register(card))


async def warm_up_pairs(
    card: WorkerInfo, respond: Respond, discovery: Discovery, transport: Transport
) -> tuple[str, ...]:
    """Try a handoff with each peer; returns the ids of those that failed within `PAIR_TIMEOUT_S`. The worker
    of `card` is registered and served by `respond`: of two that start together, one sees the other."""
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
    try:
        async with asyncio.timeout(PAIR_TIMEOUT_S):
            await try_pair(prefill, decode, trial_request("warm-up", card, peer, deadline_s=PAIR_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001  a failing peer must not stop this worker's start
        log.warning("cold pair worker=%s peer=%s error=%r", card.worker_id, peer.worker_id, error)
        return False
    log.info("warm pair worker=%s peer=%s", card.worker_id, peer.worker_id)
    return True
