"""Sends generated answers to the client, streamed or whole; stops when the client disconnects."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from functools import partial
from typing import TypeVar

from baton.errors import DeadlineExceeded, InvalidRequest, NotReady
from baton.pace import first_done
from frontend.http import sse
from frontend.http.answer import Answer, Numbered
from frontend.http.exchange import (
    ClientGone,
    Envelope,
    ErrorBody,
    Exchange,
    Receive,
    Scope,
    Send,
    as_baton_error,
    ignored_header,
)
from frontend.http.services import Services
from frontend.metrics import Tally
from frontend.turn.choice import Choice, num_prompt_tokens
from frontend.turn.ids import repeatable
from frontend.turn.request import Client

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
# Extra time beyond the request's deadline for the error to reach the client.
GRACE_S = 30.0
# Time to send the shutdown error once the drain timeout has cancelled a request.
GOODBYE_S = 1.0
SHUTTING_DOWN = NotReady("The server is shutting down; try again.", retry_after_s=1)

Serve = Callable[[Exchange, Services, Tally], Awaitable[None]]
"""Serves a request. Its exceptions become error responses."""


class Endpoint:
    """The ASGI app of one route. Failures become error responses and are counted by route."""

    def __init__(
        self, route: str, serve: Serve, services: Services, envelope: Envelope = ErrorBody.of
    ) -> None:
        self._envelope = envelope
        self._route = route
        self._serve = serve
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        services = self._services
        exchange = Exchange(scope, receive, send, self._envelope)
        tally = services.metrics.begin(self._route)
        try:
            async with asyncio.timeout(services.request_timeout_s + GRACE_S):
                await self._serve(exchange, services, tally)
        except ClientGone:
            tally.disconnected = True
        except asyncio.CancelledError:  # by the drain; the server would log it as a failure if it were raised
            tally.status = SHUTTING_DOWN.status
            if not exchange.started:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await exchange.answer_error(SHUTTING_DOWN)
        except Exception as error:  # noqa: BLE001 every failure becomes an error response
            # In its own function: a local variable with the error would be a reference cycle through its
            # traceback, which keeps the request's body in memory until garbage collection.
            await _report(error, exchange, tally)
        finally:
            if tally.disconnected:
                tally.status = CLIENT_GONE_STATUS
                log.info("client gone request_id=%s route=%s", exchange.request_id, self._route)
            services.metrics.end(tally)


async def _report(error: Exception, exchange: Exchange, tally: Tally) -> None:
    failure = as_baton_error(error, exchange.request_id)
    tally.status = failure.status
    log.info("refused request_id=%s status=%d code=%s", exchange.request_id, failure.status, failure.code)
    if exchange.started:  # the client has not read for the whole grace period
        tally.disconnected = True
    else:
        await exchange.answer_error(failure)


AnyAnswer = TypeVar("AnyAnswer", bound=Answer)
Prepare = Callable[[bytes, Client, Services], Awaitable[Answer]]
"""Builds the answer to a body, ready to be generated. Raises a BatonError if the body is refused."""


def generating(prepare: Prepare) -> Serve:
    """The Serve of a route that generates one answer."""

    async def serve(exchange: Exchange, services: Services, tally: Tally) -> None:
        with repeated(exchange):
            answer = await prepared(prepare, exchange, services, tally)
            await generate(exchange, answer, services, tally)

    return serve


def repeated(exchange: Exchange) -> AbstractContextManager[None]:
    """In this context the same is drawn for requests with the same idempotency key, if there is one."""
    key = exchange.idempotency_key
    return repeatable(f"{exchange.owner} {key}") if key else nullcontext()


async def prepared(
    prepare: Callable[[bytes, Client, Services], Awaitable[AnyAnswer]],
    exchange: Exchange,
    services: Services,
    tally: Tally,
) -> AnyAnswer:
    """Read the body and build its answer, ready to be generated."""
    async with services.bodies.read(exchange, services.max_body_bytes) as body:
        answer = await prepare(body, client_of(exchange, services), services)
    services.metrics.count_ignored(answer.ignored)
    tally.model = answer.model
    return answer


def client_of(exchange: Exchange, services: Services) -> Client:
    """The client of a request."""
    return Client(
        request_id=exchange.request_id,
        deadline_s=services.request_timeout_s,
        owner=exchange.owner,
        address=exchange.address,
        key_name=exchange.key_name,
        shares_cache=services.share_cache,
    )


def numbered(exchange: Exchange, answer: Answer) -> Answer:
    """The answer, with ids if the request can be repeated. Raises InvalidRequest."""
    if exchange.idempotency_key and answer.stream and len(answer.choices) == 1:
        return Numbered(answer, exchange.last_event_id)
    if exchange.last_event_id:
        raise InvalidRequest(
            "`Last-Event-ID` continues a streamed answer with one choice whose request had the same "
            "`Idempotency-Key`.",
            param="Last-Event-ID",
        )
    return answer


async def generate(exchange: Exchange, answer: Answer, services: Services, tally: Tally) -> None:
    """Generate the answer and send it; stops if the client disconnects. Raises InvalidRequest if the client
    has a part of the stream and it cannot be continued.
    """
    answer = numbered(exchange, answer)
    outbox = sse.Outbox(len(answer.choices))
    overdue = asyncio.get_running_loop().call_later(services.request_timeout_s, outbox.fail, DeadlineExceeded)
    try:
        async with _Tasks(
            _watch_client(exchange, answer, outbox),
            *(_pump(answer, index, services, outbox, tally) for index in range(len(answer.choices))),
        ):
            if answer.stream:
                await _stream(exchange, answer, outbox, services, tally)
            else:
                nothing = await outbox.take()
                assert not nothing, "an answer that is not streamed produces no bytes"
                await answer.settle()
                await exchange.answer(200, answer.body(), ignored_header(answer.ignored))
    finally:
        overdue.cancel()
        count(answer.choices, tally)


class _Tasks:
    """Tasks that run during the context and are cancelled at its end."""

    def __init__(self, *works: Coroutine[None, None, None]) -> None:
        self._works = works
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._tasks = list(map(asyncio.get_running_loop().create_task, self._works))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            if not task.done():
                await first_done(task)


async def _watch_client(exchange: Exchange, answer: Answer, outbox: sse.Outbox) -> None:
    await exchange.client_gone(lambda: outbox.put(answer.keep_alive if exchange.started else b""))
    outbox.fail(ClientGone())


async def _pump(answer: Answer, index: int, services: Services, outbox: sse.Outbox, tally: Tally) -> None:
    """Feed a choice's chunks to the outbox; the reader reports failures."""
    taken = partial(outbox.taken, services.first_event_wait_s, answer.keep_alive if answer.stream else b"")
    try:
        await feed(answer, index, services, tally, taken, outbox.send)
        outbox.put(answer.finish(index))
    except Exception as error:  # noqa: BLE001 handed to the reader, which raises it
        outbox.close(error)
    else:
        outbox.close()


async def feed(  # noqa: PLR0917  one call
    answer: Answer,
    index: int,
    services: Services,
    tally: Tally,
    on_taken: Callable[[], None],
    send: Callable[[bytes], Awaitable[None]],
) -> None:
    """Generate one choice and send its events, but the last ones; `on_taken` as in `Generator.generate`."""
    choice = answer.choices[index]
    async with aclosing(services.generator.generate(choice.request, choice.caller, on_taken)) as chunks:
        async for chunk in chunks:
            if tally.first_token_s is None:
                tally.first_token_s = time.perf_counter()
            await send(answer.feed(index, chunk))
            if choice.stopped:
                break


def count(choices: Sequence[Choice], tally: Tally) -> None:
    """Record the choices' counts in the tally."""
    tally.num_choices = len(choices)
    tally.num_prompt_tokens = num_prompt_tokens(choices)
    tally.num_completion_tokens = sum([choice.num_tokens for choice in choices])
    first, *others = choices
    tally.repairs = sum((choice.repairs for choice in others), first.repairs) if others else first.repairs


async def relay(
    exchange: Exchange,
    answer: Answer,
    fill: Callable[[sse.Outbox], Awaitable[None]],
    services: Services,
    tally: Tally,
) -> None:
    """Send the events of a background run, which `fill` puts into an outbox, until it ends or the client
    disconnects."""
    outbox = sse.Outbox(1)
    outbox.taken(services.first_event_wait_s, answer.keep_alive)
    async with _Tasks(_watch_client(exchange, answer, outbox), _fill(outbox, fill)):
        await _stream(exchange, answer, outbox, services, tally)


async def _fill(outbox: sse.Outbox, fill: Callable[[sse.Outbox], Awaitable[None]]) -> None:
    try:
        await fill(outbox)
    except Exception as error:  # noqa: BLE001 handed to the reader, which raises it
        outbox.close(error)
    else:
        outbox.close()


async def _stream(
    exchange: Exchange, answer: Answer, outbox: sse.Outbox, services: Services, tally: Tally
) -> None:
    """Send headers with the first bytes; from then on errors are sent as events."""
    first = await outbox.take()
    await exchange.start(200, sse.CONTENT_TYPE, [*sse.HEADERS, *ignored_header(answer.ignored)])
    await exchange.write(answer.opening() + first)
    async with _Tasks(outbox.keep_alive(services.keep_alive_s, answer.keep_alive)):
        try:
            while data := await outbox.take(exchange.write):
                if outbox.is_over:
                    break  # the last bytes go out with the closing events
                await exchange.write(data)
        except ClientGone:
            raise
        except asyncio.CancelledError:
            async with asyncio.timeout(GOODBYE_S):
                await exchange.end(answer.failure(SHUTTING_DOWN))
            raise
        except Exception as error:  # noqa: BLE001 every failure becomes an error event
            failure = as_baton_error(error, exchange.request_id)
            tally.status = failure.status
            data = answer.failure(failure)
        else:
            data += answer.closing()
        await answer.settle()
    await exchange.end(data)
