"""Converts a Messages body's tools and tool choice."""

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import Tool
from frontend.messages.body import Counted
from frontend.messages.body import Tool as GivenTool
from frontend.turn.client_tool import NUMBER, TEXT, ClientTool
from frontend.turn.form import CallChoice

_COMMANDS = ["view", "create", "str_replace", "insert"]
_EDITS = {
    "path": TEXT,
    "view_range": {"type": "array", "items": NUMBER, "description": "view: the first and the last line."},
    "file_text": TEXT | {"description": "create: the whole file."},
    "old_str": TEXT | {"description": "str_replace: the text to replace, which must be unique in the file."},
    "new_str": TEXT | {"description": "str_replace: the text to put in its place."},
    "insert_line": NUMBER | {"description": "insert: the line after which to insert, 0 for the top."},
    "insert_text": TEXT | {"description": "insert: the text to insert."},
}
# By their types without the date.
_CLIENT_TOOLS = {
    "bash": ClientTool(
        "Runs commands in one bash session on the user's machine.",
        {"command": TEXT, "restart": {"type": "boolean", "description": "Start a new session instead."}},
        ["command"],
    ),
    "text_editor": ClientTool(
        "Views, creates and edits files on the user's machine.",
        {"command": TEXT | {"enum": _COMMANDS}, **_EDITS},
        ["command", "path"],
    ),
    "memory": ClientTool(
        "Views and edits the files in /memories, which are kept between conversations. View this folder "
        "first, and note in it what will matter later.",
        {
            "command": TEXT | {"enum": [*_COMMANDS, "delete", "rename"]},
            **_EDITS,
            "old_path": TEXT | {"description": "rename: instead of `path`."},
            "new_path": TEXT | {"description": "rename: the new path."},
        },
        ["command"],
    ),
}
# Connections of the whole session. Other tools that cannot run here may be all that a request is about.
_CONNECTIONS = frozenset({"mcp_servers", "tools[].mcp_toolset"})


class OfferedTools(msgspec.Struct):
    """The tools that the prompt shows; `left_out` are the paths of those that cannot run here, since
    Anthropic's servers run them or the model would have to see images."""

    tools: list[Tool] = []
    left_out: list[str] = []


def offered_tools(body: Counted) -> OfferedTools:
    """The tools that the model may see. Raises InvalidRequest, naming the field, also if there are tools, but
    none that can run."""
    offered = OfferedTools(left_out=["mcp_servers"] if body.mcp_servers else [])
    kind = "auto" if body.tool_choice is None else body.tool_choice.type
    for i, tool in enumerate(body.tools or ()):
        shown = _tool(tool, f"tools[{i}]")
        if shown is not None:
            offered.tools.append(shown)
        elif kind == "tool" and body.tool_choice is not None and body.tool_choice.name == tool.name:
            raise InvalidRequest(
                f"`tool_choice` requires {tool.name!r}, but `tools[{i}]`, {tool.type}, cannot run here.",
                param="tool_choice",
            )
        else:
            offered.left_out.append(f"tools[].{tool.type}"[:80])
    if kind == "none":
        return OfferedTools(left_out=offered.left_out)
    idle = [path.removeprefix("tools[].") for path in offered.left_out if path not in _CONNECTIONS]
    if kind == "auto" and idle and not offered.tools:
        raise InvalidRequest(
            f"`tools`: {', '.join(idle)} cannot run here, and there is no other tool; offer tools that the "
            "client runs.",
            param="tools",
        )
    return offered


def _tool(tool: GivenTool, path: str) -> Tool | None:
    """The tool as the model sees it, or None if it cannot run here."""
    client_tool = None if tool.type is None else _CLIENT_TOOLS.get(tool.type.rpartition("_")[0])
    if client_tool is None and tool.type not in {None, "custom"}:
        return None
    if tool.name is None:
        raise _missing(f"{path}.name")
    if client_tool is not None:
        return client_tool.function(tool.name, path)
    if tool.input_schema is None:
        raise _missing(f"{path}.input_schema")
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=bool(tool.strict),
        path=path,
    )


def call_choice(body: Counted, offered: OfferedTools) -> CallChoice:
    """Which tools may be called, and whether a call is required."""
    choice = body.tool_choice
    if choice is None or choice.type in {"auto", "none"}:
        return CallChoice()
    if choice.type == "any":
        return CallChoice(must_call=True, left_out=tuple(offered.left_out))
    if choice.name is None:
        raise _missing("tool_choice.name")
    return CallChoice(must_call=True, names=frozenset({choice.name}))


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` is missing.", param=path)
