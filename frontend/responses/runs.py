"""What responses leave behind: conversations that go on, and background runs, which no client holds."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from baton.errors import BatonError, InvalidRequest, NotReady, Overloaded
from frontend.http.exchange import as_baton_error
from frontend.http.respond import Services, count, feed
from frontend.responses.items import Item, OutputItem, Reference
from frontend.responses.output import ResponseAnswer, after
from frontend.responses.store import RUNNING, ResponseStore, StoredResponse
from frontend.turn.choice import num_prompt_tokens

MAX_REFERENCES = 1000
"""Each is looked up in the store."""
MAX_RUNS = 1000
# The `route` label of runs in the metrics; their requests count under the route's own.
ROUTE = "background"
UNREACHED = (
    "The frontend that runs this response cannot be reached; retry, or send the request to that frontend."
)

MAX_STREAM_BYTES = 15 << 20
"""Longer streams are not stored and cannot be resumed. To another process a stream is sent in one frame."""

CallRun = Callable[[str, str, int | None], AsyncGenerator[bytes, None]]
"""Calls the process at an address about its run of a response, see `ResponseState.answer`. Raises NotReady if
the process cannot be reached."""


class Run:
    """One background response, running from construction until it ends or is stopped."""

    def __init__(self, answer: ResponseAnswer, services: Services) -> None:
        self.answer = answer
        self._metrics = services.metrics
        self.stream = bytearray(answer.opening()) if answer.stream else None  # None: is not stored
        self.followers: list[asyncio.Queue[bytes]] = []
        self._reason: BatonError | None = None
        self._record = services.metrics.begin(ROUTE, answer.response.id, answer.key_name)
        self._record.enter("queue")
        self._record.model = answer.choice.request.model
        self._record.num_prompt_tokens = num_prompt_tokens(answer.choices)
        if services.begin_trace is not None and answer.record is not None and answer.record.trace is not None:
            self._record.trace = services.begin_trace(answer.record.trace.own)
        # Only this task is ever cancelled, so that `_finish` always runs.
        self._making = asyncio.create_task(self._make(services))
        self.task = asyncio.create_task(self._finish())

    async def stop(self, reason: BatonError | None = None) -> None:
        """End the run now, as failed if there is a reason, else as cancelled, and wait until it is stored."""
        self._reason = reason
        self._making.cancel()
        await asyncio.wait([self.task])

    async def _make(self, services: Services) -> None:
        async with asyncio.timeout(services.request_timeout_s):
            try:
                await feed(self.answer, 0, services, self._record, lambda: None, self._publish, [])
            finally:
                self._record.generated()
        await self._publish(self.answer.finish())

    async def _finish(self) -> None:
        answer, record = self.answer, self._record
        try:
            await asyncio.wait([self._making])
            is_stopped = self._making.cancelled()
            error = self._reason if is_stopped else self._making.exception()
            if isinstance(error, Exception):
                failure = as_baton_error(error, answer.choice.request.request_id)
                record.status, record.code = failure.status, failure.code
                last = answer.failure(failure)
            else:
                last = answer.end("cancelled") if is_stopped else answer.closing()
            await answer.save(None if self.stream is None else bytes(self.stream) + last)
            await self._publish(last)
        finally:
            for queue in self.followers:
                queue.put_nowait(b"")
            count(answer.choices, record)
            self._metrics.end(record)

    async def _publish(self, data: bytes) -> None:
        if self.stream is not None:
            self.stream += data
            if len(self.stream) > MAX_STREAM_BYTES:
                self.stream = None
        for queue in self.followers if data else ():
            queue.put_nowait(data)


class PreviousNotFound(BatonError, code="previous_response_not_found", status=400):
    """The previous response, or one that it continues, is not stored."""


class _Output(msgspec.Struct):
    output: list[OutputItem]


def items_of(chain: Sequence[StoredResponse], without_output_of: str = "") -> list[Item]:
    """The input and the output of each stored response, except the output of one."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != without_output_of:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


class ResponseState:
    """The API's state across requests: stored responses, and the runs of this process."""

    def __init__(self, store: ResponseStore | None = None, call_run: CallRun | None = None) -> None:
        """`call_run` reaches the runs of other processes, which share the store."""
        self.store = store or ResponseStore()
        self._call_run = call_run
        self._runs: dict[str, Run] = {}
        self._num_starting = 0

    async def find(self, response_id: str, key_name: str) -> StoredResponse | None:
        """The response of that key, without items and events while it runs here."""
        run = await self._run(response_id)
        if run is None:
            return await self.store.load(response_id, key_name)
        return run.answer.stored() if run.answer.key_name == key_name else None

    async def history(self, response_id: str, key_name: str) -> list[Item]:
        """All input and output items up to the end of the previous response, one of that key."""
        previous = await self.find(response_id, key_name)
        if previous is not None and previous.status == RUNNING:
            raise InvalidRequest.at("previous_response_id", f"is {response_id!r}, which still runs; wait.")
        chain = await self.store.chain(response_id, key_name)
        if chain is None:
            raise PreviousNotFound(
                f"`previous_response_id`: response {response_id!r} or one that it continues is not stored.",
                param="previous_response_id",
            )
        return await asyncio.to_thread(items_of, chain)

    async def resolved(self, items: Mapping[str, Item | Reference], key_name: str) -> dict[str, Item]:
        """The items of `input`, also those that it refers to. Raises InvalidRequest if one is not stored."""
        if sum(isinstance(item, Reference) for item in items.values()) > MAX_REFERENCES:
            what = f"has more than {MAX_REFERENCES} item references; send the items."
            raise InvalidRequest.at("input", what)
        found: dict[str, Item] = {}
        for path, item in items.items():
            if not isinstance(item, Reference):
                found[path] = item
                continue
            stored = await self.store.with_item(item.id, key_name)
            known = [] if stored is None else await asyncio.to_thread(items_of, [stored])
            referred = next((each for each in known if each.id == item.id), None)
            if referred is None:
                raise InvalidRequest.at(f"{path}.id", f"is {item.id!r}; no stored response has this item.")
            found[path] = referred
        return found

    async def _run(self, response_id: str) -> Run | None:
        """The run, or None if it has ended. Waits for a run that is about to end, until it is stored."""
        run = self._runs.get(response_id)
        if run is None or run.answer.response.status == RUNNING:
            return run
        await asyncio.wait([run.task])
        return None

    async def start(self, answer: ResponseAnswer, services: Services) -> None:
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
        run = self._runs[answer.response.id] = Run(answer, services)
        run.task.add_done_callback(lambda _: self._runs.pop(answer.response.id))

    async def answer(self, response_id: str, sequence_number: int | None) -> AsyncGenerator[bytes, None]:
        """Empty bytes and the run's events after this sequence number, also future ones; nothing if the run
        has ended. Raises InvalidRequest if they are not stored. Without a number, cancel the run, and end
        once it is stored."""
        run = await self._run(response_id)
        if run is None:
            return
        if sequence_number is None:
            await run.stop()
            return
        if run.stream is None:
            raise events_not_stored(response_id)
        events = after(bytes(run.stream), sequence_number)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        run.followers.append(queue)
        try:
            yield b""
            data = events or await queue.get()
            while data:
                yield data
                data = await queue.get()
        finally:
            run.followers.remove(queue)

    def call(self, found: StoredResponse, sequence_number: int | None) -> AsyncGenerator[bytes, None]:
        """`answer` of the process that runs a response. Raises NotReady."""
        if found.id in self._runs:
            return self.answer(found.id, sequence_number)
        if self._call_run is None or not found.runs_at:
            raise NotReady(UNREACHED, retry_after_s=1)
        return self._call_run(found.runs_at, found.id, sequence_number)

    async def drain(self, timeout_s: float) -> None:
        """Wait for runs to end within the timeout, then fail the rest."""
        if not self._runs:
            return
        await asyncio.wait([run.task for run in self._runs.values()], timeout=timeout_s)
        reason = NotReady("The server shut down before the response was complete; send the request again.")
        await asyncio.gather(*(run.stop(reason) for run in list(self._runs.values())))

    async def close(self) -> None:
        await self.drain(0)
        await self.store.close()


def events_not_stored(response_id: str) -> InvalidRequest:
    """The error of a request for events that are not stored."""
    return InvalidRequest(
        f"The events of {response_id!r} are not stored: the response was not created with `background` and "
        "`stream`: true, or its stream was too long to store.",
        param="stream",
    )
