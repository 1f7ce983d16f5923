"""Both ends of a link, for every plane: concurrent calls from one process to one worker.

Sans-I/O: a plane passes frames in (`receive`) and sends frames (`Wire`). The worker may have WINDOW replies
of a stream in flight; the caller returns credit as it consumes them. So a slow consumer stops only its own
generator, and its buffer is bounded."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable

from baton import frames
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
    from_wire,
)
from baton.frames import Beat, Cancel, Credit, End, Goodbye, Hello, Next, Open, Signal
from baton.messages import GenerateRequest, Reply, Request, TokenChunk
from baton.pace import Pace, Pulse
from baton.telemetry import Line, unauthenticated
from baton.transport import Respond

log = logging.getLogger(__name__)

WINDOW = 256
"""Maximum unconsumed replies of one stream."""
_MOST_MERGED_TOKENS = 64
MAX_STREAMS = 16_384
"""Maximum streams per link; more are refused with Overloaded."""
MAX_CALLERS = 1024
"""Maximum links per worker."""
CALLER_PATIENCE = 5
"""How many times longer than a worker a caller may be silent: nothing takes over its streams."""
STOP_S = 5.0
"""How long `Service.stop` waits for generators to close."""
_SILENT = "it does not respond"
CLOSED = "this process closed its transport"


def public_name(worker: str) -> str:
    """A worker's name or address for messages: without its last part, a secret of its callers."""
    return worker.rpartition(".")[0] or worker


class Wakeup:
    """Wakes one waiting task; does nothing if no task waits."""

    _waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        self._waiter = asyncio.Future()
        return self._waiter

    def set(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class Replies:
    """What has arrived of an answer, and how it ended. Plain token chunks that wait for the reader are one
    chunk; `num_waiting` counts what was added, and `num_taken` what of that was taken."""

    def __init__(self) -> None:
        self.has_ended = False
        self.num_waiting = self.num_taken = 0
        self._waiting: list[Reply] = []
        self.error: BatonError | type[BatonError] | None = None
        self._is_left = False
        self._arrived, self._room = Wakeup(), Wakeup()

    def add(self, reply: Reply) -> None:
        self.num_waiting += 1
        last = self._waiting[-1] if self._waiting else None
        if (
            type(last) is not TokenChunk
            or type(reply) is not TokenChunk
            or last.finish_reason is not None
            or (last.logprobs, last.prompt_logprobs, reply.logprobs, reply.prompt_logprobs) != (None,) * 4
            or len(last.token_ids) >= _MOST_MERGED_TOKENS  # each merge copies them
        ):
            self._waiting.append(reply)
            self._arrived.set()
        else:
            token_ids, usage = last.token_ids + reply.token_ids, reply.usage or last.usage
            self._waiting[-1] = TokenChunk(token_ids, reply.finish_reason, usage)

    async def put(self, reply: Reply) -> None:
        """Add a reply, and wait for a reader that is far behind."""
        self.add(reply)
        while self.num_waiting >= WINDOW and not self._is_left:
            await self._room.wait()

    def end(self, error: BatonError | type[BatonError] | None = None) -> None:
        """No more replies follow; those that wait are read first. The first end counts."""
        if not self.has_ended:
            self.has_ended, self.error = True, error
            self._arrived.set()

    def leave(self) -> None:
        """Nothing is read any more."""
        self._is_left = True
        self._room.set()

    async def take(self) -> list[Reply]:
        """All that wait, at least one; none after the last. Raises the error that ended the answer."""
        while not self._waiting:
            if self.has_ended:
                if self.error is not None:
                    raise self.error
                break
            await self._arrived.wait()
        replies, self._waiting = self._waiting, []
        if self.num_waiting >= WINDOW:
            self._room.set()
        self.num_taken += self.num_waiting
        self.num_waiting = 0
        return replies


class _Call(Replies):
    """One running call on the caller's side. `num_heard`: frames received when the call was sent. If none
    arrived since, a lost worker never got the request; None: unknown."""

    number: int
    num_heard: int | None


class CallerLink:
    """The caller's end of the link to one worker. A lost link stays lost; the plane makes a new one. A silent
    link without calls stays until the next call, which fails at once instead of waiting on a new link."""

    def __init__(
        self, wire: frames.Wire, worker: str, pace: Pace, on_silence: Callable[[], object] | None = None
    ) -> None:
        """A plane with a broker passes `on_silence`, checks the broker, and calls `lose_if_silent`."""
        self.lost: str | None = None
        self._on_silence = on_silence or self.lose_if_silent
        self._wire = wire
        self._name = public_name(worker)
        self._pace = pace
        self._calls: dict[int, _Call] = {}
        self._num_opened = 0
        self._reader = frames.FrameReader(frames.FROM_WORKER, worker)
        self._writer = frames.FrameWriter(wire, self._cannot_send)
        self._writer.put(Hello(frames.VERSION, worker))
        self._pulse = Pulse(pace.tick_s, self._tick)

    def receive(self, frame: bytes | bytearray) -> None:
        """Process one frame of the worker; an invalid one drops the link."""
        try:
            for signal in self._reader.open(frame):
                if type(signal) is Next:
                    if (call := self._calls.get(signal.stream)) is not None:
                        call.add(signal.reply)
                        if call.num_waiting > WINDOW:
                            self.lose("it sent more replies than its window")
                elif type(signal) is End:
                    self._end(signal.stream, from_wire(signal.error) if signal.error else None)
                elif type(signal) is Goodbye:
                    self.lose(signal.reason)
        except frames.LinkBroken as broken:
            self.lose(str(broken))

    def lose_if_silent(self) -> None:
        """Drop a link in use if its worker has been silent for the liveness limit."""
        if self._calls and self._is_silent:
            self.lose(_SILENT)

    def lose(self, reason: str, error: type[BatonError] = WorkerLost) -> None:
        """End every call with `error` and drop the wire. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        self._pulse.stop()
        for call in self._calls.values():
            is_unreached = call.num_heard == self._reader.num_heard
            kind = WorkerUnreached if error is WorkerLost and is_unreached else error
            lost = kind(f"worker {self._name} was lost: {reason}")
            if isinstance(lost, WorkerLost):
                lost.is_silent = reason is _SILENT
            call.end(lost)
        self._calls.clear()
        self._writer.close(Goodbye(reason))
        self._wire.close()

    def open(self, request: Request) -> _Call:
        """Start a call. Raises WorkerUnreached if the link is lost."""
        if self.lost is not None:
            raise WorkerUnreached(f"worker {self._name} was lost: {self.lost}")
        self._num_opened += 1
        num_heard, is_silent = self._reader.num_heard, self._is_silent
        call = self._calls[self._num_opened] = _Call()
        call.number, call.num_heard = self._num_opened, num_heard if is_silent or not num_heard else None
        self._writer.put(Open(call.number, request))
        if is_silent:
            self._on_silence()
        return call

    def consumed(self, call: _Call) -> None:
        """Let the worker send as many more as were taken."""
        if not call.has_ended:
            self._writer.put(Credit(call.number, call.num_taken))
        call.num_taken = 0

    def leave(self, call: _Call) -> None:
        """Forget the call; cancels it at the worker unless it has ended."""
        if self._calls.pop(call.number, None) is not None:
            self._writer.put(Cancel(call.number))

    @property
    def _is_silent(self) -> bool:
        return self._reader.num_silent_ticks >= self._pace.num_silent

    def _end(self, stream: int, error: BatonError | None) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            call.end(error)

    def _cannot_send(self, signal: Signal, error: BatonError) -> None:
        if isinstance(signal, Open):
            self._end(signal.stream, InvalidRequest(error.message))

    def _tick(self) -> None:
        self._reader.tick()
        if self._is_silent and self._calls:
            self._on_silence()
        else:
            self._writer.put(Beat())


class Plane:
    """What every request plane does for its callers: one link to each worker, made for the first call."""

    def __init__(self, liveness_s: float) -> None:
        self._pace = Pace.of(liveness_s)
        self._links: dict[str, CallerLink] = {}
        self._closed = False

    async def _connect(self, address: str) -> CallerLink:
        """The new link to `address`, in `_links` until it is lost. Raises a BatonError if there is none."""
        raise NotImplementedError

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + request.deadline_s if isinstance(request, GenerateRequest) else None
        link = self._links.get(address) or await self._connect(address)
        call = link.open(request)
        # Ends the call even if the worker hangs.
        overdue = None if due_s is None else loop.call_at(due_s, call.end, DeadlineExceeded)
        try:
            while replies := await call.take():
                for reply in replies:
                    yield reply
                if call.num_taken >= WINDOW // 2:
                    link.consumed(call)
        finally:
            if overdue is not None:
                overdue.cancel()
            link.leave(call)

    def has_link(self, address: str) -> bool:
        """Whether the worker there was reached, and is not lost."""
        return address in self._links

    def lose(self, address: str, reason: str) -> None:
        if (link := self._links.get(address)) is not None:
            link.lose(reason)

    def _lose_all(self, reason: str, error: type[BatonError] = WorkerLost) -> None:
        for link in list(self._links.values()):
            link.lose(reason, error)


class _Stream:
    """One running answer on the worker's side."""

    __slots__ = ("credit", "task", "wakeup")

    def __init__(self) -> None:
        self.credit = WINDOW
        self.wakeup = Wakeup()
        self.task: asyncio.Task[None]

    def cancel(self) -> None:
        """Close the generator, once: a second call would interrupt its `finally`."""
        if not self.task.cancelling():
            self.task.cancel()


class WorkerLink:
    """The worker's end of the link to one caller."""

    def __init__(self, wire: frames.Wire, service: "Service") -> None:
        self._wire = wire
        self._service = service
        self._lost = False
        self._streams: dict[int, _Stream] = {}
        self._reader = frames.FrameReader(frames.FROM_CALLER, service.worker)
        self._writer = frames.FrameWriter(wire, self._cannot_send)
        self._pulse = Pulse(service.pace.tick_s, self._tick)
        service.links.add(self)

    def receive(self, frame: bytes | bytearray) -> None:
        try:
            for signal in self._reader.open(frame):
                self._take(signal)
        except frames.LinkBroken as broken:
            if not self._reader.num_heard:
                unauthenticated.note("the request plane")
            self.lose(str(broken))

    def lose(self, reason: str) -> None:
        """Close every generator of this caller and drop the wire. Idempotent."""
        if self._lost:
            return
        self._lost = True
        self._pulse.stop()
        if self._streams:
            log.warning("caller_lost streams=%d reason=%s", len(self._streams), reason)
        for stream in self._streams.values():
            stream.cancel()
        self._service.links.discard(self)
        if not self._reader.num_heard:
            self._writer.put(Hello(frames.VERSION, ""))  # so that a caller of another version can read why
        self._writer.close(Goodbye(reason))
        self._wire.close()

    def _take(self, signal: frames.ToWorker) -> None:
        match signal:
            case Hello():
                self._writer.put(Hello(frames.VERSION, self._service.worker))
                if self._service.stopped:
                    self.lose("the worker has stopped")
                elif len(self._service.links) > MAX_CALLERS:
                    self.lose(f"{MAX_CALLERS} callers are connected to this worker")
            case Open(number, request):
                self._open(number, request)
            case Cancel(number) if number in self._streams:
                self._streams[number].cancel()
            case Credit(number, num_replies) if number in self._streams:
                stream = self._streams[number]
                stream.credit = min(stream.credit + num_replies, WINDOW)
                stream.wakeup.set()
            case Goodbye(reason):
                self.lose(reason)

    def _open(self, number: int, request: Request) -> None:
        if number in self._streams:
            raise frames.LinkBroken(f"stream {number} was opened twice")
        if self._lost:
            return
        if len(self._streams) >= MAX_STREAMS:
            full = Overloaded(f"{MAX_STREAMS} streams are open to this worker", retry_after_s=1.0)
            self._writer.put(End(number, full.to_wire()))
        else:
            stream = self._streams[number] = _Stream()
            stream.task = asyncio.get_running_loop().create_task(self._answer(number, stream, request))
            stream.task.add_done_callback(functools.partial(self._closed, number))
            self._service.tasks.add(stream.task)

    def _closed(self, number: int, task: asyncio.Task[None]) -> None:
        del self._streams[number]
        self._service.tasks.discard(task)

    async def _answer(self, number: int, stream: _Stream, request: Request) -> None:
        """Send the generator's replies, then how it ended."""
        put, writable = self._writer.put, self._wire.writable
        name = request.request_id if isinstance(request, GenerateRequest) else type(request).__name__
        broken = EngineFailure(f"the engine failed on request {name}; see the worker's log")
        try:
            async with contextlib.aclosing(self._service.respond(request)) as replies:
                async for reply in replies:
                    put(Next(number, reply))
                    stream.credit -= 1
                    while stream.credit <= 0:
                        await stream.wakeup.wait()
                    if not writable.is_set():
                        await writable.wait()
            put(End(number))
        except BatonError as error:
            put(End(number, error.to_wire()))
        except asyncio.CancelledError:
            # Ignored if the caller cancelled; if the engine cancelled itself, the caller gets an error.
            put(End(number, broken.to_wire()))
            raise
        except Exception:  # process edge: any engine error goes to the caller
            log.exception(Line("answer failed", request_id=name))
            put(End(number, broken.to_wire()))

    def _cannot_send(self, signal: Signal, error: BatonError) -> End | None:
        """The end of its stream: no later reply may come without this one."""
        if not isinstance(signal, Next | End):
            return None
        log.error("reply_refused reason=%s", error.message)
        if (stream := self._streams.get(signal.stream)) is not None:
            stream.cancel()
        return End(signal.stream, error.to_wire())

    def _tick(self) -> None:
        if self._reader.tick() >= CALLER_PATIENCE * self._service.pace.num_silent:
            self.lose("the caller is silent")
        elif self._reader.num_heard:
            self._writer.put(Beat())


class Service:
    """Serves one worker's handler to all of its callers."""

    def __init__(self, worker: str, respond: Respond, pace: Pace) -> None:
        self.worker = worker
        self.respond = respond
        self.pace = pace
        self.stopped = False
        self.links: set[WorkerLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Drop every link, which closes its generators (callers get WorkerLost), and accept no new one."""
        self.stopped = True
        for link in list(self.links):
            link.lose("the worker has stopped")
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=STOP_S)
