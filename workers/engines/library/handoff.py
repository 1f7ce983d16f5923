"""The handoff envelope of third-party engines, written by prefill and checked by decode."""

from typing import Any

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE, GenerateRequest, KvHandoff, TokenChunk


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="engine-1"):
    """`KvHandoff.engine_state`: the engine's own parameters, and the number of prompt tokens that prefill
    found in its cache, since decode counts the whole transferred prompt as cached.
    """

    engine: str
    version: str
    num_cached_tokens: int
    params: dict[str, Any]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


class Handoffs:
    """Writes and opens the handoffs of one worker's engine and version."""

    def __init__(self, engine: str, version: str, *, worker_id: str, incarnation: str) -> None:
        self._engine = engine
        self._version = version
        self._worker_id = worker_id
        self._incarnation = incarnation

    def write(
        self,
        request: GenerateRequest,
        params: dict[str, Any],
        *,
        first_token: int,
        num_cached_tokens: int,
        ttl_s: float,
        first_chunk: TokenChunk | None = None,
    ) -> KvHandoff:
        """The handoff of this request's prompt. Raises HandoffFailed for parameters that cannot be
        encoded.
        """
        envelope = Envelope(
            engine=self._engine, version=self._version, num_cached_tokens=num_cached_tokens, params=params
        )
        try:
            engine_state = _ENCODER.encode(envelope)
        except (TypeError, OverflowError) as error:
            raise HandoffFailed(f"{self._engine}'s parameters cannot travel: {error}") from error
        return KvHandoff(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            first_token=first_token,
            num_prompt_tokens=len(request.token_ids),
            ttl_s=ttl_s,
            engine_state=engine_state,
            first_chunk=first_chunk,
        )

    def open(self, handoff: KvHandoff, num_tokens: int) -> Envelope:
        """Open a handoff for a request of `num_tokens`. Raises HandoffFailed, naming both values, if it is
        for another engine, version or prompt.
        """
        source = handoff.worker_id
        try:
            envelope = _DECODER.decode(handoff.engine_state)
        except UNDECODABLE as error:
            raise HandoffFailed(f"the handoff of worker {source} is not {self._engine}'s: {error}") from error
        if envelope.engine != self._engine:
            raise HandoffFailed(
                f"the handoff of worker {source} is {envelope.engine}'s, not {self._engine}'s"
            )
        if envelope.version != self._version:
            theirs, ours = envelope.version, self._version
            raise HandoffFailed(
                f"{self._engine} of prefill worker {source} is {theirs}, of this worker {ours}"
            )
        num_handed_over = handoff.num_prompt_tokens + (handoff.first_chunk is not None)
        if num_handed_over != num_tokens:
            raise HandoffFailed(f"the handoff has {num_handed_over} tokens, its request {num_tokens}")
        return envelope
