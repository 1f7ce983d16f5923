"""Converts a Responses body's tools and tool choice."""

from collections.abc import Iterable, Iterator

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import FUNCTIONS, Namespace, TextGrammar, Tool, called_name
from frontend.http.body import invalid
from frontend.responses.body import (
    AdditionalTools,
    AllowedTool,
    CustomByName,
    FunctionByName,
    FunctionsByName,
    LocalShellByType,
    PatchByType,
    ResponseBody,
    ResponseTool,
    ShellByType,
)
from frontend.responses.given import ADDITIONAL_TOOLS
from frontend.responses.items import Item, ToolSearchOutputItem
from frontend.responses.machine import is_machine_tool, machine_tool
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
            if (refusal := invalid(item, AdditionalTools, f"input[{i}]")) is not None:
                raise refusal
            tools = msgspec.convert(item, AdditionalTools).tools
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
            name = _named(tool, path)
            offered.namespaces.append(Namespace(name=name, description=tool.description, path=path))
            for j, inner in enumerate(tool.tools or ()):
                _offer(inner, f"{path}.tools[{j}]", offered, name)
        case kind if isinstance(tool.environment, dict) and "container" in str(tool.environment.get("type")):
            offered.left_out.append(f"tools[].{kind}.environment"[:80])
        case kind if (tool_of_kind := machine_tool(tool, path)) is not None and namespace == FUNCTIONS:
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
            raise InvalidRequest(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
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
    syntax, definition = tool.format.syntax, tool.format.definition
    if not syntax or not definition:
        name = "definition" if syntax else "syntax"
        raise InvalidRequest(f"`{path}.{name}` is missing.", param=f"{path}.{name}")
    return TextGrammar(syntax=syntax, text=definition, path=f"{path}.definition")


def call_choice(body: ResponseBody, offered: OfferedTools) -> CallChoice:
    """Which tools may be called, and whether a call is required."""
    match body.tool_choice:
        case FunctionByName() | CustomByName() as tool:
            named = called_name(tool.namespace or FUNCTIONS, tool.name)
            return CallChoice(must_call=True, names=frozenset({named}))
        case ShellByType():
            return CallChoice(must_call=True, names=frozenset({"shell"}))
        case LocalShellByType():
            return CallChoice(must_call=True, names=frozenset({"local_shell"}))
        case PatchByType():
            return CallChoice(must_call=True, names=frozenset({"apply_patch"}))
        case FunctionsByName(mode=mode, tools=tools):
            names = frozenset(map(_called, tools)) - {""}
            return CallChoice(must_call=mode == "required", names=names)
        case choice:
            must_call = choice == "required"
            left_out = tuple(offered.left_out)
            return CallChoice(may_call=choice != "none", must_call=must_call, left_out=left_out)


def _called(tool: AllowedTool) -> str:
    """Machine tools are referred to by type; hosted tools have no name."""
    if is_machine_tool(tool.type):
        return tool.type
    return called_name(tool.namespace or FUNCTIONS, tool.name or "")
