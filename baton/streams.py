"""The caller's end of a link, for both planes: concurrent calls to one worker.

Sans-I/O: a plane passes frames in (`receive`) and sends frames (`Wire`). The worker may have WINDOW replies
of a stream in flight; the caller returns credit as it consumes them. So a slow consumer stops only its own
generator, and its buffer is bounded.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from baton import frames
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, WorkerLost, WorkerUnreached, from_wire
from baton.frames import Beat, Cancel, Credit, End, Envelope, Fail, Goodbye, Hello, Next, Open
from baton.messages import GenerateRequest, Reply, Request, TokenChunk, is_retry

WINDOW = 256
"""Maximum unconsumed replies of one stream."""

LIVENESS_S = 2.0
"""A worker that is silent for this long is lost: its callers go on with another one."""
TICK_S = 0.25
IDLE_S = 60.0
"""A caller drops a link after this time without a call."""
_MOST_MERGED_TOKENS = 64

log = logging.getLogger(__name__)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A plane's timing: a heartbeat each `tick_s`; a worker is lost after `num_silent` silent ticks; a caller
    drops a link after `num_idle` ticks without a call.
    """

    tick_s: float
    num_silent: int
    num_idle: int

    @classmethod
    def of(cls, liveness_s: float) -> "Pace":
        """A worker is lost after `liveness_s` of silence."""
        tick_s = min(TICK_S, liveness_s / 4)
        return cls(tick_s=tick_s, num_silent=round(liveness_s / tick_s), num_idle=round(IDLE_S / tick_s))


def public_name(worker: str) -> str:
    """A worker's name or address for messages: without its last part, a secret that only callers know."""
    return worker.rpartition(".")[0] or worker


class Pulse:
    """Calls `tick` every `tick_s` until stopped."""

    def __init__(self, tick_s: float, tick: Callable[[], None]) -> None:
        self._tick_s = tick_s
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(tick_s, self._beat)

    def stop(self) -> None:
        """Stop ticking."""
        self._timer.cancel()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._beat)
        self._tick()


class Bell:
    """Wakes one waiting task; does nothing if no task waits."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def rung(self) -> None:
        """Wait for the next ring."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def ring(self) -> None:
        """Wake the waiting task."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class _Call:
    """One running call on the caller's side: what has arrived, and how it ended. Plain token chunks that
    wait for the consumer are one chunk; `num_waiting` counts what was sent. If the worker is lost while it
    has sent no more than `num_heard` frames, it never got the request; None: unknown.
    """

    __slots__ = ("bell", "ended", "error", "num_heard", "num_waiting", "number", "replies")

    def __init__(self, number: int, num_heard: int | None = None) -> None:
        self.number = number
        self.num_heard = num_heard
        self.replies: list[Reply] = []
        self.num_waiting = 0
        self.ended = False
        self.error: BatonError | None = None
        self.bell = Bell()

    def end(self, error: BatonError | None) -> None:
        self.ended = True
        self.error = error
        self.bell.ring()


class CallerLink:
    """The caller's end of the link to one worker. A lost link stays lost; the plane makes a new one. A silent
    link without calls stays until the next call, which fails at once instead of waiting on a new link.
    """

    def __init__(
        self, wire: frames.Wire, worker: str, pace: Pace, on_silence: Callable[[], object] | None = None
    ) -> None:
        """A plane that must first find out who is silent passes `on_silence`; it then calls
        `lose_if_silent`.
        """
        self.lost: str | None = None
        self._on_silence = on_silence or self.lose_if_silent
        self.writable = wire.writable
        self._wire = wire
        self._name = public_name(worker)
        self._pace = pace
        self._calls: dict[int, _Call] = {}
        self._num_opened = 0
        self._num_idle = 0
        self._reader = frames.FrameReader(frames.FROM_WORKER, worker)
        self._writer = frames.FrameWriter(wire, self._cannot_send)
        self._writer.put(Hello(frames.VERSION, worker))
        self._pulse = Pulse(pace.tick_s, self._tick)

    def receive(self, frame: bytes | bytearray) -> None:
        """Process one frame of the worker; an invalid one drops the link."""
        try:
            for envelope in self._reader.open(frame):
                if type(envelope) is Next:
                    self._push(envelope)
                else:
                    self._control(envelope)
        except frames.LinkBroken as broken:
            self.lose(str(broken))

    def lose_if_silent(self) -> None:
        """Drop a link with calls if its worker has said nothing for the liveness limit."""
        if self._calls and self._is_silent:
            self.lose("it does not respond")

    def lose(self, reason: str, error: type[BatonError] = WorkerLost) -> None:
        """End every call with `error` and drop the wire. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        self._pulse.stop()
        if self._calls:
            log.debug("worker_lost worker=%s calls=%d reason=%s", self._name, len(self._calls), reason)
        for call in self._calls.values():
            is_unreached = call.num_heard == self._reader.num_heard
            kind = WorkerUnreached if error is WorkerLost and is_unreached else error
            call.end(kind(f"worker {self._name} was lost: {reason}"))
        self._calls.clear()
        self._writer.close(Goodbye(reason))
        self._wire.close()

    def open(self, request: Request) -> _Call:
        """Start a call. Raises WorkerUnreached if the link is lost."""
        if self.lost is not None:
            raise WorkerUnreached(f"worker {self._name} was lost: {self.lost}")
        self._num_opened += 1
        self._num_idle = 0
        num_heard = self._reader.num_heard
        # A worker answers the first frame of a link at once, and a retry.
        says_so = not num_heard or self._is_silent or is_retry(request)
        call = self._calls[self._num_opened] = _Call(self._num_opened, num_heard if says_so else None)
        self._writer.put(Open(call.number, request))
        if self._is_silent:
            self._on_silence()
        return call

    def consumed(self, call: _Call, num_replies: int) -> None:
        """Let the worker send as many more."""
        if not call.ended:
            self._writer.put(Credit(call.number, num_replies))

    def leave(self, call: _Call) -> None:
        """Forget the call; tells the worker unless the call has ended."""
        if self._calls.pop(call.number, None) is not None:
            self._writer.put(Cancel(call.number))

    @property
    def _is_silent(self) -> bool:
        return self._reader.num_silent_ticks >= self._pace.num_silent

    def _push(self, envelope: Next) -> None:
        call = self._calls.get(envelope.stream)
        if call is None:
            return
        call.num_waiting += 1
        if call.num_waiting > WINDOW:
            raise frames.LinkBroken("it sent more replies than its window")
        replies = call.replies
        both = _merged(replies[-1], envelope.reply) if replies else None
        if both is None:
            replies.append(envelope.reply)
            call.bell.ring()
        else:
            replies[-1] = both

    def _control(self, envelope: frames.ToCaller) -> None:
        match envelope:
            case End(stream):
                self._end(stream, None)
            case Fail(stream, error):
                self._end(stream, from_wire(error))
            case Goodbye(reason):
                self.lose(reason)

    def _end(self, stream: int, error: BatonError | None) -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            call.end(error)

    def _cannot_send(self, envelope: Envelope, error: BatonError) -> None:
        if isinstance(envelope, Open):
            self._end(envelope.stream, InvalidRequest(error.message))

    def _tick(self) -> None:
        self._num_idle = 0 if self._calls else self._num_idle + 1
        self._reader.tick()
        if self._is_silent and self._calls:
            self._on_silence()
        elif self._num_idle >= self._pace.num_idle:
            self.lose("idle")
        else:
            self._writer.put(Beat())


async def call_over(
    link_to: Callable[[], Awaitable[CallerLink]], request: Request
) -> AsyncGenerator[Reply, None]:
    """`Transport.call` for a plane that can make a link to the worker."""
    link = await link_to()
    while not link.writable.is_set():
        await link.writable.wait()
        link = await link_to()  # the link may have been lost meanwhile
    call = link.open(request)
    overdue = _end_overdue(call, request)
    num_consumed = 0
    try:
        while True:
            replies, call.replies = call.replies, []
            num_taken, call.num_waiting = call.num_waiting, 0
            for reply in replies:
                yield reply
            num_consumed += num_taken
            if num_consumed >= WINDOW // 2:
                link.consumed(call, num_consumed)
                num_consumed = 0
            if call.replies:
                continue
            if call.ended:
                break
            await call.bell.rung()
        if call.error is not None:
            raise call.error
    finally:
        if overdue is not None:
            overdue.cancel()
        link.leave(call)


def _merged(first: Reply, then: Reply) -> TokenChunk | None:
    """Both chunks in one, so that a consumer that falls behind catches up; None if one of them is more than
    tokens.
    """
    if type(first) is not TokenChunk or type(then) is not TokenChunk or first.finish_reason is not None:
        return None
    if len(first.token_ids) >= _MOST_MERGED_TOKENS:  # each merge copies them
        return None
    if (first.logprobs, first.prompt_logprobs, then.logprobs, then.prompt_logprobs) != (None,) * 4:
        return None
    return TokenChunk(first.token_ids + then.token_ids, then.finish_reason, then.usage)


def _end_overdue(call: _Call, request: Request) -> asyncio.TimerHandle | None:
    """End the call at its deadline, even if the worker hangs."""
    if not isinstance(request, GenerateRequest):
        return None
    error = DeadlineExceeded()
    return asyncio.get_running_loop().call_later(request.deadline_s, call.end, error)
