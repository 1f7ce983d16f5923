"""Reads the input items that clients send; collects what gpt-oss cannot read."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.http.body import convert
from frontend.responses.items import (
    MACHINE_ITEMS,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    Phase,
    ReasoningItem,
    ReasoningText,
)
from frontend.turn.ids import new_id
from frontend.turn.request import left_out
from frontend.turn.seal import Changed, Seal


class GivenPart(msgspec.Struct, kw_only=True):
    """A content part of an input item."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[GivenPart]


class GivenMessage(msgspec.Struct, kw_only=True):
    """A message; its `type` is optional."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str = ""
    phase: Phase | msgspec.UnsetType = msgspec.UNSET


class GivenReasoning(msgspec.Struct, kw_only=True):
    """Reasoning of an earlier answer: its `content`, or its `encrypted_content` from this service."""

    id: str = ""
    content: list[GivenPart] = []
    summary: list[GivenPart] = []
    encrypted_content: str = ""


class GivenOutput(msgspec.Struct, kw_only=True):
    """The result of a tool call."""

    call_id: str
    output: Content
    id: str = ""


class GivenReference(msgspec.Struct, kw_only=True):
    """A reference to an item of a stored response."""

    id: str


GIVEN_ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": GivenMessage,
    "reasoning": GivenReasoning,
    "function_call": FunctionCallItem,
    "function_call_output": GivenOutput,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": GivenOutput,
    "item_reference": GivenReference,
    **MACHINE_ITEMS,
}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# Items made by OpenAI's hosted tools or by other models, which agents send back when a session moves.
LEFT_OUT = frozenset(
    {
        "web_search_call", "file_search_call", "computer_call", "computer_call_output",
        "image_generation_call", "code_interpreter_call", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "compaction", "compaction_summary", "configuration_update",
        "program", "program_output",
    }
)  # fmt: skip
ADDITIONAL_TOOLS = "additional_tools"
"""An item with tools instead of content, as Codex sends them: see `offered_tools`."""
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "reasoning_text"})


class InputReader:
    """Reads one body's `input`; `left_out` collects the paths of unsupported content, such as images."""

    def __init__(self, seal: Seal, recall: Callable[[str], str | None]) -> None:
        """`recall` returns the text of a reasoning item by id, if still known."""
        self.left_out: set[str] = set()
        self._seal = seal
        self._recall = recall

    def read(self, given: str | list[dict[str, Any]] | None) -> list[Item | GivenReference]:
        """The items, each with an id. Raises InvalidRequest, naming the field."""
        if isinstance(given, str):
            return [MessageItem(id=new_id("msg"), role="user", content=[InputText(text=given)])]
        read = (self._read(item, f"input[{i}]") for i, item in enumerate(given or ()))
        return [item for item in read if item is not None]

    def _read(self, fields: dict[str, Any], path: str) -> Item | GivenReference | None:
        kind = fields.get("type")
        if kind is None:  # optional for these two
            kind = "message" if "role" in fields else "item_reference"
        if kind == ADDITIONAL_TOOLS:
            return None
        if not isinstance(kind, str) or kind not in {*GIVEN_ITEMS, *LEFT_OUT}:
            allowed = ", ".join(sorted({*GIVEN_ITEMS, ADDITIONAL_TOOLS}))
            raise InvalidRequest(
                f"`{path}.type` {kind!r:.80} is not supported; allowed values: {allowed}.",
                param=f"{path}.type",
            )
        if kind in LEFT_OUT or _is_hosted_search(fields):
            self.left_out.add(f"input[].{kind}")
            return None
        given: Any = convert(_present(fields, kind), GIVEN_ITEMS[kind], path)
        item = self._item(given, kind, path)
        item.id = given.id or new_id(_PREFIXES.get(kind, "item"))
        return item

    def _item(self, given: Any, kind: str, path: str) -> Item | GivenReference:
        match given:
            case GivenMessage(role=role):
                part = OutputText if role == "assistant" else InputText
                content = [part(text=text) for text in self._texts(given.content, f"{path}.content")]
                return MessageItem(role=role, content=content, phase=given.phase)
            case GivenReasoning():
                texts = self._thoughts(given, path)
                return ReasoningItem(content=[ReasoningText(text=text) for text in texts])
            case GivenOutput(call_id=call_id, output=output):
                made = FunctionOutputItem if kind == "function_call_output" else CustomOutputItem
                if isinstance(output, str):
                    return made(call_id=call_id, output=output)
                texts = self._texts(output, f"{path}.output")
                return made(call_id=call_id, output=[InputText(text=text) for text in texts])
            case _:
                item: Item | GivenReference = given
                return item

    def _thoughts(self, given: GivenReasoning, path: str) -> list[str]:
        """Reasoning from `content`, from this service's `encrypted_content`, or recalled by id."""
        texts = self._texts(given.content, f"{path}.content")
        if not texts and given.encrypted_content:
            texts = self._opened(given.encrypted_content, f"{path}.encrypted_content")
        if not texts and given.id:
            texts = [text for text in [self._recall(given.id)] if text is not None]
        if not texts and given.summary:
            self.left_out.add("input[].summary")
        return texts

    def _opened(self, sealed: str, path: str) -> list[str]:
        try:
            text = self._seal.open(sealed)
        except Changed:
            raise InvalidRequest(
                f"`{path}` was changed; send it back unchanged, or leave it out.", param=path
            ) from None
        if text is None:
            self.left_out.add("input[].encrypted_content")
            return []
        return [text]

    def _texts(self, content: Content, path: str) -> list[str]:
        if isinstance(content, str):
            return [content]
        return [self._text(part, f"{path}[{i}]") for i, part in enumerate(content)]

    def _text(self, part: GivenPart, path: str) -> str:
        if part.type not in _TEXT_TYPES and part.type != "refusal":
            self.left_out.add(f"input[].{part.type}"[:80])
            return left_out(part.type)
        name = "refusal" if part.type == "refusal" else "text"
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise InvalidRequest(f"`{path}.{name}` is missing.", param=f"{path}.{name}")
        return text


def _is_hosted_search(fields: dict[str, Any]) -> bool:
    """Whether the item is of a `tool_search` that OpenAI's servers ran."""
    is_search = fields.get("type") in {"tool_search_call", "tool_search_output"}
    return is_search and (fields.get("execution") == "server" or fields.get("call_id") is None)


def _present(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields that are not null, as OpenAI's types allow null for absent ones, also in `action`. Messages,
    function calls and their results are complete, whatever `status` they come back with."""
    present = {name: value for name, value in fields.items() if value is not None}
    if kind not in MACHINE_ITEMS:
        present.pop("status", None)
    action = present.get("action")
    if isinstance(action, dict):
        present["action"] = {name: value for name, value in action.items() if value is not None}
    return present
