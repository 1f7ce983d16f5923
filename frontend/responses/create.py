"""`POST /v1/responses`: builds the answer from the body and the previous responses, or counts its tokens."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.harmony.conversation import (
    Conversation,
    Instructions,
)
from frontend.http.body import decode, read
from frontend.http.services import Services
from frontend.responses.body import (
    LOGPROBS,
    RUNNING,
    SEALED,
    ResponseBody,
    ResponseError,
    ResponseObject,
    begun,
    summary_of,
)
from frontend.responses.given import GivenReference, InputReader
from frontend.responses.items import Item, OutputItem, turns
from frontend.responses.output import EventWriter, OutputShape, OutputWriter, ResponseAnswer
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore, StoredResponse
from frontend.responses.tools import OfferedTools, call_choice, offered_tools
from frontend.text.served import ContextTooLong
from frontend.turn.fields import GPT_OSS_EFFORTS, NEAREST_EFFORT, AnyEffort, effort_of, identity_of
from frontend.turn.form import answer_format
from frontend.turn.ids import vary
from frontend.turn.prepare import LONG_BYTES, encode, prepare
from frontend.turn.request import Client, Limits, TurnRequest
from frontend.turn.seal import Seal

MAX_REFERENCES = 1000
"""Each is looked up in the store."""


class PreviousNotFound(BatonError):
    """The previous response, or one that it continues, is not stored."""

    code = "previous_response_not_found"
    status = 400
    kind = "invalid_request_error"


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def history(response_id: str, responses: ResponseState, key_name: str) -> list[Item]:
    """All input and output items up to the end of the previous response, one of that key."""
    runs_here = await responses.run(response_id, key_name) is not None
    previous = None if runs_here else await responses.store.load(response_id, key_name)
    if runs_here or (previous is not None and previous.status == RUNNING):
        raise InvalidRequest(
            f"`previous_response_id`: response {response_id!r} is still in progress; wait until it ends.",
            param="previous_response_id",
        )
    chain = None if previous is None else await responses.store.chain(response_id, key_name)
    if chain is None:
        raise PreviousNotFound(
            f"`previous_response_id`: response {response_id!r} or one that it continues is not stored.",
            param="previous_response_id",
        )
    return await asyncio.to_thread(_items_of, chain)


async def context_items(response_id: str, store: ResponseStore, key_name: str) -> list[Item] | None:
    """All input of a stored response: the conversation that it continues, then its own items; None if part of
    it is no longer stored."""
    chain = await store.chain(response_id, key_name)
    if chain is None:
        return None
    return await asyncio.to_thread(_items_of, chain, response_id)


def _items_of(chain: Sequence[StoredResponse], without_output_of: str = "") -> list[Item]:
    """The input and the output of each response, but the output of that one."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != without_output_of:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(given: Sequence[Item | GivenReference], store: ResponseStore, key_name: str) -> list[Item]:
    """The items of `input`, with those that it refers to. Raises InvalidRequest if one is not stored."""
    if sum(isinstance(item, GivenReference) for item in given) > MAX_REFERENCES:
        raise InvalidRequest(
            f"`input` has more than {MAX_REFERENCES} item references; send the items.", param="input"
        )
    return [
        await _referred(item.id, f"input[{i}].id", store, key_name)
        if isinstance(item, GivenReference)
        else item
        for i, item in enumerate(given)
    ]


async def _referred(item_id: str, path: str, store: ResponseStore, key_name: str) -> Item:
    stored = await store.with_item(item_id, key_name)
    if stored is not None:
        for candidate in await asyncio.to_thread(_items_of, [stored]):
            if candidate.id == item_id:
                return candidate
    raise InvalidRequest(f"`{path}`: no stored response has an item with id {item_id!r}.", param=path)


def check_served(body: ResponseBody) -> None:
    """Raises InvalidRequest for missing or contradictory fields."""
    if body.background and body.store is False:
        raise InvalidRequest("`background` needs `store`: true.", param="background")
    if not (body.input or body.instructions or body.previous_response_id):
        raise InvalidRequest(
            "`input` is missing; it is required without `instructions` or `previous_response_id`.",
            param="input",
        )


def turn_request(
    body: ResponseBody,
    offered: OfferedTools,
    history: Sequence[Item],
    items: Sequence[Item],
    num_bytes: int,
) -> TurnRequest:
    """The request of the body after `history`; `items` are its `input`, `num_bytes` is the length of both.
    Instructions are those of this body only: the API does not carry them over."""
    found = turns([*history, *items], _path_after(len(history)))
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    talk = Conversation(
        turns=(*leading, *found),
        tools=tuple(offered.tools),
        namespaces=tuple(offered.namespaces),
        reasoning_effort=NEAREST_EFFORT[effort(body)],
        model_identity=identity_of(body.chat_template_args, body.chat_template_kwargs),
        answer_format=answer_format(None if body.text is None else body.text.format, "text.format"),
    )
    limits = Limits(
        max_tokens=body.max_output_tokens,
        max_calls=1 if body.parallel_tool_calls is False else None,
        logprobs=(body.top_logprobs or 0) if gives_logprobs(body) else None,
    )
    choice = call_choice(body, offered)
    return TurnRequest.of(body, talk, limits, choice, path="input", num_bytes=num_bytes)


def effort(body: ResponseBody) -> AnyEffort:
    """The reasoning effort, from whichever field gives it."""
    given = None if body.reasoning is None else body.reasoning.effort
    return effort_of(given, body.chat_template_args, body.chat_template_kwargs)


def not_enforced(body: ResponseBody, offered: OfferedTools) -> Iterator[str]:
    """Paths of known fields that are ignored or not honoured exactly."""
    yield from dict.fromkeys(offered.left_out)
    if effort(body) not in GPT_OSS_EFFORTS:
        yield "reasoning.effort"


def gives_logprobs(body: ResponseBody) -> bool:
    """Whether log probabilities are requested."""
    return LOGPROBS in (body.include or ()) or body.top_logprobs is not None


def _path_after(num_history: int) -> Callable[[int], str]:
    return lambda i: "previous_response_id" if i < num_history else f"input[{i - num_history}]"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body: its input `items`, the tools it offers, and the request it makes. `ignored` are the
    paths of unsupported fields and content."""

    body: ResponseBody
    items: list[Item]
    offered: OfferedTools
    request: TurnRequest
    ignored: tuple[str, ...]


class FailedAtOnce(Exception):
    """A streamed response whose prompt is too long: its `events` say so, as agents that then compact their
    history expect, instead of a status."""

    def __init__(self, error: ContextTooLong, response: ResponseObject) -> None:
        super().__init__()
        self.status = error.status
        writer = EventWriter()
        opening = writer.opening(response)
        failed = msgspec.structs.replace(
            response, status="failed", error=ResponseError.of(error), store=False
        )
        self.events = opening + writer.event("response.failed", response=failed)


async def prepare_response(
    raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal
) -> ResponseAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    asked = await _asked(raw, client, services, state, seal)
    body, request = asked.body, asked.request
    served = services.fleet.served(body.model)
    assert isinstance(request.prompt, Conversation), "responses are not raw completions"
    try:
        (choice,) = await prepare(
            request, client, served, services.thoughts, services.generator.check, max_choices=1
        )
    except ContextTooLong as error:
        if not body.stream:
            raise
        raise FailedAtOnce(error, begun(body, request.prompt.reasoning_effort)) from None
    shape = OutputShape(
        tools={tool.called: tool for tool in asked.offered.tools},
        machine_tools=frozenset(asked.offered.machine),
        keep=lambda item_id, text: services.thoughts.keep(client.owner, [item_id], text),
        as_summary=summary_of(body) is not None,
        seal=seal if SEALED in (body.include or ()) else None,
    )
    writer = EventWriter(streams=bool(body.stream))
    response = begun(body, request.prompt.reasoning_effort)
    unstored = ("store",) if response.store and state.store.is_failing else ()
    return ResponseAnswer(
        response,
        asked.items,
        choice,
        OutputWriter(choice, served.tokenizer, shape, writer),
        store=state.store,
        key_name=client.key_name,
        ignored=(*asked.ignored, *unstored),
    )


async def count_input_tokens(
    raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal
) -> tuple[str, int]:
    """(the model, the number of prompt tokens). Raises as `prepare_response` does."""
    asked = await _asked(raw, client, services, state, seal)
    served = services.fleet.served(asked.body.model)
    (prompt,) = await encode(asked.request, client.owner, served, services.thoughts)
    return served.name, len(prompt.token_ids)


async def _asked(raw: bytes, client: Client, services: Services, state: ResponseState, seal: Seal) -> Asked:
    body, unknown, reader, given = await read(
        raw, partial(_read, seal=seal, recall=partial(services.thoughts.recall, client.owner))
    )
    items = await resolved(given, state.store, client.key_name)
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state, client.key_name)
    # A short body may continue a long conversation, or refer to long items.
    recalls = bool(earlier) or any(isinstance(item, GivenReference) for item in given)
    num_bytes = len(raw) + (LONG_BYTES if recalls else 0)

    def made() -> tuple[OfferedTools, TurnRequest]:
        offered = offered_tools(body, earlier)
        services.check_tools(offered.left_out)
        return offered, turn_request(body, offered, earlier, items, num_bytes)

    offered, request = await asyncio.to_thread(made) if num_bytes > LONG_BYTES else made()
    return Asked(
        body=body,
        items=items,
        offered=offered,
        request=request,
        ignored=(*unknown, *sorted(reader.left_out), *not_enforced(body, offered)),
    )


def _read(
    raw: bytes, seal: Seal, recall: Callable[[str], str | None]
) -> tuple[ResponseBody, tuple[str, ...], InputReader, list[Item | GivenReference]]:
    vary(raw)  # so that no other response is stored under the id of this one
    body, unknown = decode(raw, ResponseBody)
    check_served(body)
    reader = InputReader(seal, recall)
    return body, unknown, reader, reader.read(body.input)
