"""OpenAI's built-in tools that the client runs: `local_shell`, `shell`, `apply_patch`, `tool_search`.

The model sees them as functions; their calls and results are items of the tool's type.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from frontend.harmony.conversation import Tool, ToolCall, ToolResult
from frontend.responses.body import ResponseTool
from frontend.responses.items import (
    FunctionCallItem,
    ItemStatus,
    LocalShellAction,
    LocalShellCallItem,
    LocalShellOutputItem,
    MachineCallItem,
    MachineOutputItem,
    PatchCallItem,
    PatchOperation,
    PatchOutputItem,
    ShellAction,
    ShellCallItem,
    ShellOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from frontend.turn.client_tool import NUMBER, TEXT, TEXTS, ClientTool
from frontend.turn.ids import new_id

_MACHINE_TOOLS = {
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
        "Finds tools by what they do, which can be called then.",
        {"query": TEXT},
        ["query"],
    ),
}


def is_machine_tool(kind: str) -> bool:
    """Whether the client runs tools of this type."""
    return kind in _MACHINE_TOOLS


def machine_tool(tool: ResponseTool, path: str) -> Tool | None:
    """The function that represents a tool of the client's; None for other tools."""
    kind = tool.type
    if kind not in _MACHINE_TOOLS or (kind == "tool_search" and tool.execution != "client"):
        return None
    made = _MACHINE_TOOLS[kind].function(kind, path)
    if tool.parameters is None:
        return made
    return msgspec.structs.replace(
        made, description=tool.description or made.description, parameters=tool.parameters, strict=False
    )


def call_item(
    kind: str, call_id: str, arguments: str, *, is_cut: bool = False
) -> MachineCallItem | FunctionCallItem:
    """The call as an item of the tool's type; as a function call if it is cut, since a patch cannot be
    incomplete, or if its arguments are invalid, which happens only without constrained decoding."""
    if is_cut:
        return _function_call(kind, call_id, arguments, "incomplete")
    try:
        match kind:
            case "local_shell":
                action = msgspec.json.decode(arguments, type=LocalShellAction)
                return LocalShellCallItem(id=new_id("lsh"), call_id=call_id, action=action)
            case "shell":
                lines = msgspec.json.decode(arguments, type=ShellAction)
                return ShellCallItem(id=new_id("sh"), call_id=call_id, action=lines)
            case "tool_search":
                search = msgspec.json.decode(arguments, type=dict[str, Any])
                return ToolSearchCallItem(id=new_id("tsc"), call_id=call_id, arguments=search)
            case _:
                operation = msgspec.json.decode(arguments, type=PatchOperation)
                return PatchCallItem(id=new_id("apc"), call_id=call_id, operation=operation)
    except (msgspec.DecodeError, RecursionError):
        return _function_call(kind, call_id, arguments, "completed")


def _function_call(kind: str, call_id: str, arguments: str, status: ItemStatus) -> FunctionCallItem:
    return FunctionCallItem(id=new_id("fc"), call_id=call_id, name=kind, arguments=arguments, status=status)


def call_of(item: MachineCallItem) -> ToolCall:
    """The item as the function call that the model made."""
    match item:
        case LocalShellCallItem(action=action):
            given = {"command": action.command, "working_directory": action.working_directory}
            return _call(item, "local_shell", given | {"timeout_ms": action.timeout_ms})
        case ShellCallItem(action=lines):
            return _call(item, "shell", msgspec.to_builtins(lines))
        case PatchCallItem(operation=operation):
            return _call(item, "apply_patch", msgspec.to_builtins(operation))
        case ToolSearchCallItem(arguments=search):
            return _call(item, "tool_search", search)


def _call(item: MachineCallItem, name: str, given: dict[str, Any]) -> ToolCall:
    arguments = msgspec.json.encode({key: value for key, value in given.items() if value is not None})
    return ToolCall(call_id=item.call_id, name=name, arguments=arguments.decode())


def result_of(item: MachineOutputItem, path: str) -> ToolResult:
    """The item at `path` as the result of its call."""
    field = "id" if item.call_id is None else "call_id"
    return ToolResult(call_id=item.call_id or item.id, text=_text_of(item), path=f"{path}.{field}")


def _text_of(item: MachineOutputItem) -> str:
    match item:
        case LocalShellOutputItem():
            return item.output
        case ShellOutputItem():
            if isinstance(item.output, str):
                return item.output
            return msgspec.json.encode(item.output).decode()
        case PatchOutputItem():
            return item.output or item.status
        case ToolSearchOutputItem():
            return f"Found: {', '.join(_names(item.tools)) or 'nothing'}"


def _names(tools: Iterable[dict[str, Any]], prefix: str = "") -> Iterator[str]:
    for tool in tools:
        name = f"{prefix}{tool.get('name', tool.get('type'))}"
        inner = tool.get("tools")
        yield from _names(inner, f"{name}.") if inner else [name]
