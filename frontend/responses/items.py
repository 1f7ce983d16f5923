"""The items of a response's input and output: as stored and returned, and as turns of a conversation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from frontend.harmony.conversation import (
    FUNCTIONS,
    AssistantTurn,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.http.chunks import ContentLogprob
from frontend.turn.ids import new_id
from frontend.turn.request import NUMBER, TEXT, TEXTS, ClientTool
from frontend.turn.thoughts import joined

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote; `annotations` is always empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning text."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message; the content of a stored one is a list. `phase` distinguishes the model's preambles from its
    answer."""

    id: str = ""
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus = "completed"
    content: str | list[InputText | OutputText]
    phase: Phase | msgspec.UnsetType = msgspec.UNSET


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Reasoning text as a summary; it is the full text."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning: in `content`, or in `summary` if requested; `encrypted_content` carries it to stateless
    clients."""

    id: str = ""
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
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
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(CallPart, kw_only=True, tag="custom_tool_call"):
    """A custom tool call that the model requests; `input` is the text that it wrote."""

    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomOutputItem(CallPart, kw_only=True, tag="custom_tool_call_output"):
    """The result of a custom tool call."""

    output: str | list[InputText]


class FunctionOutputItem(CallPart, kw_only=True, tag="function_call_output"):
    """The result of a function call."""

    output: str | list[InputText]


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


class ShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call_output"):
    """The output and outcome of each command."""

    call_id: str
    output: str | list[dict[str, Any]]
    id: str = ""


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
OutputItem = WrittenItem | MachineCallItem
Item = OutputItem | FunctionOutputItem | CustomOutputItem | MachineOutputItem
ITEMS: Mapping[str, type[msgspec.Struct]] = {item.__struct_config__.tag: item for item in get_args(Item)}
"""The items by their types."""


class MachineTool(NamedTuple):
    """A tool of OpenAI's that the client runs. The model sees it as a function; its calls are items of a type
    of their own, whose field `arguments` has the function's."""

    tool: ClientTool
    item: type[MachineCallItem]
    arguments: str
    prefix: str


MACHINE_TOOLS: Mapping[str, MachineTool] = {
    "local_shell": MachineTool(
        ClientTool(
            "Runs one command on the user's machine.",
            {"command": TEXTS, "working_directory": TEXT, "timeout_ms": NUMBER},
            ["command"],
        ),
        LocalShellCallItem, "action", "lsh",
    ),
    "shell": MachineTool(
        ClientTool(
            "Runs shell commands on the user's machine, one after the other.",
            {"commands": TEXTS, "timeout_ms": NUMBER, "max_output_length": NUMBER},
            ["commands"],
        ),
        ShellCallItem, "action", "sh",
    ),
    "apply_patch": MachineTool(
        ClientTool(
            "Creates, updates or deletes a file. A diff's lines begin with a space, + or -; @@ parts them.",
            {
                "type": TEXT | {"enum": ["create_file", "update_file", "delete_file"]},
                "path": TEXT,
                "diff": TEXT,
            },
            ["type", "path"],
        ),
        PatchCallItem, "operation", "apc",
    ),
    "tool_search": MachineTool(
        ClientTool("Finds tools by what they do, which can be called then.", {"query": TEXT}, ["query"]),
        ToolSearchCallItem, "arguments", "tsc",
    ),
}  # fmt: skip


def machine_call(
    name: str, call_id: str, arguments: str, *, is_cut: bool = False
) -> MachineCallItem | FunctionCallItem:
    """The call as an item of the tool's type; as a function call if it is cut, since a patch cannot be
    incomplete, or if its arguments are invalid, which happens only without constrained decoding."""
    _, item, field, prefix = MACHINE_TOOLS[name]
    if not is_cut:
        try:
            fields = {field: msgspec.json.decode(arguments), "call_id": call_id, "id": new_id(prefix)}
            return msgspec.convert(fields, item)
        except (msgspec.DecodeError, RecursionError):
            pass
    status: ItemStatus = "incomplete" if is_cut else "completed"
    return FunctionCallItem(id=new_id("fc"), call_id=call_id, name=name, arguments=arguments, status=status)


def turns(items: Iterable[Item], path_of: Callable[[int], str]) -> Iterable[Turn]:
    """The items as turns; `path_of` maps an item's position to the body's field."""
    return joined(_turn(item, path_of(i)) for i, item in enumerate(items))


def _turn(item: Item, path: str) -> Turn:
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning="".join(p.text for p in item.content or item.summary) or None)
        case MessageItem():
            return _message(item)
        case FunctionOutputItem() | CustomOutputItem():
            return ToolResult(call_id=item.call_id, text=_text(item.output), path=f"{path}.call_id")
        case LocalShellOutputItem() | ShellOutputItem() | PatchOutputItem() | ToolSearchOutputItem():
            field = "id" if item.call_id is None else "call_id"
            return ToolResult(call_id=item.call_id or item.id, text=_result(item), path=f"{path}.{field}")
        case _:
            return AssistantTurn(tool_calls=(_call(item),))


def _message(item: MessageItem) -> Turn:
    text = _text(item.content)
    match item.role:
        case "user":
            return UserTurn(text)
        case "assistant" if item.phase == "commentary":
            return AssistantTurn(preamble=text or None)
        case "assistant":
            return AssistantTurn(text=text or None)
        case _:
            return Instructions(text)


def _call(item: FunctionCallItem | CustomCallItem | MachineCallItem) -> ToolCall:
    if isinstance(item, FunctionCallItem | CustomCallItem):
        return ToolCall(
            call_id=item.call_id,
            name=item.name,
            arguments=item.input if isinstance(item, CustomCallItem) else item.arguments,
            takes_text=isinstance(item, CustomCallItem),
            namespace=item.namespace or FUNCTIONS,
        )
    name, machine = next((n, m) for n, m in MACHINE_TOOLS.items() if isinstance(item, m.item))
    fields: dict[str, Any] = msgspec.to_builtins(getattr(item, machine.arguments))
    # A client may give `tool_search` other parameters.
    names = fields if name == "tool_search" else machine.tool.properties
    arguments = {key: fields[key] for key in names if fields.get(key) is not None}
    return ToolCall(call_id=item.call_id, name=name, arguments=msgspec.json.encode(arguments).decode())


def _text(parts: str | Iterable[InputText | OutputText]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _result(item: MachineOutputItem) -> str:
    match item:
        case PatchOutputItem():
            return item.output or item.status
        case ToolSearchOutputItem():
            return f"Found: {', '.join(_names(item.tools)) or 'nothing'}"
        case ShellOutputItem(output=list(outputs)):
            return msgspec.json.encode(outputs).decode()
        case LocalShellOutputItem(output=text) | ShellOutputItem(output=text):
            return str(text)


def _names(tools: Iterable[dict[str, Any]], prefix: str = "") -> Iterator[str]:
    for tool in tools:
        name = f"{prefix}{tool.get('name', tool.get('type'))}"
        inner = tool.get("tools")
        yield from _names(inner, f"{name}.") if inner else [name]
