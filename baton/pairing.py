"""Which prefill workers can hand their KV to which decode workers."""

import logging
import random
from collections.abc import Sequence
from contextlib import aclosing
from functools import cache, partial

from baton.errors import BatonError, EngineFailure
from baton.messages import GenerateRequest, KvHandoff, Role, Sampling, WorkerInfo, after_handoff
from baton.telemetry import Line
from baton.transport import Respond, Transport

log = logging.getLogger(__name__)


def why_not_paired(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why two workers cannot exchange KV, naming both values; None if they can.

    Versions must be equal too: another release may interpret a handoff differently. So must checkpoints that
    are known: KV of other weights has the same shape."""
    for name, left, right in (
        ("engine", prefill.engine, decode.engine),
        ("engine version", prefill.engine_version, decode.engine_version),
        ("kv transfer", _transceiver_kind(prefill.kv_transfer), _transceiver_kind(decode.kv_transfer)),
        ("checkpoint", prefill.checkpoint or decode.checkpoint, decode.checkpoint or prefill.checkpoint),
    ):
        if left != right:
            return f"{prefill.worker_id} -> {decode.worker_id}: {name} {left} is not {right}"
    ours, theirs = prefill.kv_layout, decode.kv_layout
    if ours == theirs:
        return None
    difference = f"kv layout {ours} is not {theirs}"
    if ours and theirs:  # all fields that differ, so that they can be fixed at once
        pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in ours.__struct_fields__)
        difference = ", ".join(
            f"{name} {left} is not {right}" for name, left, right in pairs if left != right
        )
    return f"{prefill.worker_id} -> {decode.worker_id}: {difference}"


def refused_pairs(workers: Sequence[WorkerInfo]) -> list[str]:
    """The reason for every pair of one model that cannot exchange KV."""
    prefills = [worker for worker in workers if worker.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.role is Role.DECODE]
    reasons = [why_not_paired(p, d) for p in prefills for d in decodes if p.model == d.model]
    return [reason for reason in reasons if reason is not None]


@cache
def _transceiver_kind(kv_transfer: str) -> str:
    return kv_transfer.split(" ", maxsplit=1)[0] or "none"


_NUM_BYTES = 256  # the first ids of every byte-level vocabulary


def trial_request(name: str, *workers: WorkerInfo, deadline_s: float) -> GenerateRequest:
    """Two tokens after a prompt of more than two blocks, as some engines move full blocks only. Random, since
    a cached prompt would not be moved."""
    layout, context_length = workers[0].kv_layout, min(worker.context_length for worker in workers)
    num_tokens = min(2 * (layout.tokens_per_block if layout else 1) + 1, context_length - 2)
    return GenerateRequest(
        request_id="-".join([name, *(worker.worker_id for worker in workers)]),
        model=workers[0].model,
        token_ids=random.choices(range(_NUM_BYTES), k=num_tokens),  # noqa: S311  no secret
        sampling=Sampling(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True),
        deadline_s=deadline_s,
    )


async def try_pair(prefill: Respond, decode: Respond, request: GenerateRequest) -> None:
    """Hand over like the frontend: the prefill call stays open until decode has the KV."""
    async with aclosing(prefill(request)) as pinned:
        handoff = await anext(pinned, None)
        if not isinstance(handoff, KvHandoff):
            raise EngineFailure(f"prefill returned {handoff} instead of a handoff")
        async with aclosing(decode(after_handoff(request, handoff))) as chunks:
            async for _ in chunks:
                pass


async def works(
    transport: Transport, worker: WorkerInfo, partner: WorkerInfo | None = None, *, limit_s: float
) -> bool:
    """Whether a trial through a worker, or through it and its partner, succeeds within `limit_s`."""
    request = trial_request("trial", worker, *([partner] if partner else []), deadline_s=limit_s)
    mine = partial(transport.call, worker.address)
    try:
        if partner is None:
            async with aclosing(mine(request)) as replies:
                await anext(replies)
        else:
            theirs = partial(transport.call, partner.address)
            pair = (mine, theirs) if worker.role is Role.PREFILL else (theirs, mine)
            await try_pair(*pair, request)
    except (BatonError, StopAsyncIteration) as error:
        log.info(Line("trial failed", request_id=request.request_id, error=repr(error)))
        return False
    return True
