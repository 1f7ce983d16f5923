"""`POST /v1/responses`: builds the answer from the body and the previous responses, or counts its tokens."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.http.body import decode, read
from frontend.http.services import Services
from frontend.responses.body import (
    RUNNING,
    ResponseBody,
    ResponseError,
    ResponseObject,
    initial_response,
)
from frontend.responses.items import InputReader, Item, OutputItem, Reference
from frontend.responses.output import EventWriter, ResponseAnswer
from frontend.responses.request import OfferedTools, ParsedBody, effort, offered_tools, turn_request
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore, StoredResponse
from frontend.text.served import ContextTooLong
from frontend.turn.fields import GPT_OSS_EFFORTS, NEAREST_EFFORT
from frontend.turn.ids import vary
from frontend.turn.prepare import LONG_BYTES, encode
from frontend.turn.request import Client, TurnRequest
from frontend.turn.seal import Seal

MAX_REFERENCES = 1000
"""Each is looked up in the store."""


class PreviousNotFound(BatonError):
    """The previous response, or one that it continues, is not stored."""

    code = "previous_response_not_found"
    status = 400


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def history(response_id: str, responses: ResponseState, key_name: str) -> list[Item]:
    """All input and output items up to the end of the previous response, one of that key."""
    previous = await responses.find(response_id, key_name)
    if previous is not None and previous.status == RUNNING:
        raise InvalidRequest(
            f"`previous_response_id`: response {response_id!r} is still in progress; wait until it ends.",
            param="previous_response_id",
        )
    chain = await responses.store.chain(response_id, key_name)
    if chain is None:
        raise PreviousNotFound(
            f"`previous_response_id`: response {response_id!r} or one that it continues is not stored.",
            param="previous_response_id",
        )
    return await asyncio.to_thread(items_of, chain)


def items_of(chain: Sequence[StoredResponse], without_output_of: str = "") -> list[Item]:
    """The input and the output of each stored response, except the output of one."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != without_output_of:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(items: Sequence[Item | Reference], store: ResponseStore, key_name: str) -> list[Item]:
    """The items of `input`, with those that it refers to. Raises InvalidRequest if one is not stored."""
    if sum(isinstance(item, Reference) for item in items) > MAX_REFERENCES:
        raise InvalidRequest(
            f"`input` has more than {MAX_REFERENCES} item references; send the items.", param="input"
        )
    return [
        await _referred(item.id, f"input[{i}].id", store, key_name) if isinstance(item, Reference) else item
        for i, item in enumerate(items)
    ]


async def _referred(item_id: str, path: str, store: ResponseStore, key_name: str) -> Item:
    stored = await store.with_item(item_id, key_name)
    items = [] if stored is None else await asyncio.to_thread(items_of, [stored])
    for item in items:
        if item.id == item_id:
            return item
    raise InvalidRequest(f"`{path}`: no stored response has an item with id {item_id!r}.", param=path)


class FailedAtOnce(Exception):
    """A streamed response whose prompt is too long: its `events` say so, as agents that then compact their
    history expect, instead of a status."""

    def __init__(self, error: ContextTooLong, response: ResponseObject) -> None:
        super().__init__()
        self.status = error.status
        writer = EventWriter()
        failed = msgspec.structs.replace(
            response, status="failed", error=ResponseError.of(error), store=False
        )
        self.events = writer.opening(response) + writer.event("response.failed", response=failed)


async def prepare_response(
    raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal
) -> ResponseAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    parsed = await _parsed(raw, client, services, state, seal)
    response = initial_response(parsed.body, NEAREST_EFFORT[effort(parsed.body)])
    try:
        served, (choice,) = await services.prepare(parsed.request, client)
    except ContextTooLong as error:
        if not parsed.body.stream:
            raise
        raise FailedAtOnce(error, response) from None
    return ResponseAnswer(
        response,
        parsed,
        choice,
        served.tokenizer,
        state.store,
        key_name=client.key_name,
        seal=seal,
        keep=lambda item_id, text: services.thoughts.keep(client.owner, [item_id], text),
    )


async def count_input_tokens(
    raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal
) -> tuple[str, int]:
    """(the model, the number of prompt tokens). Raises as `prepare_response` does."""
    parsed = await _parsed(raw, client, services, state, seal)
    served = services.fleet.served(parsed.body.model)
    (prompt,) = await encode(parsed.request, client.owner, served, services.thoughts)
    return served.name, len(prompt.token_ids)


async def _parsed(
    raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal
) -> ParsedBody:
    recall = partial(services.thoughts.recall, client.owner)
    body, unknown, reader = await read(raw, partial(_read, seal=seal, recall=recall))
    items = await resolved(reader.items, state.store, client.key_name)
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state, client.key_name)
    # A short body may continue a long conversation, or refer to long items.
    recalls = bool(earlier) or any(isinstance(item, Reference) for item in reader.items)
    num_bytes = len(raw) + (LONG_BYTES if recalls else 0)

    def made() -> tuple[OfferedTools, TurnRequest]:
        offered = offered_tools(body, earlier)
        return offered, turn_request(body, offered, earlier, items, num_bytes)

    offered, request = await asyncio.to_thread(made) if num_bytes > LONG_BYTES else made()
    left_out = (*sorted(reader.left_out), *dict.fromkeys(offered.left_out))
    inexact = () if effort(body) in GPT_OSS_EFFORTS else ("reasoning.effort",)
    return ParsedBody(body, items, offered, request, (*unknown, *left_out, *inexact))


def _read(
    raw: bytes, seal: Seal, recall: Callable[[str], str | None]
) -> tuple[ResponseBody, tuple[str, ...], InputReader]:
    vary(raw)  # so that no other response is stored under the id of this one
    body, unknown = decode(raw, ResponseBody)
    return body, unknown, InputReader(body.input, seal, recall)
