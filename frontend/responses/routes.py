"""The Responses API's routes: create, retrieve, delete, cancel, list input items, count input tokens."""

import asyncio
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from baton.errors import BatonError, InvalidRequest, NotReady
from frontend.http.answer import Answer
from frontend.http.body import AnyBody, convert
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.respond import (
    GRACE_S,
    Asked,
    Delivery,
    Operation,
    Operations,
    Services,
    counting,
    generate,
    prepared,
    read,
)
from frontend.record import Record
from frontend.responses.body import DeletedResponse, InputTokens, ItemList, ResponseBody, turn_request
from frontend.responses.items import InputReader, Reference
from frontend.responses.output import EventWriter, FailedAtOnce, ResponseAnswer, ResponseObject, after
from frontend.responses.runs import UNREACHED, ResponseState, events_not_stored, items_of
from frontend.responses.store import MAX_CHAIN_BYTES, RUNNING, StoredResponse
from frontend.turn.ids import vary
from frontend.turn.request import Client, in_time

MAX_QUERY = 8192
"""Characters of a query string that are read."""


class EventsQuery(msgspec.Struct):
    """The query of `GET /v1/responses/{response_id}`."""

    stream: Annotated[bool, Meta(description="Return the response's events.")] = False
    starting_after: Annotated[
        int, Meta(ge=0, le=999_999_999, description="Sequence number of the last event already received.")
    ] = -1


class PageQuery(msgspec.Struct):
    """The query of `GET /v1/responses/{response_id}/input_items`."""

    limit: Annotated[int, Meta(ge=1, le=100, description="Items per page.")] = 20
    order: Annotated[Literal["asc", "desc"], Meta(description="`desc`: latest first.")] = "desc"
    after: Annotated[str | None, Meta(description="Id of the last item of the previous page.")] = None


class ResponseNotFound(BatonError, code="response_not_found", status=404):
    """No response with this id is stored."""


class Followed(Answer):
    """The stream of a run, here or in another process, to a client that has its first `num_events` events."""

    stream = True

    def __init__(self, num_events: int, ignored: tuple[str, ...] = ()) -> None:
        self.ignored = ignored
        self.num_events = num_events

    def failure(self, error: BatonError) -> bytes:
        """An error event; the run itself may continue."""
        writer = EventWriter(self.num_events)
        return writer.event("error", code=error.code, message=error.message, param=error.param)


class ResponseRoutes:
    """The routes over one state."""

    def __init__(self, state: ResponseState) -> None:
        self._state = state

    def operations(self) -> Operations:
        example = {"input": "Hello there!", "reasoning": {"effort": "low"}, "max_output_tokens": 100}
        response, body = (ResponseObject,), ResponseBody
        one = "/v1/responses/{response_id}"
        return {
            ("POST", "/v1/responses"): Operation(
                self.create, "Create a response", response, body, example, is_streamed=True
            ),
            ("POST", "/v1/responses/input_tokens"): counting(
                self._ask, "Count a response's input tokens", InputTokens, body, example
            ),
            ("GET", one): Operation(
                self.retrieve,
                "Get a stored or background response",
                response,
                query=EventsQuery,
                is_streamed=True,
            ),
            ("DELETE", one): Operation(self.delete, "Delete a response", (DeletedResponse,)),
            ("POST", f"{one}/cancel"): Operation(self.cancel, "Cancel a background response", response),
            ("GET", f"{one}/input_items"): Operation(
                self.input_items, "List a response's input items", (ItemList,), query=PageQuery
            ),
        }

    async def _ask(self, raw: bytes, client: Client, services: Services) -> Asked[ResponseAnswer]:
        """See `frontend.http.respond.Ask`."""

        def reading(body: ResponseBody, _: int) -> InputReader:
            vary(raw)  # so that no other response is stored under the id of this one
            return InputReader(body.input, services.seal)

        body, unknown, reader = await read(raw, ResponseBody, reading)
        state, previous_id = self._state, body.previous_response_id
        items = await state.resolved(reader.items, client.key_name)
        earlier = [] if previous_id is None else await state.history(previous_id, client.key_name)
        # A short body may continue a long conversation, or refer to long items.
        recalls = bool(earlier) or any(isinstance(item, Reference) for item in reader.items.values())
        num_bytes = len(raw) + (MAX_CHAIN_BYTES if recalls else 0)
        making = partial(turn_request, body, earlier, items, num_bytes)
        request, machine, ignored = await in_time(num_bytes, making)
        answer = partial(
            ResponseAnswer,
            body,
            [*items.values()],
            machine,
            state.store,
            services.seal,
            client.key_name,
        )
        asked = Asked(request, (*unknown, *sorted(reader.left_out), *ignored), answer)
        return asked._replace(too_long=partial(FailedAtOnce, body)) if body.stream else asked

    async def create(self, exchange: Exchange, services: Services, record: Record) -> None:
        with exchange.repeated():
            try:
                answer = await prepared(self._ask, exchange, services, record)
            except FailedAtOnce as failed:
                record.status = failed.status
                await exchange.start_events()
                await exchange.end(failed.events)
                return
            if not answer.response.background:
                await generate(exchange, answer, services, record)
                return
        if exchange.idempotency_key:
            raise InvalidRequest.at(
                "Idempotency-Key",
                "is not for background responses; their streams go on with "
                "GET /v1/responses/ID?stream=true and `starting_after`.",
            )
        await self._state.start(answer, services)
        if not answer.stream:
            await exchange.answer(200, answer.body(), ignored_header(answer.ignored))
            return
        record.enter("stream")
        await self._follow(exchange, services, answer.stored(), Followed(0, answer.ignored))

    async def retrieve(self, exchange: Exchange, services: Services, record: Record) -> None:  # noqa: ARG002  a Serve
        """`GET /v1/responses/{response_id}`; with `stream`, the events after `starting_after`."""
        query = _query(exchange, EventsQuery)
        found = await self._find(exchange)
        if not query.stream:
            await exchange.answer(200, msgspec.Raw(found.body))
            return
        if found.status == RUNNING:
            if await self._follow(exchange, services, found, Followed(query.starting_after + 1)):
                return
            found = await self._find(exchange, has_ended=True)
        if found.events is not None:
            rest = after(found.events, query.starting_after)
        elif found.status == "failed":  # perhaps its frontend died, and only this is left
            writer = EventWriter(query.starting_after + 1)
            rest = writer.event("response.failed", response=msgspec.Raw(found.body))
        else:
            raise events_not_stored(found.id)
        await exchange.start_events()
        await exchange.end(rest)

    async def delete(self, exchange: Exchange, services: Services, record: Record) -> None:  # noqa: ARG002  a Serve
        """`DELETE /v1/responses/{response_id}`; a running response is cancelled first."""
        found = await self._stopped(exchange)
        await self._state.store.delete(found.id)
        await exchange.answer(200, DeletedResponse(id=found.id))

    async def cancel(self, exchange: Exchange, services: Services, record: Record) -> None:  # noqa: ARG002  a Serve
        """`POST /v1/responses/{response_id}/cancel`; a response that has ended is returned unchanged."""
        found = await self._stopped(exchange)
        if not found.is_background:
            raise InvalidRequest.at("response_id", f"is {found.id!r}; only background ones can be cancelled.")
        await exchange.answer(200, msgspec.Raw(found.body))

    async def input_items(self, exchange: Exchange, services: Services, record: Record) -> None:  # noqa: ARG002  a Serve
        """`GET /v1/responses/{response_id}/input_items`, latest first by default."""
        query = _query(exchange, PageQuery)
        response_id = exchange.path_params["response_id"]
        chain = await self._state.store.chain(response_id, exchange.key_name)
        if chain is None:  # it, or one that it continues
            raise _not_found(response_id)
        items = await asyncio.to_thread(items_of, chain, response_id)
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            ids = [item.id for item in items]
            if query.after not in ids:
                raise InvalidRequest.at("after", f"is {query.after!r}; the response has no such input item.")
            items = items[ids.index(query.after) + 1 :]
        page, has_more = items[: query.limit], len(items) > query.limit
        first, last = (page[0].id, page[-1].id) if page else ("", "")
        await exchange.answer(200, ItemList(data=page, first_id=first, last_id=last, has_more=has_more))

    async def _find(self, exchange: Exchange, *, has_ended: bool = False) -> StoredResponse:
        """The response of the path's id. Raises ResponseNotFound."""
        response_id = exchange.path_params["response_id"]
        found = await self._state.find(response_id, exchange.key_name)
        if found is None:
            raise _not_found(response_id)
        if has_ended and found.status == RUNNING:  # the process that ran it could not store it
            raise NotReady(UNREACHED, retry_after_s=1)
        return found

    async def _follow(
        self, exchange: Exchange, services: Services, found: StoredResponse, followed: Followed
    ) -> bool:
        """Send the further events of a run; returns False if it has ended."""
        async with aclosing(self._state.call(found, followed.num_events - 1)) as events:
            if await anext(events, None) is None:
                return False
            delivery = Delivery(exchange, followed, services)
            async with delivery.within(services.request_timeout_s + GRACE_S):
                delivery.keep_alive()
                async for data in events:
                    followed.num_events += data.count(b"\n\n")
                    await delivery.send(data)
            await delivery.end(b"")
            return True

    async def _stopped(self, exchange: Exchange) -> StoredResponse:
        """`_find`, after cancelling the run, wherever it is. Raises NotReady if that cannot be done now."""
        found = await self._find(exchange)
        if found.status == RUNNING:
            async with aclosing(self._state.call(found, None)) as replies:
                await anext(replies, None)
            found = await self._find(exchange, has_ended=True)
        return found


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"No response with id {response_id!r} is stored.", param="response_id")


def _query(exchange: Exchange, query: type[AnyBody]) -> AnyBody:
    """The query string, of each parameter the last value. Raises InvalidRequest."""
    return convert(dict(parse_qsl(exchange.query[:MAX_QUERY])), query, "", strict=False)
