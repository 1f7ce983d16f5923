"""Tools that the client's own machine runs, by their types: `local_shell`, `shell`, `apply_patch`.

The model sees each as a function; a call becomes an item of the tool's own type and comes back as one.
"""

from typing import Any

import msgspec

from frontend.harmony.conversation import Tool, ToolCall
from frontend.responses.items import (
    FunctionCallItem,
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
)
from frontend.turn.ids import new_id

_TEXTS = {"type": "array", "items": {"type": "string"}}
_NUMBER = {"type": "integer"}
_MACHINE_TOOLS = {
    "local_shell": (
        "Runs one command on the user's machine.",
        {"command": _TEXTS, "working_directory": {"type": "string"}, "timeout_ms": _NUMBER},
        ["command"],
    ),
    "shell": (
        "Runs shell commands on the user's machine, one after the other.",
        {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER},
        ["commands"],
    ),
    "apply_patch": (
        "Creates, updates or deletes a file. A diff's lines begin with a space, + or -; @@ parts them.",
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string"},
        },
        ["type", "path"],
    ),
}


def is_machine_tool(kind: str) -> bool:
    """Whether the client's machine runs tools of this type."""
    return kind in _MACHINE_TOOLS


def machine_tool(kind: str, path: str) -> Tool | None:
    """The function that stands for a tool of this type; None if it is not one of these."""
    if kind not in _MACHINE_TOOLS:
        return None
    description, properties, required = _MACHINE_TOOLS[kind]
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name=kind, description=description, parameters=parameters, strict=True, path=path)


def call_item(kind: str, call_id: str, arguments: str) -> MachineCallItem | FunctionCallItem:
    """A call as the item of its type; as a function call if its arguments do not fit, which only an engine
    that enforces no form lets happen."""
    try:
        match kind:
            case "local_shell":
                action = msgspec.json.decode(arguments, type=LocalShellAction)
                return LocalShellCallItem(id=new_id("lsh"), call_id=call_id, action=action)
            case "shell":
                lines = msgspec.json.decode(arguments, type=ShellAction)
                return ShellCallItem(id=new_id("sh"), call_id=call_id, action=lines)
            case _:
                operation = msgspec.json.decode(arguments, type=PatchOperation)
                return PatchCallItem(id=new_id("apc"), call_id=call_id, operation=operation)
    except (msgspec.DecodeError, RecursionError):
        return FunctionCallItem(
            id=new_id("fc"), call_id=call_id, name=kind, arguments=arguments, status="completed"
        )


def call_of(item: MachineCallItem) -> ToolCall:
    """The call as the model made it."""
    match item:
        case LocalShellCallItem(action=action):
            given = {"command": action.command, "working_directory": action.working_directory}
            return _call(item, "local_shell", given | {"timeout_ms": action.timeout_ms})
        case ShellCallItem(action=lines):
            return _call(item, "shell", msgspec.to_builtins(lines))
        case PatchCallItem(operation=operation):
            return _call(item, "apply_patch", msgspec.to_builtins(operation))


def _call(item: MachineCallItem, name: str, given: dict[str, Any]) -> ToolCall:
    arguments = msgspec.json.encode({key: value for key, value in given.items() if value is not None})
    return ToolCall(call_id=item.call_id, name=name, arguments=arguments.decode())


def result_of(item: MachineOutputItem) -> tuple[str, str]:
    """(the id of the call, the text of its result)."""
    match item:
        case LocalShellOutputItem():
            return item.call_id or item.id, item.output
        case ShellOutputItem():
            if isinstance(item.output, str):
                return item.call_id, item.output
            return item.call_id, msgspec.json.encode(item.output).decode()
        case PatchOutputItem():
            return item.call_id, item.output or item.status
