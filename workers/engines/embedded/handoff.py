"""The embedded engine's `engine_state` of a handoff, and its checks."""

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE, KvHandoff, KvLayout, TokenLogprob
from workers.kv.transceiver import Ticket


class HandoffState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="embedded-1"):
    """The KV's location and shape, the first token's log-probability if the request asked for it, and how
    many of the prompt's tokens prefill found in its cache.

    The tag names the engine and the payload's layout, so that no other engine's state can be decoded.
    """

    version: str
    layout: KvLayout
    ticket: Ticket
    logprob: TokenLogprob | None = None
    num_cached_tokens: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandoffState)


def pack(state: HandoffState) -> bytes:
    """Encode `KvHandoff.engine_state`."""
    return _ENCODER.encode(state)


def unpack(handoff: KvHandoff, *, version: str, layout: KvLayout) -> HandoffState:
    """Decode a handoff for an engine of `version` whose pool has `layout`.

    Raises HandoffFailed, naming both values, if its KV does not fit this pool.
    """
    try:
        state = _DECODER.decode(handoff.engine_state)
    except UNDECODABLE as error:
        raise HandoffFailed(
            f"the handoff of worker {handoff.worker_id} is not the embedded engine's: {error}"
        ) from error
    for what, theirs, ours in (("engine", state.version, version), ("KV layout", state.layout, layout)):
        if theirs != ours:
            raise HandoffFailed(
                f"{what} of prefill worker {handoff.worker_id} is {theirs}, of this worker {ours}"
            )
    return state


def check_fits(
    handoff: KvHandoff, state: HandoffState, *, num_tokens: int, num_bytes: int, vocab_size: int
) -> None:
    """Check that the payload is the KV of this request's `num_tokens`, `num_bytes` long, and that the first
    token is in the vocabulary. Raises HandoffFailed.
    """
    if handoff.num_prompt_tokens != num_tokens:
        raise HandoffFailed(f"the handoff has {handoff.num_prompt_tokens} tokens, the request {num_tokens}")
    if state.ticket.num_bytes != num_bytes:
        raise HandoffFailed(
            f"the handoff offers {state.ticket.num_bytes} bytes of KV, but {num_bytes} are needed"
        )
    if not 0 <= handoff.first_token < vocab_size:
        raise HandoffFailed(f"first token {handoff.first_token} is not in the vocabulary of {vocab_size}")
