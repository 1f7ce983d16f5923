"""The answer of the Responses API: its output items, its events from created to the last, and its storage."""

import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from baton.errors import BatonError
from frontend.harmony.conversation import FUNCTIONS, ReasoningEffort, Tool
from frontend.harmony.parse import Begin, Delta, End, Text
from frontend.http.answer import Answer, CompletionDetails, ContentLogprob, content_logprobs
from frontend.responses.body import SEALED, Reasoning, ResponseBody, Summary
from frontend.responses.items import (
    TEXTS_OF,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputItem,
    Phase,
    ReasoningItem,
    TextPart,
    Texts,
    WrittenItem,
    machine_call,
)
from frontend.responses.store import RUNNING, ResponseStatus, ResponseStore, StoredResponse
from frontend.text.tokenizer import ContextTooLong
from frontend.turn.choice import Choice
from frontend.turn.fields import NEAREST_EFFORT
from frontend.turn.ids import new_id
from frontend.turn.thoughts import Seal

_encode = msgspec.json.Encoder().encode


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed; `code` is one of OpenAI's."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    message: str

    @classmethod
    def of(cls, error: BatonError) -> "ResponseError":
        if error.status == 429:
            return cls(code="rate_limit_exceeded", message=error.message)
        if isinstance(error, ContextTooLong):
            return cls(code="context_length_exceeded", message=error.message)
        is_theirs = 400 <= error.status < 500
        return cls(code="invalid_prompt" if is_theirs else "server_error", message=error.message)


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the input tokens; `cached_tokens` were found in the KV cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ReasoningBody(msgspec.Struct, kw_only=True):
    """The effort that was used, and the requested summary."""

    effort: ReasoningEffort
    summary: Summary | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """`POST /v1/responses` and `GET /v1/responses/{id}`. Times are seconds since 1970."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = RUNNING
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningBody
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def initial_response(body: ResponseBody) -> ResponseObject:
    """The initial response to a body: its fields, or their defaults."""
    echoed = {name: getattr(body, name, None) for name in ResponseObject.__struct_fields__}
    given = body.reasoning or Reasoning()
    text_format = {"type": "text"} if body.text is None or body.text.format is None else body.text.format
    summary = given.summary or given.generate_summary
    # The SDK's type of a function requires these.
    blank = {"function": dict.fromkeys(("description", "parameters", "strict"))}
    made = {
        "id": new_id("resp"),
        "created_at": int(time.time()),
        "reasoning": ReasoningBody(effort=NEAREST_EFFORT[body.effort], summary=summary),
        "text": {"format": text_format, "verbosity": "medium"},
        "tools": [blank.get(tool.type, {}) | msgspec.to_builtins(tool) for tool in body.tools or ()],
    }
    return ResponseObject(**{name: value for name, value in (echoed | made).items() if value is not None})


class EventWriter:
    """Encodes events with consecutive sequence numbers, or to nothing unless `streams`."""

    def __init__(self, num_events: int = 0, *, streams: bool = True) -> None:
        self.num_events = num_events
        self.streams = streams

    def event(self, kind: str, **fields: object) -> bytes:
        return self.numbered(head(kind, **fields)) if self.streams else b""

    def numbered(self, data: bytes) -> bytes:
        """Complete an event from `head` with its sequence number."""
        number = self.num_events
        self.num_events += 1
        return b'%b,"sequence_number":%d}\n\n' % (data, number)

    def opening(self, response: ResponseObject) -> bytes:
        """The first two events of a response."""
        created = self.event("response.created", response=response)
        return created + self.event("response.in_progress", response=response)


class FailedAtOnce(Exception):
    """A streamed response whose prompt is too long: its `events` say so, as agents that then compact their
    history expect, instead of a status."""

    def __init__(self, body: ResponseBody, error: ContextTooLong) -> None:
        self.status = error.status
        writer, response = EventWriter(), initial_response(body)
        failed = replace(response, status="failed", error=ResponseError.of(error), store=False)
        self.events = writer.opening(response) + writer.event("response.failed", response=failed)


def head(kind: str, **fields: object) -> bytes:
    """An event that is still open for more fields."""
    return b"event: %b\ndata: " % kind.encode() + _encode({"type": kind, **fields})[:-1]


def after(stream: bytes, sequence_number: int) -> bytes:
    """The events of a stream after the one with this sequence number; -1 means all."""
    parts = stream.split(b"\n\n", sequence_number + 1)  # encoded JSON has no line breaks
    return parts[-1] if len(parts) > sequence_number + 1 else b""


_TEXT, _CALL, _CUSTOM_CALL = (TEXTS_OF[kind] for kind in ("message", "function_call", "custom_tool_call"))
_THOUGHT = "response.reasoning_summary"
_SUMMARY = Texts("rs", "summary", f"{_THOUGHT}_text", "summary_text", f"{_THOUGHT}_part")
_MACHINE_CALL = Texts("", "arguments")  # output as a whole


class OpenItem:
    """An output item that is being written. Its methods return events."""

    def __init__(self, item: WrittenItem, shape: Texts, index: int, writer: EventWriter) -> None:
        self.item = item
        self.shape = shape
        self._writer = writer
        self._texts: list[str] = []
        self._part = None if shape.part is None else TextPart(type=shape.part)
        self._logprobs: list[ContentLogprob] = []
        self._whole: dict[str, object] = {"output_index": index, "item": item}
        self._place: dict[str, object] = {"item_id": item.id, "output_index": index}
        if self._part is not None:
            self._place[f"{shape.field}_index"] = 0
        self._delta_head = head(shape.event + ".delta", **self._place) + b',"delta":'
        self._delta_tail = b',"logprobs":[]' if shape is _TEXT else b""

    def begin(self) -> bytes:
        """The events that add the item and its single part."""
        return self._writer.event("response.output_item.added", **self._whole) + self._part_event("added")

    def write(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> bytes:
        self._texts.append(text)
        self._logprobs += logprobs
        if not self._writer.streams:
            return b""
        tail = b',"logprobs":' + _encode(_without_bytes(logprobs)) if logprobs else self._delta_tail
        return self._writer.numbered(b"".join((self._delta_head, _encode(text), tail)))

    def fill(self) -> str:
        """Store the text so far in the item; returns the text."""
        text = "".join(self._texts)
        if self._part is not None:
            self._part.text = text
            self._part.logprobs = self._logprobs if self.shape is _TEXT else UNSET
        setattr(self.item, self.shape.field, text if self._part is None else [self._part])
        return text

    def end(self, status: ItemStatus) -> bytes:
        self.item.status = status
        text = self.fill()
        fields = dict(self._place)
        if isinstance(self.item, FunctionCallItem):
            fields["name"] = self.item.name
        fields[self.shape.field if self._part is None else "text"] = text
        if self.shape is _TEXT:
            fields["logprobs"] = _without_bytes(self._logprobs)
        done = self._writer.event(self.shape.event + ".done", **fields) + self._part_event("done")
        return done + self._writer.event("response.output_item.done", **self._whole)

    def _part_event(self, name: str) -> bytes:
        if self._part is None:
            return b""
        return self._writer.event(f"{self.shape.part_event}.{name}", **self._place, part=self._part)


def _without_bytes(logprobs: Sequence[ContentLogprob]) -> list[dict[str, Any]]:
    """In the format of events; their SDK's types have no `bytes`."""
    return [
        {
            "token": each.token,
            "logprob": each.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in each.top_logprobs],
        }
        for each in logprobs
    ]


class ResponseAnswer(Answer):
    """An answer of one choice to `items`, the body's input, with an output item for each Harmony message. It
    belongs to the API key. `machine`: see `OfferedTools`."""

    def __init__(  # noqa: PLR0917  one call
        self,
        body: ResponseBody,
        items: list[Item],
        machine: Collection[str],
        store: ResponseStore,
        seal: Seal,
        key_name: str,
        choices: Sequence[Choice],
    ) -> None:
        response = self.response = initial_response(body)
        self.stream = bool(body.stream)
        self.ignored = ("store",) if response.store and store.is_failing else ()
        self.key_name = key_name
        (self.choice,) = self.choices = choices
        self._items = items if response.store else []
        self._machine = machine
        self._store = store
        self._seal = seal if SEALED in (body.include or ()) else None
        self._open: OpenItem | None = None
        self._writer = EventWriter(streams=self.stream)
        self._opening = self._writer.opening(response)

    def opening(self) -> bytes:
        return self._opening

    def closing(self) -> bytes:
        if self.choice.is_cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return self.end("incomplete")
        self.response.completed_at = int(time.time())
        return self.end("completed")

    def failure(self, error: BatonError) -> bytes:
        self.response.error = ResponseError.of(error)
        return self.end("failed")

    def body(self) -> ResponseObject:
        if self._open is not None:
            self._open.fill()
        return self.response

    async def settle(self) -> None:
        if self.response.status == RUNNING:
            self.closing()
        await self.save()

    async def save(self, events: bytes | None = None) -> None:
        """Store the response so far, unless `store` is false."""
        if self.response.store:
            item_ids = [item.id for item in (*self._items, *self.response.output)]
            await self._store.save(self.stored(_encode(self._items), events), item_ids)

    def stored(self, items: bytes = b"[]", events: bytes | None = None) -> StoredResponse:
        """The response so far, with these items of its input, which take long to encode, and events."""
        body = self.body()
        return StoredResponse(
            id=body.id,
            status=body.status,
            body=_encode(body),
            items=items,
            previous_id=body.previous_response_id,
            is_background=body.background,
            events=events,
            key_name=self.key_name,
        )

    def write_one(self, delta: Delta) -> bytes:
        match delta:
            case Text():
                assert self._open is not None, "text follows the start of its item"
                if self.choice.logprobs is None or self._open.shape is not _TEXT:
                    return self._open.write(delta.text)
                entries = self.choice.logprobs_of(delta) or ()
                return self._open.write(delta.text, content_logprobs(entries, self.choice.tokenizer))
            case Begin("call"):
                return self._begin_call(delta)
            case Begin("thought"):
                shape = TEXTS_OF["reasoning"] if self.response.reasoning.summary is None else _SUMMARY
                return self._begin(ReasoningItem(), shape)
            case Begin(kind):
                phase: Phase = "commentary" if kind == "preamble" else "final_answer"
                return self._begin(MessageItem(role="assistant", content=[], phase=phase), _TEXT)
            case End():
                return self._end_item(is_cut=not delta.complete and self.choice.is_cut)

    def _begin(self, item: WrittenItem, shape: Texts) -> bytes:
        item.id, item.status = new_id(shape.prefix), "in_progress"
        output = self.response.output
        self._open = OpenItem(item, shape, len(output), self._writer)
        output.append(item)
        return self._open.begin()

    def _begin_call(self, delta: Begin) -> bytes:
        if delta.name in self._machine:
            whole = FunctionCallItem(call_id=delta.call_id, name=delta.name, arguments="")
            self._open = OpenItem(whole, _MACHINE_CALL, 0, EventWriter(streams=False))
            return b""
        tool = self.choice.tools.get(delta.name, Tool(name=delta.name))
        space = UNSET if tool.namespace == FUNCTIONS else tool.namespace
        if tool.takes_text:
            custom = CustomCallItem(call_id=delta.call_id, name=tool.name, input="", namespace=space)
            return self._begin(custom, _CUSTOM_CALL)
        call = FunctionCallItem(call_id=delta.call_id, name=tool.name, arguments="", namespace=space)
        return self._begin(call, _CALL)

    def _end_item(self, *, is_cut: bool) -> bytes:
        ended, self._open = self._open, None
        if ended is None:
            return b""
        text = ended.fill()
        if isinstance(ended.item, FunctionCallItem) and ended.shape is _MACHINE_CALL:
            item = machine_call(ended.item.name, ended.item.call_id, text, is_cut=is_cut)
            place = {"output_index": len(self.response.output), "item": item}
            self.response.output.append(item)
            added = self._writer.event("response.output_item.added", **place)
            return added + self._writer.event("response.output_item.done", **place)
        if isinstance(ended.item, ReasoningItem) and self._seal is not None:
            ended.item.encrypted_content = self._seal.close(text)
        return ended.end("incomplete" if is_cut else "completed")

    def end(self, status: Literal["completed", "incomplete", "failed", "cancelled"]) -> bytes:
        """The last event: of a cancelled response, for which OpenAI defines none, `response.incomplete`. An
        item that is still open, since generation was interrupted, is incomplete."""
        if self._open is not None:
            self._open.fill()
            self._open.item.status = "incomplete"
            self._open = None
        choice, num_prompt_tokens = self.choice, len(self.choice.request.token_ids)
        response = self.response
        response.status = status
        response.usage = ResponseUsage(
            input_tokens=num_prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=choice.num_cached_tokens),
            output_tokens=choice.num_tokens,
            output_tokens_details=CompletionDetails(reasoning_tokens=choice.num_reasoning_tokens),
            total_tokens=num_prompt_tokens + choice.num_tokens,
        )
        kind = "incomplete" if status == "cancelled" else status
        return self._writer.event(f"response.{kind}", response=response)
