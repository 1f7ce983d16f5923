"""Background responses: they run without a client and can be followed, cancelled and drained."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Protocol

from baton.errors import BatonError, InvalidRequest, NotReady, Overloaded
from frontend.http.errors import as_baton_error
from frontend.http.limits import Quota
from frontend.http.respond import count
from frontend.http.services import Services
from frontend.http.sse import Outbox
from frontend.responses.answer import ResponseAnswer
from frontend.responses.body import RUNNING
from frontend.responses.output import after
from frontend.responses.store import ResponseStore

log = logging.getLogger(__name__)

MAX_RUNS = 1000
# The `route` label of runs in the metrics; their requests count under the route's own.
ROUTE = "background"
UNREACHED = "Another frontend runs this response and does not answer; try again, or ask that frontend."


class Run:
    """One background response, running from construction until it ends or is stopped."""

    def __init__(self, answer: ResponseAnswer, services: Services, quota: Quota) -> None:
        self.answer = answer
        self._metrics = services.metrics
        self._quota = quota
        self._outboxes: list[Outbox] = []
        self._reason: BatonError | None = None
        self._tally = services.metrics.begin(ROUTE)
        # Only this task is ever cancelled, so that `_finish` always runs.
        self._making = asyncio.create_task(self._make(services))
        self.task = asyncio.create_task(self._finish())

    @contextmanager
    def follow(self, sequence_number: int) -> Iterator[Outbox]:
        """The events after this sequence number, including future ones. Raises InvalidRequest if they are not
        stored."""
        outbox = Outbox(1)
        outbox.put(after(kept_stream(self.answer), sequence_number))
        self._outboxes.append(outbox)
        try:
            yield outbox
        finally:
            self._outboxes.remove(outbox)

    async def stop(self, reason: BatonError | None = None) -> None:
        """End the run now, as failed if there is a reason, else as cancelled, and wait until it is stored."""
        self._reason = reason
        self._making.cancel()
        await asyncio.wait([self.task])

    async def _make(self, services: Services) -> None:
        choice = self.answer.choice
        made = services.generator.generate(choice.request, choice.caller, lambda: None)
        async with asyncio.timeout(services.request_timeout_s), aclosing(made) as chunks:
            async for chunk in chunks:
                self._tally.first_token_s = self._tally.first_token_s or time.perf_counter()
                self._publish(self.answer.feed(0, chunk))
                if choice.stopped:
                    break
        self._publish(self.answer.finish(0))

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
            self._quota.take_answer(self._tally.num_completion_tokens)
            self._metrics.end(self._tally)

    async def _last_event(self) -> bytes:
        """Wait until generation ends; returns the terminal event."""
        answer = self.answer
        try:
            await self._making
            return answer.closing()
        except asyncio.CancelledError:  # by `stop`: the answer so far is stored
            return answer.cancelled() if self._reason is None else answer.failure(self._reason)
        except Exception as error:  # noqa: BLE001 every failure becomes the response's error
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
        self._num_starting = 0

    async def get(self, response_id: str) -> Run | None:
        """The run, or None if it has ended. Waits for a run that is about to end, until it is stored."""
        run = self._runs.get(response_id)
        if run is None or run.answer.response.status == RUNNING:
            return run
        await asyncio.wait([run.task])
        return None

    async def start(self, answer: ResponseAnswer, services: Services, quota: Quota) -> Run:
        """Store the response, then generate it. Raises Overloaded."""
        if len(self._runs) + self._num_starting >= MAX_RUNS:
            raise Overloaded(
                f"The limit of {MAX_RUNS} running background responses is reached; retry later.",
                retry_after_s=5,
            )
        self._num_starting += 1
        try:
            await answer.save()
        finally:
            self._num_starting -= 1
        run = Run(answer, services, quota)
        self._runs[answer.response.id] = run
        run.task.add_done_callback(lambda _: self._runs.pop(answer.response.id, None))
        return run

    async def drain(self, timeout_s: float) -> None:
        """Wait for runs to end within the timeout, then fail the rest."""
        if not self._runs:
            return
        await asyncio.wait([run.task for run in self._runs.values()], timeout=timeout_s)
        reason = NotReady("The server shut down before the response was complete; send the request again.")
        await asyncio.gather(*(run.stop(reason) for run in list(self._runs.values())))


def kept_stream(answer: ResponseAnswer) -> bytes:
    """The events so far. Raises InvalidRequest if they are not stored."""
    stream = answer.kept_stream
    if stream is None:
        raise InvalidRequest(
            f"The events of {answer.response.id!r} are not stored: the response was not created with "
            "`stream`: true, or its stream was too long to store.",
            param="stream",
        )
    return stream


class Told(Protocol):
    """Counts the events of a response."""

    @property
    def num_events(self) -> int:
        """How many there are so far."""
        ...


class FollowedElsewhere:
    """The events of another process's run, from the one with this number on."""

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.outbox = Outbox(1)

    async def put(self, data: bytes) -> None:
        """Add whole events, when there is room."""
        self.num_events += data.count(b"\n\n")
        self.outbox.put(data)
        await self.outbox.room()


class OtherRuns(Protocol):
    """The runs of other frontend processes, which are known by their addresses."""

    async def stop(self, address: str, response_id: str) -> None:
        """Cancel a run, and wait until it has ended and is stored. Raises NotReady if the process cannot be
        reached.
        """
        ...

    def follow(
        self, address: str, response_id: str, sequence_number: int
    ) -> AbstractAsyncContextManager["FollowedElsewhere | None"]:
        """The events of a run, see `Run.follow`; None if it has ended. Raises InvalidRequest, or NotReady if
        the process cannot be reached.
        """
        ...


class NoOtherRuns:
    """`OtherRuns` of a frontend that reaches no other process."""

    async def stop(self, address: str, response_id: str) -> None:  # noqa: ARG002  the protocol's
        """`OtherRuns.stop`."""
        raise NotReady(UNREACHED, retry_after_s=1)

    def follow(
        self,
        address: str,  # noqa: ARG002  the protocol's
        response_id: str,  # noqa: ARG002  the protocol's
        sequence_number: int,  # noqa: ARG002  the protocol's
    ) -> AbstractAsyncContextManager["FollowedElsewhere | None"]:
        """`OtherRuns.follow`."""
        raise NotReady(UNREACHED, retry_after_s=1)


@dataclasses.dataclass(frozen=True)
class ResponseState:
    """The Responses API's state across requests."""

    store: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    runs: Runs = dataclasses.field(default_factory=Runs)
    elsewhere: OtherRuns = dataclasses.field(default_factory=NoOtherRuns)

    async def run(self, response_id: str, key_name: str) -> Run | None:
        """`Runs.get`, if the run is of that key."""
        run = await self.runs.get(response_id)
        return run if run is not None and run.answer.key_name == key_name else None

    async def close(self) -> None:
        """Stop all runs and close the store."""
        await self.runs.drain(0)
        await self.store.close()
