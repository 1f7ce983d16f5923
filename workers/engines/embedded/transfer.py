"""KV transfers of requests: prefill offers and waits, decode pulls into its own blocks."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE, KvHandoff, KvLayout, TokenChunk, TokenLogprob
from workers.engines.embedded.runner import VERSIONS
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Phase
from workers.engines.embedded.steps import Call, StepLoop
from workers.kv.transceiver import CacheTransceiver, Ticket


class Transfers:
    """Both ends of a handoff.

    The decode end pulls only what it has not cached: a payload is in token order, so that is its end. The
    prefill end copies the KV into a contiguous buffer and keeps the blocks pinned while the copy is
    offered, so the pool's size bounds the copies too. `ttl_s` is the lifetime of an offer.
    """

    def __init__(self, steps: StepLoop, transceiver: CacheTransceiver | None, ttl_s: float) -> None:
        self.num_handoffs = 0
        self.num_expired = 0
        self.moved_bytes = 0
        self.move_s = 0.0
        self.steps = steps
        self._transceiver = transceiver
        self._ttl_s = ttl_s

    async def hand_over(self, call: Call, first: TokenChunk) -> AsyncGenerator[KvHandoff, None]:
        """Yield the handoff once the prompt's KV is offered; end when it has moved."""
        steps, transceiver = self.steps, self._wire()
        buffer = await steps.on_thread(steps.runner.gather, call.sequence)
        ticket = transceiver.offer(buffer)
        try:
            if call.sequence.phase is not Phase.PINNED:  # the deadline came first
                await call.next_chunk()
            ttl_s = min(self._ttl_s, call.deadline.when() - asyncio.get_running_loop().time())
            self.num_handoffs += 1
            yield self._handoff(call, first, ticket, ttl_s)
            try:
                self.moved_bytes += await asyncio.wait_for(transceiver.moved(ticket), ttl_s)
            except TimeoutError:
                self.num_expired += 1
                raise HandoffFailed(f"no decode worker pulled the KV within {ttl_s:.3g} s") from None
        finally:
            transceiver.withdraw(ticket)
            steps.runner.staging.give_back(buffer)

    def _wire(self) -> CacheTransceiver:
        if self._transceiver is None:
            raise HandoffFailed("this worker has no transceiver: set cache_transceiver_config")
        return self._transceiver

    def _handoff(self, call: Call, first: TokenChunk, ticket: Ticket, ttl_s: float) -> KvHandoff:
        state = HandoffState(
            version=VERSIONS,
            layout=self.steps.runner.pool.layout,
            ticket=ticket,
            logprob=first.logprobs[0] if first.logprobs else None,
            num_cached_tokens=call.sequence.num_cached,
        )
        call.sequence.spent.lap("computed_s")
        return KvHandoff(
            first_token=first.token_ids[0],
            num_prompt_tokens=call.sequence.num_computed,
            ttl_s=ttl_s,
            engine_state=msgspec.msgpack.encode(state),
            waited_s=call.sequence.spent.waited_s,
            computed_s=call.sequence.spent.computed_s,
        )

    async def take_over(self, call: Call, handoff: KvHandoff) -> None:
        """Pull the KV once the call has blocks, store it, and decode from the first token."""
        runner, num_tokens = self.steps.runner, len(call.sequence.token_ids)
        transceiver = self._wire()
        loop = asyncio.get_running_loop()
        num_bytes = runner.pool.num_handoff_bytes(num_tokens)
        state = opened(handoff, layout=runner.pool.layout, num_tokens=num_tokens, num_bytes=num_bytes)
        if not 0 <= handoff.first_token < runner.vocab_size:
            raise HandoffFailed(
                f"first token {handoff.first_token} is not in the vocabulary of {runner.vocab_size}"
            )
        expires_at = loop.time() + handoff.ttl_s
        try:
            async with asyncio.timeout_at(expires_at):
                await call.admitted.wait()
        except TimeoutError:
            raise HandoffFailed(f"the handoff's {handoff.ttl_s:.3g} s expired in the queue") from None
        if call.sequence.phase is not Phase.PULLING:
            return  # what ended the call is in its outbox
        num_lacking_bytes = runner.pool.num_handoff_bytes(num_tokens - call.sequence.num_computed)
        buffer = await self.steps.on_thread(runner.staging.take, num_lacking_bytes)
        try:
            began_at = loop.time()
            await transceiver.pull(state.ticket, buffer, expires_at - began_at)
            self.move_s += loop.time() - began_at
            self.moved_bytes += buffer.num_bytes
            if call.sequence.phase is Phase.PULLING:  # otherwise the blocks may have a new owner
                await self.steps.on_thread(runner.scatter, buffer, call.sequence)
        finally:
            runner.staging.give_back(buffer)
        if call.sequence.phase is Phase.PULLING:
            self.num_handoffs += 1
            call.sequence.num_cached = state.num_cached_tokens
            call.sequence.num_moved_bytes = buffer.num_bytes
            self.steps.resume(call, Sampled(handoff.first_token, state.logprob))


class HandoffState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="embedded-2"):
    """The KV's location and shape, the first token's log-probability if the request asked for it, and how
    many of the prompt's tokens prefill found in its cache.

    The tag names the engine and the payload's layout, so that no other engine's state can be decoded.
    """

    version: str
    layout: KvLayout
    ticket: Ticket
    logprob: TokenLogprob | None = None
    num_cached_tokens: int = 0


def opened(handoff: KvHandoff, *, layout: KvLayout, num_tokens: int, num_bytes: int) -> HandoffState:
    """The state of a handoff for a pool with `layout` and a request of `num_tokens` with `num_bytes` of KV.

    Raises HandoffFailed, naming both values, if its KV is another.
    """
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
