"""The tools of a Responses body: functions, custom tools, namespaces; and which of them must be called."""

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import FUNCTIONS, Namespace, TextGrammar, Tool
from frontend.responses.body import (
    CustomByName,
    FunctionByName,
    FunctionsByName,
    LocalShellByType,
    PatchByType,
    ResponseBody,
    ResponseTool,
    ShellByType,
)
from frontend.responses.machine import is_machine_tool, machine_tool
from frontend.turn.form import CallChoice


class OfferedTools(msgspec.Struct):
    """The tools as the prompt shows them, of these `machine` by their types; `left_out` are the types that
    only OpenAI's servers run."""

    tools: list[Tool] = []
    machine: list[str] = []
    namespaces: list[Namespace] = []
    left_out: list[str] = []


def offered_tools(body: ResponseBody) -> OfferedTools:
    """What the model is offered. Raises InvalidRequest, naming the field."""
    offered = OfferedTools()
    for i, tool in enumerate(body.tools or ()):
        _offer(tool, f"tools[{i}]", offered)
    return OfferedTools(left_out=offered.left_out) if body.tool_choice == "none" else offered


def _offer(tool: ResponseTool, path: str, offered: OfferedTools, namespace: str = FUNCTIONS) -> None:
    match tool.type:
        case "function" | "custom":
            offered.tools.append(_tool(tool, path, namespace))
        case "namespace" if namespace == FUNCTIONS:
            name = _named(tool, path)
            offered.namespaces.append(Namespace(name=name, description=tool.description, path=path))
            for j, inner in enumerate(tool.tools or ()):
                _offer(inner, f"{path}.tools[{j}]", offered, name)
        case kind if isinstance(tool.environment, dict) and "container" in str(tool.environment.get("type")):
            offered.left_out.append(f"tools[].{kind}.environment"[:80])
        case kind if (tool_of_kind := machine_tool(kind, path)) is not None and namespace == FUNCTIONS:
            offered.tools.append(tool_of_kind)
            offered.machine.append(kind)
        case kind:
            offered.left_out.append(f"tools[].{kind}"[:80])


def _named(tool: ResponseTool, path: str) -> str:
    if tool.name is None:
        raise InvalidRequest(f"`{path}.name` is missing.", param=f"{path}.name")
    return tool.name


def _tool(tool: ResponseTool, path: str, namespace: str) -> Tool:
    refused = {
        "async": tool.is_async,
        "allowed_callers": "direct" not in (tool.allowed_callers or ["direct"]),
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise InvalidRequest(f"`{path}.{name}` is not served.", param=f"{path}.{name}")
    return Tool(
        name=_named(tool, path),
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        takes_text=tool.type == "custom",
        grammar=_grammar(tool, f"{path}.format"),
        namespace=namespace,
        path=path,
    )


def _grammar(tool: ResponseTool, path: str) -> TextGrammar | None:
    if tool.type != "custom" or tool.format is None or tool.format.type == "text":
        return None
    for name in ("syntax", "definition"):
        if not getattr(tool.format, name):
            raise InvalidRequest(f"`{path}.{name}` is missing.", param=f"{path}.{name}")
    return TextGrammar(
        syntax=tool.format.syntax or "lark",
        text=tool.format.definition or "",
        path=f"{path}.definition",
    )


def call_choice(body: ResponseBody) -> CallChoice:
    """Which tools may be called, and whether one must be."""
    match body.tool_choice:
        case FunctionByName(name=name) | CustomByName(name=name):
            return CallChoice(must_call=True, names=frozenset({name}))
        case ShellByType():
            return CallChoice(must_call=True, names=frozenset({"shell"}))
        case LocalShellByType():
            return CallChoice(must_call=True, names=frozenset({"local_shell"}))
        case PatchByType():
            return CallChoice(must_call=True, names=frozenset({"apply_patch"}))
        case FunctionsByName(mode=mode, tools=tools):
            # Without a name they are meant by their type; those that OpenAI's servers run are not offered.
            named = (tool.type if is_machine_tool(tool.type) else tool.name for tool in tools)
            names = frozenset(name for name in named if name is not None)
            return CallChoice(must_call=mode == "required", names=names)
        case choice:
            return CallChoice(may_call=choice != "none", must_call=choice == "required")
