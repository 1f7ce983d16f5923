"""What a frontend's processes share, over Unix sockets: metrics, background runs, kept reasoning."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest, NotReady, from_wire
from frontend.http.limits import Quotas, Used
from frontend.metrics import Metrics, Sampled
from frontend.processes.sibling_messages import (
    ANSWERS,
    QUESTIONS,
    Answer,
    Done,
    Events,
    FollowRun,
    Found,
    Keep,
    Question,
    Refused,
    Scrape,
    Spend,
    StopRun,
    Values,
    frame,
    read,
)  # fmt: skip
from frontend.responses.runs import FollowedElsewhere, Runs
from frontend.turn.thoughts import Kept, Thoughts

MAX_UNSENT_BYTES = 16 << 20
"""A process that reads entries more slowly misses some."""
SCRAPE_TIMEOUT_S = 1.0
RUN_TIMEOUT_S = 10.0
"""A process that finds or stops no run within this time does not have it."""
HANG_UP_TIMEOUT_S = 1.0
"""A process that reads more slowly misses the rest: it may be frozen."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a process's siblings ask for or add to."""

    thoughts: Thoughts
    metrics: Metrics
    runs: Runs
    quotas: Quotas


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
    async def answering(self, shared: Shared) -> AsyncIterator[None]:
        """Answer the others during the context."""
        if self._own is None:
            yield
            return

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._start(_answer(reader, writer, shared))

        server = await asyncio.start_unix_server(take, self._own)
        try:
            yield
        finally:
            server.close()
            await asyncio.gather(*map(_hang_up, self._writers.values()))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def share(self, kept: Kept) -> None:
        """Give an entry of reasoning to all processes that are running."""
        self._tell(Keep(kept))

    def share_use(self, used: Used) -> None:
        """Tell all processes that are running that an API key was used."""
        self._tell(Spend(used))

    def _tell(self, message: Keep | Spend) -> None:
        data = frame(message)
        for path in self._paths:
            writer = self._writers.get(path)
            if path in self._unsent:
                self._unsent[path].append(data)
            elif writer is None or writer.is_closing():
                self._unsent[path] = [data]
                self._start(self._connect(path))
            elif writer.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
                writer.write(data)

    async def metrics(self) -> list[Sequence[Sampled]]:
        """The metrics of the processes that answer in time."""
        asked = (self._first(path, Scrape(), SCRAPE_TIMEOUT_S) for path in self._paths)
        found = await asyncio.gather(*asked, return_exceptions=True)  # one that ends counts no more
        return [answer.metrics for answer in found if isinstance(answer, Values)]

    async def stop(self, response_id: str) -> bool:
        """`OtherRuns.stop`."""
        question = StopRun(response_id)
        found = await asyncio.gather(*(self._first(path, question, RUN_TIMEOUT_S) for path in self._paths))
        return any(isinstance(answer, Found) for answer in found)

    @asynccontextmanager
    async def follow(self, response_id: str, sequence_number: int) -> AsyncIterator[FollowedElsewhere | None]:
        """`OtherRuns.follow`."""
        for path in self._paths:
            async with aclosing(_ask(path, FollowRun(response_id, sequence_number))) as answers:
                first = await _next(answers, path, RUN_TIMEOUT_S)
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
        async with aclosing(_ask(path, question)) as answers:
            return await _next(answers, path, timeout_s)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shared: Shared) -> None:
    """Answer the questions of one connection."""
    with suppress(OSError, asyncio.IncompleteReadError):
        async with _closing(writer):
            while True:
                question = QUESTIONS.decode(await read(reader))
                if isinstance(question, Keep):
                    shared.thoughts.take(question.kept)
                    continue
                if isinstance(question, Spend):
                    shared.quotas.note(question.used)
                    continue
                async with aclosing(_answers(question, shared)) as answers:
                    async for part in answers:
                        writer.write(frame(part))
                        await writer.drain()


async def _answers(question: Question, shared: Shared) -> AsyncGenerator[Answer, None]:
    match question:
        case Scrape():
            yield Values(shared.metrics.samples())
        case StopRun(response_id):
            run = await shared.runs.get(response_id)
            if run is not None:
                await run.stop()
                yield Found()
        case FollowRun(response_id, sequence_number):
            run = await shared.runs.get(response_id)
            if run is not None:
                try:
                    with run.follow(sequence_number) as outbox:
                        yield Found()
                        while data := await outbox.take():
                            yield Events(data)
                except InvalidRequest as error:
                    yield Refused(error.to_wire())
                    return
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
        writer.write(frame(question))
        try:
            while not isinstance(answer := ANSWERS.decode(await read(reader)), Done):
                yield answer
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NotReady("The process that ran the response has ended; send the request again.") from error


async def _next(answers: AsyncGenerator[Answer, None], path: Path, timeout_s: float) -> Answer | None:
    """The next part of this process's answer; None at its end, or if it does not come in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await anext(answers, None)
    log.warning("silent process=%s", path.stem)
    return None


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
        try:
            async with asyncio.timeout(HANG_UP_TIMEOUT_S):
                await writer.wait_closed()
        finally:
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
