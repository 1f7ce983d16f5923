"""Converts a Responses body's tools and tool choice."""

from collections.abc import Iterable, Iterator

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import FUNCTIONS, Namespace, TextGrammar, Tool, called_name
from frontend.http.body import convert
from frontend.responses.body import (
    AdditionalTools,
    NamedTool,
    ResponseBody,
    ResponseTool,
    ToolChoice,
)
from frontend.responses.given import ADDITIONAL_TOOLS
from frontend.responses.items import MACHINE_TOOLS, Item, ToolSearchOutputItem
from frontend.turn.fields import required
from frontend.turn.form import CallChoice


class OfferedTools(msgspec.Struct):
    """The tools that the prompt shows. `machine` are the types of machine tools among them, `left_out` the
    paths of hosted tools, which only OpenAI's servers run."""

    tools: list[Tool] = []
    machine: list[str] = []
    namespaces: list[Namespace] = []
    left_out: list[str] = []


def offered_tools(body: ResponseBody, earlier: Iterable[Item] = ()) -> OfferedTools:
    """The tools that the model may see: the body's, and those that its searches, also `earlier` ones, found.
    Raises InvalidRequest, naming the field."""
    offered, found = OfferedTools(), OfferedTools()
    given = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    for path, tool in (*given, *_among_input(body, ADDITIONAL_TOOLS)):
        _offer(tool, path, offered)
    for path, tool in (*_found_before(earlier), *_among_input(body, "tool_search_output")):
        _offer(tool, path, found)
    known = {tool.called for tool in offered.tools}
    offered.tools += {tool.called: tool for tool in found.tools if tool.called not in known}.values()
    offered.namespaces += found.namespaces
    offered.machine += found.machine
    offered.left_out += found.left_out
    return OfferedTools(left_out=offered.left_out) if body.tool_choice == "none" else offered


def _among_input(body: ResponseBody, kind: str) -> Iterator[tuple[str, ResponseTool]]:
    """The tools of items of this type in `input`, with their paths."""
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if item.get("type") == kind:
            tools = convert(item, AdditionalTools, f"input[{i}]").tools
            yield from ((f"input[{i}].tools[{j}]", tool) for j, tool in enumerate(tools))


def _found_before(items: Iterable[Item]) -> Iterator[tuple[str, ResponseTool]]:
    for item in items:
        if isinstance(item, ToolSearchOutputItem):
            for tool in msgspec.convert(item.tools, list[ResponseTool]):
                yield "previous_response_id", tool


def _offer(tool: ResponseTool, path: str, offered: OfferedTools, namespace: str = FUNCTIONS) -> None:
    match tool.type:
        case "function" | "custom":
            offered.tools.append(_tool(tool, path, namespace))
        case "namespace" if namespace == FUNCTIONS:
            name = required(tool.name, f"{path}.name")
            offered.namespaces.append(Namespace(name=name, description=tool.description, path=path))
            for j, inner in enumerate(tool.tools or ()):
                _offer(inner, f"{path}.tools[{j}]", offered, name)
        case kind if isinstance(tool.environment, dict) and "container" in str(tool.environment.get("type")):
            offered.left_out.append(f"tools[].{kind}.environment"[:80])
        case kind if _is_machine_tool(tool) and namespace == FUNCTIONS:
            offered.tools.append(_machine_tool(tool, path))
            offered.machine.append(kind)
        case kind:
            offered.left_out.append(f"tools[].{kind}"[:80])


def _is_machine_tool(tool: ResponseTool) -> bool:
    return tool.type in MACHINE_TOOLS and (tool.type != "tool_search" or tool.execution == "client")


def _machine_tool(tool: ResponseTool, path: str) -> Tool:
    made = MACHINE_TOOLS[tool.type].tool.function(tool.type, path)
    if tool.parameters is None:
        return made
    description = tool.description or made.description
    return msgspec.structs.replace(made, description=description, parameters=tool.parameters, strict=False)


def _tool(tool: ResponseTool, path: str, namespace: str) -> Tool:
    is_unsupported = {
        "async": bool(tool.is_async),
        "allowed_callers": "direct" not in (tool.allowed_callers or ["direct"]),
    }
    for name in (name for name, is_so in is_unsupported.items() if is_so):
        raise InvalidRequest(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
    return Tool(
        name=required(tool.name, f"{path}.name"),
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
    return TextGrammar(
        syntax=required(tool.format.syntax or None, f"{path}.syntax"),
        text=required(tool.format.definition or None, f"{path}.definition"),
        path=f"{path}.definition",
    )


def call_choice(body: ResponseBody, offered: OfferedTools) -> CallChoice:
    """Which tools may be called, and whether a call is required. Raises InvalidRequest."""
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return CallChoice(must_call=choice == "required", left_out=tuple(offered.left_out))
    if choice.type == "allowed_tools":
        tools = required(choice.tools, "tool_choice.tools")
        must_call = required(choice.mode, "tool_choice.mode") == "required"
        return CallChoice(must_call=must_call, names=frozenset(map(_called, tools)) - {""})
    if choice.type not in MACHINE_TOOLS:
        required(choice.name, "tool_choice.name")
    return CallChoice(must_call=True, names=frozenset({_called(choice)}))


def _called(tool: NamedTool | ToolChoice) -> str:
    """Machine tools are referred to by type; hosted tools have no name."""
    if tool.type in MACHINE_TOOLS:
        return tool.type
    return called_name(tool.namespace or FUNCTIONS, tool.name or "")
