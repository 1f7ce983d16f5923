"""Sends generated answers to the client, streamed or whole; stops when the client disconnects."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.exceptions import HTTPException

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, NotReady
from frontend.http.answer import Answer, Numbered
from frontend.http.body import TOO_DEEP, AnyBody, Bodies, decode
from frontend.http.exchange import (
    ClientGone,
    Exchange,
    Headers,
    Receive,
    Scope,
    Send,
    as_baton_error,
    ignored_header,
)
from frontend.metrics import Metrics, Others
from frontend.record import Record, Trace
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.snapshot import Snapshots
from frontend.text.tokenizer import ContextTooLong
from frontend.turn.choice import Choice, num_prompt_tokens
from frontend.turn.request import Client, TurnRequest, encode, in_time, prepare
from frontend.turn.thoughts import Seal, Thoughts

BeginTrace = Callable[[str], Trace]
"""The span of a request with this `traceparent`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services:
    """One app's dependencies and limits.

    A stream sends headers with its first token, or `first_event_wait_s` after a worker has taken it, so that
    early failures still get an HTTP error status. While it is idle, it sends a comment every `keep_alive_s`.
    With `share_cache`, API keys share cached KV. `seal` signs the reasoning that clients carry. `has_page`:
    the live page is at `/`."""

    fleet: Fleet
    generator: Generator
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    others: Others
    thoughts: Thoughts = dataclasses.field(default_factory=Thoughts)
    seal: Seal = dataclasses.field(default_factory=Seal)
    request_timeout_s: float = 600.0
    bodies: Bodies = dataclasses.field(default_factory=Bodies)
    max_choices: int = 16
    first_event_wait_s: float = 0.1
    keep_alive_s: float = 10.0
    share_cache: bool = False
    begin_trace: BeginTrace | None = None
    has_page: bool = True

    @cached_property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.fleet, self.metrics, self.others)


CLIENT_GONE_STATUS = 499
# Extra time beyond the request's deadline for the error to reach the client.
GRACE_S = 30.0
# Time to send the shutdown error once the drain timeout has cancelled a request.
GOODBYE_S = 1.0
SHUTTING_DOWN = NotReady("The server is shutting down; try again.", retry_after_s=1)

Serve = Callable[[Exchange, Services, Record], Awaitable[None]]
"""Serves a request. Its exceptions become error responses."""
Struct = type[msgspec.Struct]


class Operation(msgspec.Struct, frozen=True):
    """A method of a path: how it is served, unless it is a page, and what the OpenAPI document says. Its
    answer, if it is JSON, is one of `answers`; `example` is a body but for the model."""

    serve: Serve | None
    summary: str
    answers: tuple[Struct, ...] = ()
    body: Struct | None = None
    example: Mapping[str, Any] = {}
    query: Struct | None = None
    is_streamed: bool = False


Operations = Mapping[tuple[str, str], Operation]
"""By method and path."""


class Endpoint:
    """The ASGI app of one path, with the Serve of each method. Failures are counted, and become error
    responses or a last event. Raises HTTPException for other methods."""

    def __init__(self, route: str, methods: Mapping[str, Serve], services: Services) -> None:
        self.methods = methods
        self._route = route
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self.methods:
            raise HTTPException(405, headers={"Allow": ", ".join(self.methods)})
        services = self._services
        exchange = Exchange(scope, receive, send)
        record = services.metrics.begin(self._route, exchange.request_id, exchange.key_name)
        record.address = exchange.address
        if services.begin_trace is not None:
            record.trace = services.begin_trace(exchange.headers.get(b"traceparent", b"").decode("latin-1"))
        try:
            async with asyncio.timeout(services.request_timeout_s + GRACE_S):
                await self.methods[scope["method"]](exchange, services, record)
        except ClientGone:
            record.disconnected = True
        except asyncio.CancelledError:  # by the drain; the server would log it as a failure if it were raised
            await _fail(SHUTTING_DOWN, exchange, record, GOODBYE_S)
        except Exception as error:  # noqa: BLE001 every failure becomes an error response
            # In its own function: a local variable with the error would be a reference cycle through its
            # traceback, which keeps the request's body in memory until garbage collection.
            await _fail(as_baton_error(error, exchange.request_id), exchange, record, GRACE_S)
        finally:
            exchange.end_failed = None  # it has the exchange
            if record.disconnected:
                record.status = CLIENT_GONE_STATUS
            services.metrics.end(record)


async def _fail(failure: BatonError, exchange: Exchange, record: Record, limit_s: float) -> None:
    """Send the error to a client that reads it within `limit_s`."""
    record.status, record.code = failure.status, failure.code
    try:
        async with asyncio.timeout(limit_s):
            record.disconnected = exchange.started and exchange.end_failed is None
            await exchange.fail(failure, server_timing(record))
    except TimeoutError:
        record.disconnected = True


def server_timing(record: Record) -> Headers:
    """The Server-Timing header of an answer that is sent whole: milliseconds by stage."""
    stages = [f"{stage};dur={lasted_s * 1000:.1f}" for stage, lasted_s in record.spent().items()]
    return [(b"server-timing", ", ".join(stages).encode())] if stages else []


AnyAnswer = TypeVar("AnyAnswer", bound=Answer)
T = TypeVar("T")


class Asked(NamedTuple, Generic[AnyAnswer]):
    """What a body asks for. `ignored` are the fields without effect, `answer` makes the answer of the
    choices, `too_long` the error if the prompt does not fit the context."""

    request: TurnRequest
    ignored: tuple[str, ...]
    answer: Callable[[list[Choice]], AnyAnswer]
    too_long: Callable[[ContextTooLong], Exception] = lambda error: error


Ask = Callable[[bytes, Client, Services], Awaitable[Asked[AnyAnswer]]]
"""Reads a body. Raises a BatonError if it is refused."""


async def read(
    raw: bytes, body_type: type[AnyBody], make: Callable[[AnyBody, int], T]
) -> tuple[AnyBody, tuple[str, ...], T]:
    """The validated body, its unknown fields (see `decode`), and what `make` makes of it and its length."""

    def reading() -> tuple[AnyBody, tuple[str, ...], T]:
        body, unknown = decode(raw, body_type)
        try:
            return body, unknown, make(body, len(raw))
        except RecursionError:
            raise InvalidRequest(TOO_DEEP) from None

    return await in_time(len(raw), reading)


def asking(
    body_type: type[AnyBody],
    make: Callable[[AnyBody, int], tuple[TurnRequest, Sequence[str]]],
    answer: Callable[[AnyBody, list[Choice]], Answer],
) -> Ask[Answer]:
    """Reads bodies of that type. `make` gives the request and the known fields without effect."""

    async def ask(raw: bytes, _: Client, __: Services) -> Asked[Answer]:
        body, unknown, (request, ignored) = await read(raw, body_type, make)
        return Asked(request, (*unknown, *ignored), partial(answer, body))

    return ask


def generating(
    ask: Ask[Answer], summary: str, answer: Struct, body: Struct, example: Mapping[str, Any]
) -> Operation:
    """An operation that generates one answer."""

    async def serve(exchange: Exchange, services: Services, record: Record) -> None:
        with exchange.repeated():
            answer = await prepared(ask, exchange, services, record)
            await generate(exchange, answer, services, record)

    return Operation(serve, summary, (answer,), body, example, is_streamed=True)


def counting(
    ask: Ask[AnyAnswer], summary: str, answer: Struct, body: Struct, example: Mapping[str, Any]
) -> Operation:
    """An operation that counts a conversation's `input_tokens`."""

    async def serve(exchange: Exchange, services: Services, record: Record) -> None:
        client = client_of(exchange, services, record)
        async with services.bodies.received(exchange) as raw:
            asked = await ask(raw, client, services)
            served = services.fleet.served(asked.request.fields.model)
            (prompt,) = await encode(asked.request, client.owner, served, services.thoughts)
        record.model = served.name
        services.metrics.count_ignored(asked.ignored)
        counted = answer(input_tokens=len(prompt.token_ids))
        await exchange.answer(200, counted, ignored_header(asked.ignored))

    return Operation(serve, summary, (answer,), body, example)


async def prepared(ask: Ask[AnyAnswer], exchange: Exchange, services: Services, record: Record) -> AnyAnswer:
    """Read the body and build its answer, ready to be generated."""
    client = client_of(exchange, services, record)
    record.stage = "read"  # since its arrival
    async with services.bodies.received(exchange) as raw:
        record.enter("render")
        asked = await ask(raw, client, services)
        served, check = services.fleet.served(asked.request.fields.model), services.generator.check
        try:
            choices = await prepare(
                asked.request, client, served, services.thoughts, check, max_choices=services.max_choices
            )
        except ContextTooLong as error:
            raise asked.too_long(error) from None
    answer = asked.answer(choices)
    answer.ignored = (*asked.ignored, *answer.ignored)
    services.metrics.count_ignored(answer.ignored)
    record.model, answer.record = served.name, record
    return answer


def client_of(exchange: Exchange, services: Services, record: Record) -> Client:
    """The client of a request."""
    return Client(
        request_id=exchange.request_id,
        deadline_s=services.request_timeout_s,
        owner=exchange.owner,
        address=exchange.address,
        key_name=exchange.key_name,
        shares_cache=services.share_cache,
        trace_headers=None if record.trace is None else {"traceparent": record.trace.own},
    )


async def generate(exchange: Exchange, answer: Answer, services: Services, record: Record) -> None:
    """Generate the answer and send it; stops if the client disconnects. Raises InvalidRequest if the client
    has a part of the stream and it cannot be continued."""
    if exchange.idempotency_key and answer.stream and len(answer.choices) == 1:
        answer = Numbered(answer, exchange.last_event or (0, 0))
    elif exchange.last_event:
        raise InvalidRequest.at("Last-Event-ID", "continues a streamed answer with one choice.")
    record.num_prompt_tokens = num_prompt_tokens(answer.choices)
    delivery = Delivery(exchange, answer, services)
    try:
        async with delivery.within(services.request_timeout_s):
            last = await _choices(answer, services, record, delivery)
        if answer.stream:
            last += answer.closing()
        await answer.settle()
        if answer.stream:
            await delivery.end(last)
        else:
            headers = [*ignored_header(answer.ignored), *server_timing(record)]
            await exchange.answer(200, answer.body(), headers)
            await exchange.taken()
    finally:
        count(answer.choices, record)


class Delivery:
    """An answer on its way to the client. A stream's headers go out with its first events, and comments while
    it is idle; who sends events waits for a slow client."""

    def __init__(self, exchange: Exchange, answer: Answer, services: Services) -> None:
        self._exchange = exchange
        self._answer = answer
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._num_sent = 0
        self._starting = asyncio.Lock()
        self.blocked_s = exchange.blocked_s
        self._commenting: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def within(self, limit_s: float) -> AsyncIterator[None]:
        """Ends with ClientGone when the client disconnects, and with DeadlineExceeded after `limit_s`."""
        gone = self._exchange.gone

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the answer has ended
                limit.reschedule(0)

        try:
            async with asyncio.timeout(limit_s) as limit:
                gone.add_done_callback(leave)
                yield
        except TimeoutError:
            raise (ClientGone if gone.done() else DeadlineExceeded) from None
        finally:
            gone.remove_done_callback(leave)
            if self._idle is not None:
                self._idle.cancel()
            if self._commenting is not None:
                self._commenting.cancel()
                await asyncio.wait([self._commenting])
                self._commenting = None  # its traceback has this object, which would keep the answer

    def keep_alive(self) -> None:
        """Send comments from now on, the first one soon, whenever a stream is idle."""
        if self._answer.stream:
            wait_s = self._services.first_event_wait_s
            self._idle = self._loop.call_later(wait_s, self._begin_comments, self._num_sent)

    def send(self, events: bytes) -> Awaitable[None]:
        self._num_sent += 1
        if not self._exchange.started:
            return self._send_first(events)
        return self._exchange.send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_first(self, events: bytes) -> None:
        await self.send(await self._opening() + events)

    async def end(self, events: bytes) -> None:
        if not self._exchange.started:
            events = await self._opening() + events
        self._exchange.end_failed = None  # what is stored has ended, and stays as it is
        await self._exchange.end(events)

    async def _opening(self) -> bytes:
        """Send the headers; returns the first events, for the first one who sends."""
        async with self._starting:
            if self._exchange.started:
                return b""
            await self._exchange.start_events(ignored_header(self._answer.ignored))
            self._exchange.end_failed = self._end_failed
            return self._answer.opening()

    async def _end_failed(self, error: BatonError) -> None:
        last = self._answer.failure(error)
        await self._answer.settle()
        await self._exchange.end(last)

    def _begin_comments(self, num_sent: int) -> None:
        self._commenting = self._loop.create_task(self._comment(num_sent))

    async def _comment(self, num_sent: int) -> None:
        while True:
            if self._num_sent == num_sent:
                await self.send(self._answer.keep_alive)
            num_sent = self._num_sent
            await asyncio.sleep(self._services.keep_alive_s)  # idle until then: a comment is due


async def _choices(answer: Answer, services: Services, record: Record, delivery: Delivery) -> bytes:
    """Generate all choices and send their events, but the last ones, which are returned."""
    num_untaken = num_running = len(answer.choices)
    last = b""

    def on_taken() -> None:
        nonlocal num_untaken
        num_untaken -= 1
        if not num_untaken:
            delivery.keep_alive()

    async def choice(index: int) -> None:
        nonlocal num_running, last
        try:
            await feed(answer, index, services, record, on_taken, delivery.send, delivery.blocked_s)
        finally:
            num_running -= 1
            if not num_running:  # at once: on a busy loop the tasks below take their time to end
                record.generated()
        last = answer.writer(index).finish()
        if num_running and last:
            await delivery.send(last)

    if num_running == 1:
        # A task of its own: a wake-up for each token need not pass through all callers of this function.
        await asyncio.get_running_loop().create_task(choice(0))
        return last
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_running):
                tasks.create_task(choice(index))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return last


async def feed(  # noqa: PLR0917  one call
    answer: Answer,
    index: int,
    services: Services,
    record: Record,
    on_taken: Callable[[], None],
    send: Callable[[bytes], Awaitable[None]],
    blocked_s: list[float],
) -> None:
    """Generate one choice and send its events, but the last ones; `on_taken` as in `Generator.generate`,
    `blocked_s` as in `Exchange`."""
    choice, write, leg = answer.choices[index], answer.writer(index).feed, record.leg()
    gaps, clock_ns, last_ns, longest_ns = services.metrics.gaps(record), time.perf_counter_ns, 0, 0
    generated = services.generator.generate(choice.request, choice.caller, on_taken, leg)
    leg.progress = progress = [0, 0, 0]
    try:
        async for chunk in generated:
            now_ns = progress[1] = clock_ns()
            if last_ns:
                gap_ns = now_ns - last_ns
                if gap_ns > longest_ns:
                    longest_ns, leg.gap_s, leg.gap_at = gap_ns, gap_ns / 1e9, choice.num_tokens
                gaps[gap_ns // 1_000_000] += 1
            elif record.first_token_s is None:
                record.first_token_s = now_ns / 1e9 - record.began_s
                services.metrics.first_ms[int(record.first_token_s * 1000)] += 1
            if events := write(chunk):
                await send(events)
            if blocked_s:
                leg.blocked(max(blocked_s))
                blocked_s.clear()
                now_ns = clock_ns()
            last_ns = progress[2] = now_ns
            progress[0] = choice.num_tokens
            if choice.stopped:
                break
    finally:
        await generated.aclose()


def count(choices: Sequence[Choice], record: Record) -> None:
    """Record what the choices have counted."""
    record.num_choices = len(choices)
    firsts = [choice for choice in choices if choice.request.sampling.choice == 0]
    record.num_cached_tokens = sum([choice.num_cached_tokens for choice in firsts])
    record.num_completion_tokens = sum([choice.num_tokens for choice in choices])
    first, *others = choices
    record.repairs = sum((choice.repairs for choice in others), first.repairs) if others else first.repairs
