"""Responses in the background: they go on without a client, can be followed, cancelled and drained."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from baton.errors import BatonError, InvalidRequest, NotReady, Overloaded
from baton.messages import GenerateRequest, TokenChunk
from frontend.http.errors import as_baton_error
from frontend.http.respond import count
from frontend.http.sse import Outbox
from frontend.metrics import Metrics
from frontend.responses.answer import ResponseAnswer
from frontend.responses.events import after
from frontend.responses.object import RUNNING
from frontend.responses.store import ResponseStore

log = logging.getLogger(__name__)

MAX_RUNS = 1000
# The name under which runs are counted, since their requests are counted under the route's.
ROUTE = "background"


Generate = Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]]
"""Answers a token request; closing the generator cancels the work. Raises BatonErrors."""


class Run:
    """One response that is being made, from now on until it ends or is told to."""

    def __init__(
        self, answer: ResponseAnswer, generate: Generate, metrics: Metrics, timeout_s: float
    ) -> None:
        self.answer = answer
        self._metrics = metrics
        self._outboxes: list[Outbox] = []
        self._reason: BatonError | None = None
        self._tally = metrics.begin(ROUTE)
        # Only the making is ever cancelled; what comes after it, and before its first step, always runs.
        self._making = asyncio.create_task(self._make(generate, timeout_s))
        self.task = asyncio.create_task(self._finish())

    def follow(self, sequence_number: int) -> Outbox:
        """All events after the one of this number, those to come included. Raises InvalidRequest if they are
        not kept."""
        outbox = Outbox(1)
        outbox.put(after(kept_stream(self.answer), sequence_number))
        self._outboxes.append(outbox)
        return outbox

    async def stop(self, reason: BatonError | None = None) -> None:
        """End it now, as failed for that reason or else as cancelled, and wait until that is kept."""
        self._reason = reason
        self._making.cancel()
        await asyncio.wait([self.task])

    async def _make(self, generate: Generate, timeout_s: float) -> None:
        choice = self.answer.choice
        async with asyncio.timeout(timeout_s), aclosing(generate(choice.request)) as chunks:
            async for chunk in chunks:
                self._tally.first_token_s = self._tally.first_token_s or time.perf_counter()
                self._publish(self.answer.write(0, choice.feed(chunk)))
                if choice.stopped:
                    break
        self._publish(self.answer.write(0, choice.finish()))

    async def _finish(self) -> None:
        try:
            last = await self._last_event()
            await self.answer.settle()
            self._publish(last)
        finally:
            for outbox in self._outboxes:
                outbox.close()
            self._tally.model = self.answer.model
            count(self.answer.choices, self._tally)
            self._metrics.end(self._tally)

    async def _last_event(self) -> bytes:
        """Wait until the answer is made, or will not be; gives the event that says so."""
        answer = self.answer
        try:
            await self._making
            return answer.closing()
        except asyncio.CancelledError:  # by `stop`: what there is of the answer is kept
            return answer.cancelled() if self._reason is None else answer.failure(self._reason)
        except Exception as error:  # noqa: BLE001 whoever asks for the response is told
            failure = as_baton_error(error, answer.choice.request.request_id)
            self._tally.status = failure.status
            log.info("failed response_id=%s code=%s", answer.response.id, failure.code)
            return answer.failure(failure)

    def _publish(self, data: bytes) -> None:
        for outbox in self._outboxes:
            outbox.put(data)


class Runs:
    """The runs of this frontend, by response id."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    async def get(self, response_id: str) -> Run | None:
        """The run, while it lasts; one that is about to end is waited for, so that its response is kept."""
        run = self._runs.get(response_id)
        if run is None or run.answer.response.status == RUNNING:
            return run
        await asyncio.wait([run.task])
        return None

    async def start(
        self, answer: ResponseAnswer, generate: Generate, metrics: Metrics, timeout_s: float
    ) -> Run:
        """Keep the response, then make it. Raises Overloaded or StoreFailure."""
        if len(self._runs) >= MAX_RUNS:
            raise Overloaded("Too many responses run in the background; try again.", retry_after_s=5)
        await answer.save()
        run = Run(answer, generate, metrics, timeout_s)
        self._runs[answer.response.id] = run
        run.task.add_done_callback(lambda _: self._runs.pop(answer.response.id, None))
        return run

    async def drain(self, timeout_s: float) -> None:
        """Let runs end by themselves for so long; then they have failed."""
        if not self._runs:
            return
        await asyncio.wait([run.task for run in self._runs.values()], timeout=timeout_s)
        reason = NotReady("The server was shut down before the response was complete; send it again.")
        await asyncio.gather(*(run.stop(reason) for run in list(self._runs.values())))


def kept_stream(answer: ResponseAnswer) -> bytes:
    """The events so far. Raises InvalidRequest if there are none, or too many to be kept."""
    stream = answer.kept_stream
    if stream is None:
        raise InvalidRequest(
            f"The events of {answer.response.id!r} are not kept: it has to be made with `stream`: true, and "
            "its events must not be too many.",
            param="stream",
        )
    return stream


@dataclasses.dataclass(frozen=True)
class ResponseState:
    """What outlives the requests of the Responses API."""

    store: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    runs: Runs = dataclasses.field(default_factory=Runs)

    async def close(self) -> None:
        """End what still runs, and close the store."""
        await self.runs.drain(0)
        await self.store.close()
