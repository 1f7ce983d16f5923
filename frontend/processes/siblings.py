"""What a frontend's processes share, over Unix sockets: metrics, background runs, kept reasoning."""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import BatonError, ErrorInfo, NotReady, from_wire
from frontend.metrics import Metrics, Sampled
from frontend.responses.runs import FollowedElsewhere, Runs
from frontend.turn.thoughts import Kept, Thoughts

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4
MAX_UNSENT_BYTES = 16 << 20
"""A process that reads entries more slowly misses some."""
SCRAPE_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Add an entry to the reasoning kept; no answer."""

    kept: Kept


class Scrape(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answered with the process's metrics."""


class StopRun(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Cancel a background run; answered with `Found` once it is stored, if the process has it."""

    response_id: str


class FollowRun(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answered with `Found` and the run's events, if the process has it."""

    response_id: str
    sequence_number: int


class Found(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The process has the run."""


class Values(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The process's metrics."""

    metrics: list[Sampled]


class Events(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Some events of the run that is followed."""

    data: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The request failed."""

    error: ErrorInfo


class Done(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The answer is complete."""


Question = Keep | Scrape | StopRun | FollowRun
Answer = Found | Values | Events | Refused | Done


def _token_ids(kind: type, value: object) -> object:
    if kind is array and isinstance(value, list):
        return array("I", value)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)
_QUESTIONS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Question, dec_hook=_token_ids)
_ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


class Siblings:
    """The other processes of this frontend; implements `frontend.responses.runs.OtherRuns`.

    Process `index` of `num_processes` listens in `folder`, which only this user may open; without a folder
    there are no others. `listening` is to be called once this process accepts connections.
    """

    def __init__(
        self,
        folder: Path | None = None,
        index: int = 0,
        num_processes: int = 1,
        listening: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self.listening = listening
        self._paths = [folder / f"{number}.sock" for number in range(num_processes)] if folder else []
        self._own = self._paths.pop(index) if folder else None
        self._writers: dict[Path, asyncio.StreamWriter] = {}
        self._unsent: dict[Path, list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def answering(self, thoughts: Thoughts, metrics: Metrics, runs: Runs) -> AsyncIterator[None]:
        """Answer the others during the context."""
        if self._own is None:
            yield
            return
        self._own.unlink(missing_ok=True)  # of a process that died

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._start(_answer(reader, writer, thoughts, metrics, runs))

        server = await asyncio.start_unix_server(take, self._own)
        try:
            yield
        finally:
            server.close()
            for writer in self._writers.values():
                await _hang_up(writer)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def share(self, kept: Kept) -> None:
        """Give an entry to all processes that are running."""
        frame = _frame(Keep(kept))
        for path in self._paths:
            writer = self._writers.get(path)
            if path in self._unsent:
                self._unsent[path].append(frame)
            elif writer is None or writer.is_closing():
                self._unsent[path] = [frame]
                self._start(self._connect(path))
            elif writer.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
                writer.write(frame)

    async def metrics(self) -> list[Sequence[Sampled]]:
        """The metrics of the processes that answer in time."""
        found = await asyncio.gather(*(self._first(path, Scrape(), SCRAPE_TIMEOUT_S) for path in self._paths))
        return [answer.metrics for answer in found if isinstance(answer, Values)]

    async def stop(self, response_id: str) -> bool:
        """`OtherRuns.stop`."""
        question = StopRun(response_id)
        found = await asyncio.gather(*(self._first(path, question, STOP_TIMEOUT_S) for path in self._paths))
        return any(isinstance(answer, Found) for answer in found)

    @asynccontextmanager
    async def follow(self, response_id: str, sequence_number: int) -> AsyncIterator[FollowedElsewhere | None]:
        """`OtherRuns.follow`."""
        for path in self._paths:
            async with aclosing(_ask(path, FollowRun(response_id, sequence_number))) as answers:
                first = await anext(answers, None)
                if isinstance(first, Refused):
                    raise from_wire(first.error)
                if isinstance(first, Found):
                    followed = FollowedElsewhere(sequence_number + 1)
                    pumping = asyncio.create_task(_pump(answers, followed))
                    try:
                        yield followed
                    finally:
                        pumping.cancel()
                        await asyncio.wait([pumping])
                    return
        yield None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, path: Path) -> None:
        """Connect for entries, and send those that wait; they are dropped if the process is not running."""
        try:
            _, self._writers[path] = await asyncio.open_unix_connection(path)
            self._writers[path].writelines(self._unsent[path])
        except OSError:
            pass
        finally:
            del self._unsent[path]

    async def _first(self, path: Path, question: Question, timeout_s: float) -> Answer | None:
        """The first part of a process's answer, or None."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), aclosing(_ask(path, question)) as answers:
                return await anext(answers, None)
        log.warning("silent process=%s", path.stem)
        return None


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    thoughts: Thoughts,
    metrics: Metrics,
    runs: Runs,
) -> None:
    """Answer the questions of one connection."""
    with suppress(OSError, asyncio.IncompleteReadError):
        async with _closing(writer):
            while True:
                question = _QUESTIONS.decode(await _read(reader))
                if isinstance(question, Keep):
                    thoughts.take(question.kept)
                    continue
                async with aclosing(_answers(question, metrics, runs)) as answers:
                    async for part in answers:
                        writer.write(_frame(part))
                        await writer.drain()


async def _answers(question: Question, metrics: Metrics, runs: Runs) -> AsyncGenerator[Answer, None]:
    match question:
        case Scrape():
            yield Values(metrics.samples())
        case StopRun(response_id):
            run = await runs.get(response_id)
            if run is not None:
                await run.stop()
                yield Found()
        case FollowRun(response_id, sequence_number):
            run = await runs.get(response_id)
            if run is not None:
                try:
                    outbox = run.follow(sequence_number)
                except BatonError as error:
                    yield Refused(error.to_wire())
                    return
                yield Found()
                while data := await outbox.take():
                    yield Events(data)
    yield Done()


async def _ask(path: Path, question: Question) -> AsyncGenerator[Answer, None]:
    """The parts of a process's answer, without the end. Nothing if it is not running; raises NotReady if it
    dies before the end.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return
    async with _closing(writer):
        writer.write(_frame(question))
        try:
            while not isinstance(answer := _ANSWERS.decode(await _read(reader)), Done):
                yield answer
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NotReady("The process that ran the response has ended; send the request again.") from error


async def _pump(answers: AsyncGenerator[Answer, None], followed: FollowedElsewhere) -> None:
    try:
        async for part in answers:
            assert isinstance(part, Events), "events follow"
            await followed.put(part.data)
        followed.outbox.close()
    except NotReady as error:
        followed.outbox.close(error)


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await _hang_up(writer)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > MAX_FRAME_BYTES:
        raise ConnectionAbortedError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def _frame(message: Question | Answer) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES) + data
