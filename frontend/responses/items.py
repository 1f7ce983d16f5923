"""The items of a response's input and output: read from bodies, stored, and as turns of a conversation."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from frontend.harmony.conversation import (
    FUNCTIONS,
    AssistantTurn,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.http.answer import ContentLogprob
from frontend.http.body import convert
from frontend.turn.fields import NUMBER, TEXT, TEXTS, ClientTool, Part, text_of_part
from frontend.turn.ids import new_id
from frontend.turn.thoughts import Seal, joined

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]
TextType = Literal["input_text", "output_text", "reasoning_text", "summary_text"]


class TextPart(msgspec.Struct, kw_only=True):
    """Text of the client, or of the model: as `output_text`, whose `annotations` are always empty, as
    reasoning, or as its summary, which is the full text."""

    type: TextType
    text: str = ""
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.type == "output_text":
            self.annotations, self.logprobs = self.annotations or [], self.logprobs or []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message; the content of a stored one is a list. `phase` tells preambles from the answer."""

    id: str = ""
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus = "completed"
    content: str | list[TextPart]
    phase: Phase | UnsetType = UNSET


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning: in `content`, or in `summary` if requested; sealed in `encrypted_content`."""

    id: str = ""
    summary: list[TextPart] = []
    content: list[TextPart] = []
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus = "completed"


class CallPart(msgspec.Struct, kw_only=True, tag_field="type"):
    """What calls and most results have."""

    id: str = ""
    call_id: str
    status: ItemStatus = "completed"


class FunctionCallItem(CallPart, kw_only=True, tag="function_call"):
    """A function call that the model requests; `arguments` is the text that it wrote."""

    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(CallPart, kw_only=True, tag="custom_tool_call"):
    """A custom tool call that the model requests; `input` is the text that it wrote."""

    name: str
    input: str
    namespace: str | UnsetType = UNSET


class FunctionOutputItem(CallPart, kw_only=True, tag="function_call_output"):
    """The result of a function call."""

    output: str | list[TextPart]


class CustomOutputItem(FunctionOutputItem, kw_only=True, tag="custom_tool_call_output"):
    """The result of a custom tool call."""


class LocalShellAction(msgspec.Struct, kw_only=True):
    """One command with its arguments."""

    command: list[str]
    type: Literal["exec"] = "exec"
    env: dict[str, str] | None = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellAction(msgspec.Struct, kw_only=True):
    """Shell commands that run one after the other."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The change to one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class LocalShellCallItem(CallPart, kw_only=True, tag="local_shell_call"):
    """A call of `local_shell`."""

    action: LocalShellAction


class ShellCallItem(CallPart, kw_only=True, tag="shell_call"):
    """A call of `shell`."""

    action: ShellAction


class PatchCallItem(CallPart, kw_only=True, tag="apply_patch_call"):
    """A call of `apply_patch`."""

    operation: PatchOperation


class LocalShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call_output"):
    """The output of a command. `id` is that of the call; some clients send `call_id` instead."""

    output: str
    id: str = ""
    call_id: str | None = None


class ShellOutputItem(CallPart, kw_only=True, tag="shell_call_output"):
    """The output and outcome of each command."""

    output: str | list[dict[str, Any]]


class PatchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call_output"):
    """Whether a patch was applied, and its log."""

    call_id: str
    status: str = "completed"
    output: str | None = None
    id: str = ""


class ToolSearchCallItem(CallPart, kw_only=True, tag="tool_search_call"):
    """A call of a `tool_search` that the client runs."""

    arguments: dict[str, Any]
    execution: Literal["client"] = "client"


class ToolSearchOutputItem(CallPart, kw_only=True, tag="tool_search_output"):
    """The tools that a search has found, which the model may call from then on."""

    tools: list[dict[str, Any]]
    execution: Literal["client"] = "client"


MachineCallItem = LocalShellCallItem | ShellCallItem | PatchCallItem | ToolSearchCallItem
MachineOutputItem = LocalShellOutputItem | ShellOutputItem | PatchOutputItem | ToolSearchOutputItem
WrittenItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
CallItem = FunctionCallItem | CustomCallItem | MachineCallItem
OutputItem = WrittenItem | MachineCallItem
Item = OutputItem | FunctionOutputItem | CustomOutputItem | MachineOutputItem


class Reference(msgspec.Struct, kw_only=True):
    """A reference to an item of a stored response."""

    id: str


MACHINE_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        "Runs one command on the user's machine.",
        {"command": TEXTS, "working_directory": TEXT, "timeout_ms": NUMBER},
        ["command"],
    ),
    "shell": ClientTool(
        "Runs shell commands on the user's machine, one after the other.",
        {"commands": TEXTS, "timeout_ms": NUMBER, "max_output_length": NUMBER},
        ["commands"],
    ),
    "apply_patch": ClientTool(
        "Creates, updates or deletes a file. A diff's lines begin with a space, + or -; @@ parts them.",
        {
            "type": TEXT | {"enum": ["create_file", "update_file", "delete_file"]},
            "path": TEXT,
            "diff": TEXT,
        },
        ["type", "path"],
    ),
    "tool_search": ClientTool(
        "Finds tools by what they do, which can be called then.", {"query": TEXT}, ["query"]
    ),
}
"""The client runs them. The model sees functions; their calls are items of types of their own."""
_ARGUMENTS = {"apply_patch": "operation", "tool_search": "arguments"}
"""The field of a call's item that has the function's arguments; `action` for others."""


def machine_call(
    name: str, call_id: str, arguments: str, *, is_cut: bool = False
) -> MachineCallItem | FunctionCallItem:
    """The call as an item of the tool's type; as a function call if it is cut, since a patch cannot be
    incomplete, or if its arguments are invalid, which happens only without constrained decoding."""
    field = _ARGUMENTS.get(name, "action")
    with suppress(msgspec.DecodeError, RecursionError):
        if not is_cut:
            fields: dict[str, Any] = {"type": f"{name}_call", "id": new_id("item"), "call_id": call_id}
            fields |= {field: msgspec.json.decode(arguments)}
            call: MachineCallItem = msgspec.convert(fields, MachineCallItem)
            return call
    status: ItemStatus = "incomplete" if is_cut else "completed"
    return FunctionCallItem(id=new_id("fc"), call_id=call_id, name=name, arguments=arguments, status=status)


INPUT_ITEMS: Mapping[str, type[msgspec.Struct]] = {
    **{item.__struct_config__.tag: item for item in get_args(Item)},
    "item_reference": Reference,
}
ADDITIONAL_TOOLS = "additional_tools"
"""An item with tools instead of content, as Codex sends them: see `offered_tools`."""


class Texts(NamedTuple):
    """How items of a kind hold text: the prefix of their ids and the field. Then, if the model writes it: the
    prefix of its events, and of text in a part the type and its events' prefix."""

    prefix: str
    field: str
    event: str = ""
    part: TextType | None = None
    part_event: str = "response.content_part"


# These are complete, whatever `status` they come back with.
TEXTS_OF: Mapping[str, Texts] = {
    "message": Texts("msg", "content", "response.output_text", "output_text"),
    "reasoning": Texts("rs", "content", "response.reasoning_text", "reasoning_text"),
    "function_call": Texts("fc", "arguments", "response.function_call_arguments"),
    "function_call_output": Texts("fco", "output"),
    "custom_tool_call": Texts("ctc", "input", "response.custom_tool_call_input"),
    "custom_tool_call_output": Texts("ctco", "output"),
}


class InputReader:
    """The items of one body's `input` by path, each with an id; `left_out` is the unsupported content."""

    def __init__(self, body_input: str | list[dict[str, Any]] | None, seal: Seal) -> None:
        """Raises InvalidRequest."""
        self.left_out: set[str] = set()
        self._seal = seal
        if isinstance(body_input, str):
            body_input = [{"role": "user", "content": body_input}]
        paths = ((f"input[{i}]", item) for i, item in enumerate(body_input or ()))
        read = ((path, self._read(item, path)) for path, item in paths)
        self.items = {path: item for path, item in read if item is not None}

    def _read(self, fields: dict[str, Any], path: str) -> Item | Reference | None:
        # The type is optional for these two.
        kind = str(fields.get("type") or ("message" if "role" in fields else "item_reference"))
        if kind == ADDITIONAL_TOOLS:
            return None
        is_of_server = fields.get("execution") == "server" or fields.get("call_id") is None
        if kind not in INPUT_ITEMS or (kind.startswith("tool_search_") and is_of_server):
            # Made by OpenAI's hosted tools or by other models: agents send it when a session moves.
            self.left_out.add(f"input[].{kind}"[:80])
            return None
        # OpenAI's types allow null for absent fields.
        fields = {name: value for name, value in fields.items() if value is not None}
        texts = TEXTS_OF.get(kind)
        if texts is not None:
            fields.pop("status", None)
            self._read_texts(fields, kind, texts.field, path)
        if kind == "reasoning" and isinstance(parts := fields.get("summary"), list):  # of any type: not read
            fields["summary"] = [
                part | {"type": "summary_text"} if isinstance(part, dict) else part for part in parts
            ]
        item: Any = convert(fields, INPUT_ITEMS[kind], path)
        if isinstance(item, ReasoningItem):
            item = self._reasoning(item, path)
        item.id = item.id or new_id("item" if texts is None else texts.prefix)
        return cast("Item | Reference", item)

    def _read_texts(self, fields: dict[str, Any], kind: str, field: str, path: str) -> None:
        """Replace content parts by parts of the item's own type, or by notes about what cannot be read."""
        part_type: TextType = "reasoning_text" if kind == "reasoning" else "input_text"
        content = fields.get(field)
        if kind == "message":
            part_type = "output_text" if fields.get("role") == "assistant" else part_type
            content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, list):
            read = (self._text(part, f"{path}.{field}[{i}]") for i, part in enumerate(content))
            fields[field] = [TextPart(type=part_type, text=text) for text in read]

    def _text(self, part: object, path: str) -> str:
        return text_of_part(convert(part, Part, path), path, "input[]", self.left_out)

    def _reasoning(self, item: ReasoningItem, path: str) -> ReasoningItem:
        """The item with its `content`, or with its `encrypted_content` of this service."""
        content = item.content
        if not content:
            text = self._seal.open(item.encrypted_content or "", f"{path}.encrypted_content")
            content = [] if text is None else [TextPart(type="reasoning_text", text=text)]
        if not content:
            unread = ("encrypted_content", "summary")
            self.left_out |= {f"input[].{name}" for name in unread if getattr(item, name)}
        return ReasoningItem(id=item.id, content=content)


def turns(earlier: Iterable[Item], items: Mapping[str, Item]) -> Iterable[Turn]:
    """The items of previous responses, and those of `input` by path, as turns."""
    before = [_turn(item, "previous_response_id") for item in earlier]
    return joined([*before, *(_turn(item, path) for path, item in items.items())])


def _turn(item: Item, path: str) -> Turn:
    if isinstance(item, CallItem):
        return AssistantTurn(tool_calls=(_call(item),))
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning=_text(item.content or item.summary) or None)
        case MessageItem(role="assistant"):
            return AssistantTurn(text=_text(item.content) or None, is_preamble=item.phase == "commentary")
        case MessageItem():
            text = _text(item.content)
            return UserTurn(text) if item.role == "user" else Instructions(text)
        case LocalShellOutputItem(call_id=None):
            return ToolResult(call_id=item.id, text=item.output, path=f"{path}.id")
        case _:
            return ToolResult(call_id=item.call_id or "", text=_result(item), path=f"{path}.call_id")


def _call(item: CallItem) -> ToolCall:
    if isinstance(item, FunctionCallItem | CustomCallItem):
        return ToolCall(
            call_id=item.call_id,
            name=item.name,
            arguments=item.input if isinstance(item, CustomCallItem) else item.arguments,
            takes_text=isinstance(item, CustomCallItem),
            namespace=item.namespace or FUNCTIONS,
        )
    name = str(item.__struct_config__.tag).removesuffix("_call")
    fields: dict[str, Any] = msgspec.to_builtins(getattr(item, _ARGUMENTS.get(name, "action")))
    # A client may give `tool_search` other parameters.
    names = fields if name == "tool_search" else MACHINE_TOOLS[name].properties
    arguments = {key: fields[key] for key in names if fields.get(key) is not None}
    return ToolCall(call_id=item.call_id, name=name, arguments=msgspec.json.encode(arguments).decode())


def _text(parts: str | Iterable[TextPart]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _result(item: FunctionOutputItem | MachineOutputItem) -> str:
    match item:
        case ToolSearchOutputItem():
            return f"Found: {', '.join(_names(item.tools)) or 'nothing'}"
        case PatchOutputItem():
            return item.output or item.status
        case ShellOutputItem(output=outputs):
            return outputs if isinstance(outputs, str) else msgspec.json.encode(outputs).decode()
        case _:
            return _text(item.output)


def _names(tools: Iterable[dict[str, Any]], prefix: str = "") -> Iterator[str]:
    for tool in tools:
        name = f"{prefix}{tool.get('name', tool.get('type'))}"
        inner = tool.get("tools")
        yield from _names(inner, f"{name}.") if inner else [name]
