"""`POST /v1/responses`: builds the answer from the body and the previous responses, or counts its tokens."""

from collections.abc import Callable
from functools import partial

import msgspec

from frontend.harmony.conversation import Conversation
from frontend.http.body import decode, read
from frontend.http.services import Services
from frontend.responses.answer import ResponseAnswer
from frontend.responses.body import SEALED, ResponseBody
from frontend.responses.events import EventWriter
from frontend.responses.given import GivenReference, InputReader
from frontend.responses.history import history, resolved
from frontend.responses.items import Item
from frontend.responses.object import ResponseError, ResponseObject, begun, summary_of
from frontend.responses.output import OutputShape, OutputWriter
from frontend.responses.request import check_served, not_enforced, turn_request
from frontend.responses.runs import ResponseState
from frontend.responses.tools import OfferedTools, offered_tools
from frontend.text.served import ContextTooLong
from frontend.turn.prepare import LONG_BYTES, encode, prepare
from frontend.turn.request import Asker, TurnRequest
from frontend.turn.seal import Seal


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
        opening = [writer.event(f"response.{name}", response=response) for name in ("created", "in_progress")]
        failed = msgspec.structs.replace(
            response, status="failed", error=ResponseError.of(error), store=False
        )
        self.events = b"".join(opening) + writer.event("response.failed", response=failed)


async def prepare_response(
    raw: bytes, asker: Asker, services: Services, state: ResponseState, seal: Seal
) -> ResponseAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    asked = await _asked(raw, asker, services, state, seal)
    body, request = asked.body, asked.request
    served = services.fleet.served(body.model)
    assert isinstance(request.prompt, Conversation), "responses are not raw completions"
    try:
        (choice,) = await prepare(
            request, asker, served, services.thoughts, services.generator.check, max_choices=1
        )
    except ContextTooLong as error:
        if not body.stream:
            raise
        raise FailedAtOnce(error, begun(body, request.prompt.reasoning_effort)) from None
    shape = OutputShape(
        tools={tool.called: tool for tool in asked.offered.tools},
        machine_tools=frozenset(asked.offered.machine),
        keep=lambda item_id, text: services.thoughts.keep(asker.owner, [item_id], text),
        as_summary=summary_of(body) is not None,
        seal=seal if SEALED in (body.include or ()) else None,
    )
    writer = EventWriter() if body.stream else None
    response = begun(body, request.prompt.reasoning_effort)
    unstored = ("store",) if response.store and state.store.is_failing else ()
    return ResponseAnswer(
        response,
        asked.items,
        choice,
        output=OutputWriter(choice, served.tokenizer, shape, writer),
        writer=writer,
        store=state.store,
        key_name=asker.key_name,
        ignored=(*asked.ignored, *unstored),
    )


async def count_input_tokens(
    raw: bytes, asker: Asker, services: Services, state: ResponseState, seal: Seal
) -> tuple[str, int]:
    """(the model, the number of prompt tokens). Raises as `prepare_response` does."""
    asked = await _asked(raw, asker, services, state, seal)
    served = services.fleet.served(asked.body.model)
    (prompt,) = await encode(asked.request, asker.owner, served, services.thoughts)
    return served.name, len(prompt.token_ids)


async def _asked(raw: bytes, asker: Asker, services: Services, state: ResponseState, seal: Seal) -> Asked:
    body, unknown, reader, given = await read(
        raw, partial(_read, seal=seal, recall=partial(services.thoughts.recall, asker.owner))
    )
    items = await resolved(given, state.store, asker.key_name)
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state, asker.key_name)
    # A short body may continue a long conversation.
    num_bytes = len(raw) + (LONG_BYTES if earlier else 0)

    def made(_: bytes) -> tuple[OfferedTools, TurnRequest]:
        offered = offered_tools(body, earlier)
        services.check_tools(offered.left_out)
        return offered, turn_request(body, offered, earlier, items, num_bytes)

    offered, request = await read(raw, made)
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
    body, unknown = decode(raw, ResponseBody)
    check_served(body)
    reader = InputReader(seal, recall)
    return body, unknown, reader, reader.read(body.input)
