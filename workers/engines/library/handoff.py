"""The envelope of a library's handoff, written by prefill and checked by decode."""

from typing import Any

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE, KvHandoff


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="engine-1"):
    """`KvHandoff.engine_state`: the library's own parameters, and the number of prompt tokens that prefill
    found in its cache, since decode counts the whole transferred prompt as cached.
    """

    engine: str
    version: str
    num_cached_tokens: int
    params: dict[str, Any]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def sealed(envelope: Envelope) -> bytes:
    """The envelope's bytes. Raises HandoffFailed for parameters that cannot be encoded."""
    try:
        return _ENCODER.encode(envelope)
    except (TypeError, OverflowError) as error:
        raise HandoffFailed(f"{envelope.engine}'s parameters cannot travel: {error}") from error


def opened(handoff: KvHandoff, engine: str, version: str, num_tokens: int) -> Envelope:
    """The envelope of a handoff for a request of `num_tokens`. Raises HandoffFailed, with both values, if it
    is for another library, version or prompt.
    """
    source = handoff.worker_id
    try:
        envelope = _DECODER.decode(handoff.engine_state)
    except UNDECODABLE as error:
        raise HandoffFailed(f"the handoff of worker {source} is not {engine}'s: {error}") from error
    num_handed_over = handoff.num_prompt_tokens + (handoff.first_chunk is not None)
    for what, theirs, ours in (
        ("library", envelope.engine, engine),
        (f"{engine} version", envelope.version, version),
        ("number of tokens", num_handed_over, num_tokens),
    ):
        if theirs != ours:
            raise HandoffFailed(f"the {what} of prefill worker {source}'s handoff is {theirs}, here {ours}")
    return envelope
