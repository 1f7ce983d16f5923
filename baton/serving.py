"""The worker's end of a link, for both planes: one task runs one generator per call."""

import asyncio
import contextlib
import functools
import logging

from baton import frames
from baton.errors import BatonError, EngineFailure, ErrorInfo, NotReady, Overloaded, WorkerLost
from baton.frames import Beat, Cancel, Credit, End, Envelope, Fail, Goodbye, Hello, Next, Open
from baton.messages import GenerateRequest, Request, is_retry
from baton.pace import Pace, Pulse
from baton.strangers import strangers
from baton.streams import WINDOW, Bell, public_name
from baton.transport import Respond

MAX_STREAMS = 16_384
"""Maximum streams per link; more are refused with Overloaded."""
MAX_CALLERS = 1024
"""Maximum links per worker."""
CALLER_PATIENCE = 5
"""How many times longer than a worker a caller may be silent: nothing takes over its streams."""
STOP_S = 5.0
"""How long `Service.stop` waits for generators to close."""

log = logging.getLogger(__name__)


class _Stream:
    """One running answer on the worker's side."""

    __slots__ = ("bell", "credit", "task")

    def __init__(self) -> None:
        self.credit = WINDOW
        self.bell = Bell()
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
        self._is_known = False  # the caller knows this worker's name
        self._pulse = Pulse(service.pace.tick_s, self._tick)

    def receive(self, frame: bytes | bytearray) -> None:
        """Process one frame of the caller; an invalid one drops the link."""
        try:
            for envelope in self._reader.open(frame):
                self._take(envelope)
        except frames.LinkBroken as broken:
            if not self._is_known:
                strangers.note("the request plane")
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
        if not self._is_known:
            self._writer.put(Hello(frames.VERSION, ""))  # tells an old or a new caller why
        self._writer.close(Goodbye(reason))
        self._wire.close()

    def stop_streams(self) -> None:
        """Close every generator. Callers get WorkerLost at once; later output is dropped."""
        stopped = WorkerLost(f"worker {public_name(self._service.worker)} has stopped").to_wire()
        for number, stream in self._streams.items():
            self._writer.put(Fail(number, stopped))
            stream.cancel()

    def _take(self, envelope: frames.ToWorker) -> None:
        match envelope:
            case Hello():
                self._is_known = True
                self._writer.put(Hello(frames.VERSION, self._service.worker))
                self._service.admit(self)
            case Open(number, request):
                self._open(number, request)
            case Cancel(number):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.cancel()
            case Credit(number, num_replies):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.credit = min(stream.credit + num_replies, WINDOW)
                    stream.bell.ring()
            case Goodbye(reason):
                self.lose(reason)

    def _open(self, number: int, request: Request) -> None:
        if number in self._streams:
            raise frames.LinkBroken(f"stream {number} was opened twice")
        if self._service.stopping or self._lost:
            self._writer.put(Fail(number, NotReady("the worker is stopping; use another one").to_wire()))
        elif len(self._streams) >= MAX_STREAMS:
            full = Overloaded(f"{MAX_STREAMS} streams are open to this worker", retry_after_s=1.0)
            self._writer.put(Fail(number, full.to_wire()))
        else:
            stream = self._streams[number] = _Stream()
            stream.task = asyncio.get_running_loop().create_task(self._answer(number, stream, request))
            stream.task.add_done_callback(functools.partial(self._closed, number))
            self._service.tasks.add(stream.task)
            if is_retry(request):
                self._writer.put(Beat())  # it is here: if this worker dies now, it may be the reason

    def _closed(self, number: int, task: asyncio.Task[None]) -> None:
        del self._streams[number]
        self._service.tasks.discard(task)

    async def _answer(self, number: int, stream: _Stream, request: Request) -> None:
        """Send the generator's replies, then how it ended."""
        put, writable = self._writer.put, self._wire.writable
        try:
            async with contextlib.aclosing(self._service.respond(request)) as replies:
                async for reply in replies:
                    put(Next(number, reply))
                    stream.credit -= 1
                    while stream.credit <= 0:
                        await stream.bell.rung()
                    if not writable.is_set():
                        await writable.wait()
            put(End(number))
        except BatonError as error:
            put(Fail(number, error.to_wire()))
        except asyncio.CancelledError:
            # If the caller cancelled, this is ignored; if the engine cancelled itself, the caller must know.
            put(Fail(number, _broken(request)))
            raise
        except Exception:  # process edge: the caller must learn of any engine error
            log.exception("answer_failed request=%s", _name(request))
            put(Fail(number, _broken(request)))

    def _cannot_send(self, envelope: Envelope, error: BatonError) -> Fail | None:
        if not isinstance(envelope, Next | Fail):
            return None
        log.error("reply_refused reason=%s", error.message)
        stream = self._streams.get(envelope.stream)
        if stream is not None:
            stream.cancel()
        return Fail(envelope.stream, error.to_wire())

    def _tick(self) -> None:
        if self._reader.tick() >= CALLER_PATIENCE * self._service.pace.num_silent:
            self.lose("the caller is silent")
        elif self._is_known:
            self._writer.put(Beat())


class Service:
    """Serves one worker's handler to all of its callers."""

    def __init__(self, worker: str, respond: Respond, pace: Pace) -> None:
        self.worker = worker
        self.respond = respond
        self.pace = pace
        self.stopping = False
        self.stopped = False
        self.links: set[WorkerLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, wire: frames.Wire) -> WorkerLink:
        """Create the link for a new caller."""
        link = WorkerLink(wire, self)
        self.links.add(link)
        return link

    def admit(self, link: WorkerLink) -> None:
        """Drop a new link if there are too many or the service has stopped."""
        if self.stopped:
            link.lose("the worker has stopped")
        elif len(self.links) > MAX_CALLERS:
            link.lose(f"{MAX_CALLERS} callers are connected to this worker")

    async def stop(self) -> None:
        """Refuse new calls, close every generator (callers get WorkerLost), then drop the links."""
        self.stopping = True
        for link in self.links:
            link.stop_streams()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=STOP_S)
        self.stopped = True
        for link in list(self.links):
            link.lose("the worker has stopped")


def _name(request: Request) -> str:
    return request.request_id if isinstance(request, GenerateRequest) else type(request).__name__


def _broken(request: Request) -> ErrorInfo:
    return EngineFailure(f"the engine failed on request {_name(request)}; see the worker's log").to_wire()
