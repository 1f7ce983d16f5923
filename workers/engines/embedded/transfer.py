"""What a handoff of the embedded engine says, and to whom it is of use."""

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE, KvHandoff, KvLayout, TokenChunk, TokenLogprob
from workers.engines.embedded.runner import VERSIONS
from workers.engines.embedded.scheduler import Sequence
from workers.kv.transceiver import Ticket


class HandoffState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="embedded-2"):
    """The KV's location and shape, the first token's log-probability if the request asked for it, and how
    many of the prompt's tokens prefill found in its cache.

    The tag names the engine and the payload's layout, so that no other engine's state can be decoded."""

    version: str
    layout: KvLayout
    ticket: Ticket
    logprob: TokenLogprob | None = None
    num_cached_tokens: int = 0


def handoff_of(
    sequence: Sequence, first: TokenChunk, ticket: Ticket, layout: KvLayout, ttl_s: float
) -> KvHandoff:
    """The handoff of a prompt whose KV is offered."""
    state = HandoffState(
        version=VERSIONS,
        layout=layout,
        ticket=ticket,
        logprob=first.logprobs[0] if first.logprobs else None,
        num_cached_tokens=sequence.num_cached,
    )
    sequence.spent.lap("computed_s")
    return KvHandoff(
        first_token=first.token_ids[0],
        num_prompt_tokens=sequence.num_computed,
        ttl_s=ttl_s,
        engine_state=msgspec.msgpack.encode(state),
        waited_s=sequence.spent.waited_s,
        computed_s=sequence.spent.computed_s,
    )


def opened(handoff: KvHandoff, *, layout: KvLayout, num_tokens: int, num_bytes: int) -> HandoffState:
    """The state of a handoff for a pool with `layout` and a request of `num_tokens` with `num_bytes` of KV.

    Raises HandoffFailed, naming both values, if its KV is another."""
    sender = f"prefill worker {handoff.worker_id}"
    try:
        state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
    except UNDECODABLE as error:
        raise HandoffFailed(f"the handoff of {sender} is not the embedded engine's: {error}") from error
    for what, theirs, ours in (
        ("engine", state.version, VERSIONS),
        ("KV layout", state.layout, layout),
        ("number of tokens", handoff.num_prompt_tokens, num_tokens),
        ("number of KV bytes", state.ticket.num_bytes, num_bytes),
    ):
        if theirs != ours:
            raise HandoffFailed(f"{what} of {sender} is {theirs}, of this worker {ours}")
    return state
