"""A trial: a short request through a worker, or through a pair of them, which shows that they work."""

import logging
import random
from contextlib import aclosing
from functools import partial

from baton.errors import BatonError, EngineFailure
from baton.messages import GenerateRequest, KvHandoff, Role, Sampling, WorkerInfo, after_handoff
from baton.transport import Respond, Transport

log = logging.getLogger(__name__)

_NUM_BYTES = 256  # the first ids of every byte-level vocabulary


def trial_request(name: str, *workers: WorkerInfo, deadline_s: float) -> GenerateRequest:
    """Two tokens after a prompt of more than two blocks, as some engines move full blocks only. Random, since
    a cached prompt would not be moved.
    """
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
        log.info("trial failed request_id=%s error=%r", request.request_id, error)
        return False
    return True
