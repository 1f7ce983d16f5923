"""The items of a response's input and output: read leniently, kept in one shape."""

import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.answers import ContentLogprob
from frontend.fields import named_error

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]

_ROLES = ("user", "assistant", "system", "developer")


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote; there are never annotations."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A thought, as it was thought."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What somebody said. `phase` tells a model's preambles from its answer."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[InputText | OutputText]
    phase: Phase | msgspec.UnsetType = msgspec.UNSET


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A chain of thought; there are never summaries."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is the text that it wrote."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a function returned."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class GivenPart(msgspec.Struct, kw_only=True):
    """A content part as clients write it; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[GivenPart]
Input = str | list[dict[str, Any]] | None


class GivenMessage(msgspec.Struct, kw_only=True):
    """A message; its `type` may be left out."""

    role: str
    content: Content
    id: str | None = None
    phase: Phase | None = None


class GivenReasoning(msgspec.Struct, kw_only=True):
    """Reasoning of an earlier answer; without `content` there is none to be read."""

    id: str | None = None
    content: list[GivenPart] | None = None


class GivenCall(msgspec.Struct, kw_only=True):
    """A call of an earlier answer."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None


class GivenOutput(msgspec.Struct, kw_only=True):
    """What a function returned for a call."""

    call_id: str
    output: Content
    id: str | None = None


class GivenReference(msgspec.Struct, kw_only=True):
    """An item of a stored response, by its id."""

    id: str


GIVEN_ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": GivenMessage,
    "reasoning": GivenReasoning,
    "function_call": GivenCall,
    "function_call_output": GivenOutput,
    "item_reference": GivenReference,
}
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "reasoning_text"})


def new_id(prefix: str) -> str:
    """An id of a kind of thing: `resp`, `msg`, `rs`, `fc`, `fco`."""
    return f"{prefix}_{secrets.token_hex(24)}"


def read_input(given: Input) -> list[Item | GivenReference]:
    """The body's `input`, item by item, each with an id. Raises InvalidRequest for what is not served."""
    if isinstance(given, str):
        return [_message(GivenMessage(role="user", content=given), "input")]
    return [_read(item, f"input[{i}]") for i, item in enumerate(given or ())]


def unread_fields(given: Input) -> Iterator[str]:
    """Paths of what stands in place of reasoning, as agents bring it from other models, and is left out: it
    is encrypted, or not what was thought."""
    items = () if isinstance(given, str) else given or ()
    empty = [item for item in items if item.get("type") == "reasoning" and not item.get("content")]
    for name in ("encrypted_content", "summary"):
        if any(item.get(name) for item in empty):
            yield f"input[].{name}"


def _read(fields: dict[str, Any], path: str) -> Item | GivenReference:
    kind = fields.get("type")
    if kind is None:  # both may leave their type out
        kind = "message" if "role" in fields else "item_reference"
    if not isinstance(kind, str) or kind not in GIVEN_ITEMS:
        raise InvalidRequest(f"`{path}.type` {kind!r:.80} is not served.", param=f"{path}.type")
    try:
        given = msgspec.convert(fields, GIVEN_ITEMS[kind])
    except msgspec.ValidationError as error:
        raise named_error(str(error), path) from None
    match given:
        case GivenMessage():
            return _message(given, path)
        case GivenReasoning():
            return _reasoning(given, path)
        case GivenCall():
            return FunctionCallItem(
                id=given.id or new_id("fc"),
                call_id=given.call_id,
                name=given.name,
                arguments=given.arguments,
                status="completed",
            )
        case GivenOutput():
            texts = given.output if isinstance(given.output, str) else _texts(given.output, f"{path}.output")
            output = texts if isinstance(texts, str) else [InputText(text=text) for text in texts]
            return FunctionOutputItem(
                id=given.id or new_id("fco"), call_id=given.call_id, output=output, status="completed"
            )
        case _:
            assert isinstance(given, GivenReference)
            return given


def _message(given: GivenMessage, path: str) -> MessageItem:
    role = next((role for role in _ROLES if role == given.role), None)
    if role is None:
        raise InvalidRequest(
            f"`{path}.role`: must be one of {', '.join(_ROLES)}, not {given.role!r}.", param=f"{path}.role"
        )
    part = OutputText if role == "assistant" else InputText
    return MessageItem(
        id=given.id or new_id("msg"),
        role=role,  # type: ignore[arg-type]  # one of _ROLES, which the Literal repeats
        status="completed",
        content=[part(text=text) for text in _texts(given.content, f"{path}.content")],
        phase=given.phase or msgspec.UNSET,
    )


def _reasoning(given: GivenReasoning, path: str) -> ReasoningItem:
    texts = _texts(given.content or [], f"{path}.content")
    return ReasoningItem(
        id=given.id or new_id("rs"),
        content=[ReasoningText(text=text) for text in texts],
        status="completed",
    )


def _texts(content: Content, path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(part, f"{path}[{i}]") for i, part in enumerate(content)]


def _text(part: GivenPart, path: str) -> str:
    if part.type not in _TEXT_TYPES and part.type != "refusal":
        raise InvalidRequest(
            f"`{path}.type` {part.type!r} is not served: items are text.", param=f"{path}.type"
        )
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"`{path}.{name}` is missing.", param=f"{path}.{name}")
    return text
