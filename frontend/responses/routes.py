"""The Responses API's routes: create, retrieve, delete, cancel, list input items, count input tokens."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from baton.errors import BatonError, InvalidRequest, NotReady
from frontend.http import sse
from frontend.http.answer import Answer
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.respond import Serve, client_of, generate, prepared, relay, repeated
from frontend.http.services import Services
from frontend.metrics import Tally
from frontend.responses.answer import ResponseAnswer
from frontend.responses.body import RUNNING, DeletedResponse, InputTokens, ItemList
from frontend.responses.create import FailedAtOnce, context_items, count_input_tokens, prepare_response
from frontend.responses.items import Item
from frontend.responses.output import EventWriter, after
from frontend.responses.runs import UNREACHED, ResponseState, Run, Told
from frontend.responses.store import StoredResponse
from frontend.turn.request import Client
from frontend.turn.seal import Seal

DEFAULT_PAGE = 20
MAX_PAGE = 100
MAX_QUERY_FIELDS = 100

T = TypeVar("T")


class ResponseNotFound(BatonError):
    """No response with this id is stored."""

    code = "response_not_found"
    status = 404
    kind = "invalid_request_error"


class _Followed(Answer):
    """Relays the events of a background run; it adds only the error event of the relay."""

    def __init__(self, told: Told, ignored: tuple[str, ...] = ()) -> None:
        self.ignored = ignored
        self._told = told

    def failure(self, error: BatonError) -> bytes:
        """An error event; the run itself may continue."""
        writer = EventWriter()
        writer.num_events = self._told.num_events
        return writer.event("error", code=error.code, message=error.message, param=error.param)


class ResponseRoutes:
    """The routes over one state; `seal` signs `encrypted_content`."""

    def __init__(self, state: ResponseState, seal: Seal) -> None:
        self._state = state
        self._seal = seal

    def table(self) -> dict[tuple[str, str], Serve]:
        """The Serve of each (method, path)."""
        return {
            ("POST", "/v1/responses"): self.create,
            ("POST", "/v1/responses/input_tokens"): self.input_tokens,
            ("GET", "/v1/responses/{response_id}"): self.retrieve,
            ("DELETE", "/v1/responses/{response_id}"): self.delete,
            ("POST", "/v1/responses/{response_id}/cancel"): self.cancel,
            ("GET", "/v1/responses/{response_id}/input_items"): self.input_items,
        }

    async def create(self, exchange: Exchange, services: Services, tally: Tally) -> None:
        """`POST /v1/responses`."""
        with repeated(exchange):
            await self._create(exchange, services, tally)

    async def _create(self, exchange: Exchange, services: Services, tally: Tally) -> None:
        try:
            answer = await prepared(self._prepare, exchange, services, tally)
        except FailedAtOnce as failed:
            tally.status = failed.status
            await exchange.start(200, sse.CONTENT_TYPE, sse.HEADERS)
            await exchange.end(failed.events)
            return
        if not answer.response.background:
            await generate(exchange, answer, services, tally)
            return
        _check_absent("Idempotency-Key", exchange.idempotency_key)
        _check_absent("Last-Event-ID", exchange.last_event_id)
        run = await self._state.runs.start(answer, services, exchange.quota)
        if answer.stream:
            with run.follow(-1) as outbox:
                await relay(exchange, _Followed(answer, answer.ignored), outbox, services, tally)
        else:
            await exchange.answer(200, answer.body(), ignored_header(answer.ignored))

    async def input_tokens(self, exchange: Exchange, services: Services, tally: Tally) -> None:
        """`POST /v1/responses/input_tokens`."""
        async with services.bodies.read(exchange, services.max_body_bytes) as raw:
            tally.model, num_tokens = await count_input_tokens(
                raw, client_of(exchange, services), services, self._state, self._seal
            )
        await exchange.answer(200, InputTokens(input_tokens=num_tokens))

    async def retrieve(self, exchange: Exchange, services: Services, tally: Tally) -> None:
        """`GET /v1/responses/{response_id}`; with `stream`, the events after `starting_after`."""
        _check_absent("Last-Event-ID", exchange.last_event_id)
        query = _Query(exchange.query)
        is_streamed = query.one("stream", _boolean, False)
        run, stored = await self._find(exchange)
        if not is_streamed:
            if run is not None:
                await exchange.answer(200, run.answer.body())
            else:
                assert stored is not None, "a response is running or stored"
                await exchange.answer(200, msgspec.Raw(stored.body))
            return
        sequence_number = query.one("starting_after", _natural, -1)
        if run is not None:
            with run.follow(sequence_number) as outbox:
                await relay(exchange, _Followed(run.answer), outbox, services, tally)
            return
        assert stored is not None, "a response is running or stored"
        if stored.status == RUNNING:
            elsewhere = self._state.elsewhere.follow(stored.runs_at, stored.id, sequence_number)
            async with elsewhere as other:
                if other is not None:
                    await relay(exchange, _Followed(other), other.outbox, services, tally)
                    return
            stored = await self._ended(exchange)
        data = _rest_of(stored, sequence_number)
        await exchange.start(200, sse.CONTENT_TYPE, sse.HEADERS)
        await exchange.end(data)

    async def delete(self, exchange: Exchange, services: Services, tally: Tally) -> None:  # noqa: ARG002  a Serve
        """`DELETE /v1/responses/{response_id}`; a running response is cancelled first."""
        await self._stop(exchange)
        response_id = exchange.path_params["response_id"]
        await self._state.store.delete(response_id)
        await exchange.answer(200, DeletedResponse(id=response_id))

    async def cancel(self, exchange: Exchange, services: Services, tally: Tally) -> None:  # noqa: ARG002  a Serve
        """`POST /v1/responses/{response_id}/cancel`; a response that has ended is returned unchanged."""
        run, stored = await self._stop(exchange)
        if run is not None:
            await exchange.answer(200, run.answer.body())
            return
        assert stored is not None, "a response is running or stored"
        if not stored.is_background:
            raise InvalidRequest(
                f"`response_id`: {stored.id!r} is not a background response; only those can be cancelled.",
                param="response_id",
            )
        await exchange.answer(200, msgspec.Raw(stored.body))

    async def input_items(self, exchange: Exchange, services: Services, tally: Tally) -> None:  # noqa: ARG002  a Serve
        """`GET /v1/responses/{response_id}/input_items`, latest first by default."""
        query = _Query(exchange.query)
        limit = query.one("limit", _page_size, DEFAULT_PAGE)
        order = query.one("order", _order, "desc")
        response_id = exchange.path_params["response_id"]
        items = await context_items(response_id, self._state.store, exchange.key_name)
        if items is None:
            raise _not_found(response_id)
        page, has_more = _page(items if order == "asc" else items[::-1], query.one("after", str, None), limit)
        first, last = (page[0].id, page[-1].id) if page else ("", "")
        await exchange.answer(200, ItemList(data=page, first_id=first, last_id=last, has_more=has_more))

    async def _prepare(self, raw: bytes, client: Client, services: Services) -> ResponseAnswer:
        return await prepare_response(raw, client, services, self._state, self._seal)

    async def _stop(self, exchange: Exchange) -> tuple[Run | None, StoredResponse | None]:
        """`_find`, after cancelling the run, wherever it is. Raises NotReady if that cannot be done now."""
        run, stored = await self._find(exchange)
        if run is not None:
            await run.stop()
        elif stored is not None and stored.status == RUNNING:
            await self._state.elsewhere.stop(stored.runs_at, stored.id)
            stored = await self._ended(exchange)
        return run, stored

    async def _ended(self, exchange: Exchange) -> StoredResponse:
        """The stored response whose run, in another process, has just ended."""
        _, stored = await self._find(exchange)
        if stored is None or stored.status == RUNNING:  # it cannot be stored there, it seems
            raise NotReady(UNREACHED, retry_after_s=1)
        return stored

    async def _find(self, exchange: Exchange) -> tuple[Run | None, StoredResponse | None]:
        """The run or the stored response of the path's id. Raises ResponseNotFound."""
        response_id = exchange.path_params["response_id"]
        run = await self._state.run(response_id, exchange.key_name)
        if run is not None:
            return run, None
        stored = await self._state.store.load(response_id, exchange.key_name)
        if stored is None:
            raise _not_found(response_id)
        return None, stored


def _check_absent(header: str, value: str) -> None:
    """Raises InvalidRequest for a header that continues streams which are not stored."""
    if value:
        raise InvalidRequest(
            f"`{header}` is not for background or stored responses; their streams go on with "
            "GET /v1/responses/ID?stream=true and `starting_after`.",
            param=header,
        )


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"No response with id {response_id!r} is stored.", param="response_id")


def _rest_of(stored: StoredResponse, sequence_number: int) -> bytes:
    """The events after that number. If the frontend died, only `response.failed` is left."""
    if stored.events is not None and stored.status != RUNNING:
        return after(stored.events, sequence_number)
    if stored.status == "failed":
        writer = EventWriter()
        writer.num_events = sequence_number + 1
        return writer.event("response.failed", response=msgspec.Raw(stored.body))
    raise InvalidRequest(
        f"The events of {stored.id!r} are not stored: the response was not created with `stream`: true, or "
        "its stream was too long to store.",
        param="stream",
    )


def _page(items: Sequence[Item], last_seen: str | None, limit: int) -> tuple[list[Item], bool]:
    start = 0
    if last_seen is not None:
        ids = [item.id for item in items]
        if last_seen not in ids:
            raise InvalidRequest(
                f"`after`: the response has no input item with id {last_seen!r}.", param="after"
            )
        start = ids.index(last_seen) + 1
    return list(items[start : start + limit]), len(items) > start + limit


class _Query:
    """The query parameters; unknown ones are ignored."""

    def __init__(self, query: str) -> None:
        try:
            self._values = parse_qs(query, max_num_fields=MAX_QUERY_FIELDS)
        except ValueError:
            raise InvalidRequest(f"The query string has more than {MAX_QUERY_FIELDS} parameters.") from None

    def one(self, name: str, read: Callable[[str], T], default: Any) -> Any:
        """The last value of that name, converted by `read`. Raises InvalidRequest if it is invalid."""
        if name not in self._values:
            return default
        try:
            return read(self._values[name][-1])
        except ValueError as error:
            raise InvalidRequest(f"`{name}`: {error}.", param=name) from None


def _boolean(text: str) -> bool:
    if text.lower() not in {"true", "false", "1", "0"}:
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() in {"true", "1"}


def _natural(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"must be the sequence number of an event, not {text!r}")
    return int(text)


def _page_size(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= MAX_PAGE:
        raise ValueError(f"must be between 1 and {MAX_PAGE}, not {text!r}")
    return int(text)


def _order(text: str) -> str:
    if text not in {"asc", "desc"}:
        raise ValueError(f"must be asc or desc, not {text!r}")
    return text
