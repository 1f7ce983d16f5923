"""`POST /v1/responses`: from the body and what it continues to a conversation, and to its answer-to-be."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from msgspec import structs

from baton.errors import BatonError, InvalidRequest
from frontend.chat import LONG_BODY_BYTES, conversation
from frontend.chat_form import form_of
from frontend.fields import decode
from frontend.guided import with_form
from frontend.harmony.conversation import Conversation, Instructions, Turn
from frontend.harmony.render import render
from frontend.response_answer import ResponseAnswer
from frontend.response_choice import ResponseChoice
from frontend.response_events import EventWriter
from frontend.response_items import GivenReference, Item, OutputItem, new_id, read_input, unread_fields
from frontend.response_object import ReasoningBody, ResponseObject, ToolBody
from frontend.response_runs import ResponseState
from frontend.response_schema import LOGPROBS, ResponseBody
from frontend.response_store import RUNNING, ResponseStore
from frontend.response_terms import in_chat_terms, renamed_errors, renamed_form
from frontend.response_turns import turns
from frontend.sampling import Asker, sampling_of, token_requests
from frontend.services import Services


class PreviousNotFound(BatonError):
    """There is no such response to go on from, or not all of what it goes on from."""

    code = "previous_response_not_found"
    status = 400
    kind = "invalid_request_error"


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def prepare_response(raw: bytes, asker: Asker, services: Services) -> ResponseAnswer:
    """An answer that can be begun. Raises the BatonError that refuses the body."""
    body, unknown = decode(raw, ResponseBody)
    check_served(body)
    store = services.responses.store
    chat = in_chat_terms(body)
    served = services.fleet.served(body.model)
    items = [await _resolved(item, i, store) for i, item in enumerate(read_input(body.input))]
    previous_id = body.previous_response_id
    history = [] if previous_id is None else await _history(previous_id, services.responses)
    with renamed_errors():
        form = renamed_form(form_of(chat))
        talk = conversation(chat, datetime.now(UTC).date().isoformat())
        talk = structs.replace(talk, turns=_turns(body, history, items))
        if len(raw) > LONG_BODY_BYTES or history:
            token_ids = await asyncio.to_thread(lambda: served.tokenizer.encode_segments(render(talk)))
        else:
            token_ids = served.tokenizer.encode_segments(render(talk))
        sampling = sampling_of(
            chat,
            served,
            num_prompt_tokens=len(token_ids),
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if gives_logprobs(body) else None,
        )
        (request,) = token_requests(
            asker, served, [token_ids], with_form(sampling, form), 1, priority=body.priority
        )
    writer = EventWriter() if body.stream else None
    choice = ResponseChoice(
        served.tokenizer,
        request,
        frozenset(tool.name for tool in talk.tools),
        writer,
        may_call=body.tool_choice != "none",
        max_calls=1 if body.parallel_tool_calls is False else None,
        cut_ids=body.stop_token_ids or (),
    )
    ignored = (*unknown, *unread_fields(body.input))
    return ResponseAnswer(response_object(body, talk), items, choice, writer, store, ignored=ignored)


def check_served(body: ResponseBody) -> None:
    """Raises InvalidRequest for contradictions."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    if body.background and body.store is False:
        raise InvalidRequest("`background` needs `store`: true.", param="background")
    if not (body.input or body.instructions or body.previous_response_id):
        raise InvalidRequest("`input` is missing.", param="input")


def gives_logprobs(body: ResponseBody) -> bool:
    """Whether the answer's text comes with log probabilities."""
    return LOGPROBS in (body.include or ()) or body.top_logprobs is not None


def response_object(body: ResponseBody, talk: Conversation) -> ResponseObject:
    """The response as it begins."""
    text_format = {"type": "text"} if body.text is None or body.text.format is None else body.text.format
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningBody(effort=talk.reasoning_effort),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": text_format, "verbosity": "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=_tools(body),
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


async def context_items(response_id: str, store: ResponseStore) -> list[Item] | None:
    """All input of a stored response: what it continues, with the answers, then its own; None if there is
    no such response any more."""
    chain = await store.chain(response_id)
    if chain is None:
        return None
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != response_id:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def _history(response_id: str, responses: ResponseState) -> list[Item]:
    """All that was said up to the end of the previous response."""
    runs_here = await responses.runs.get(response_id) is not None
    previous = None if runs_here else await responses.store.load(response_id)
    if runs_here or (previous is not None and previous.status == RUNNING):
        raise InvalidRequest(
            f"The response {response_id!r} is still in progress; wait for its end.",
            param="previous_response_id",
        )
    items = await context_items(response_id, responses.store)
    if previous is None or items is None:
        raise PreviousNotFound(
            f"The response {response_id!r} is not stored here, or not with all that it continues.",
            param="previous_response_id",
        )
    return items + list(msgspec.json.decode(previous.body, type=_Output).output)


async def _resolved(item: Item | GivenReference, index: int, store: ResponseStore) -> Item:
    if not isinstance(item, GivenReference):
        return item
    stored = await store.with_item(item.id)
    if stored is not None:
        known = msgspec.json.decode(stored.items, type=list[Item])
        known += msgspec.json.decode(stored.body, type=_Output).output
        for candidate in known:
            if candidate.id == item.id:
                return candidate
    raise InvalidRequest(
        f"`input[{index}].id`: no stored response has an item {item.id!r}.", param=f"input[{index}].id"
    )


def _turns(body: ResponseBody, history: list[Item], items: list[Item]) -> tuple[Turn, ...]:
    """The instructions of this response, which are no part of any history, then all items."""
    found = turns([*history, *items], _path_after(len(history)))
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    return (*leading, *found)


def _path_after(num_history: int) -> Callable[[int], str]:
    return lambda i: "previous_response_id" if i < num_history else f"input[{i - num_history}]"


def _tools(body: ResponseBody) -> list[ToolBody]:
    return [
        ToolBody(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for tool in body.tools or ()
    ]
