"""The request that a Responses body makes: its tools, which of them may be called, and its conversation."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    FUNCTIONS,
    Conversation,
    Instructions,
    Namespace,
    TextGrammar,
    Tool,
    called_name,
)
from frontend.http.body import convert
from frontend.responses.body import (
    LOGPROBS,
    AdditionalTools,
    NamedTool,
    ResponseBody,
    ResponseTool,
    ToolChoice,
)
from frontend.responses.items import ADDITIONAL_TOOLS, MACHINE_TOOLS, Item, ToolSearchOutputItem, turns
from frontend.turn.fields import NEAREST_EFFORT, AnyEffort, effort_of, identity_of, required
from frontend.turn.request import CallChoice, TurnRequest, answer_format


class OfferedTools(msgspec.Struct):
    """The tools that the prompt shows. `machine` are the types of machine tools among them, `left_out` the
    paths of hosted tools, which only OpenAI's servers run."""

    tools: list[Tool] = []
    machine: list[str] = []
    namespaces: list[Namespace] = []
    left_out: list[str] = []


class ParsedBody(NamedTuple):
    """What a body asks for: `items` are its `input`, `ignored` the paths of unsupported fields and
    content."""

    body: ResponseBody
    items: list[Item]
    offered: OfferedTools
    request: TurnRequest
    ignored: tuple[str, ...]


def offered_tools(body: ResponseBody, earlier: Iterable[Item] = ()) -> OfferedTools:
    """The tools that the model may see: the body's, and those that its searches, also `earlier` ones, found.
    Raises InvalidRequest, naming the field."""
    offered = OfferedTools()
    own = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    for path, tool in (*own, *_among_input(body, ADDITIONAL_TOOLS)):
        offered.tools += _tools(tool, path, offered)
    known = {tool.called for tool in offered.tools}
    found = {
        made.called: made
        for path, tool in (*_found_before(earlier), *_among_input(body, "tool_search_output"))
        for made in _tools(tool, path, offered)
    }
    offered.tools += [tool for name, tool in found.items() if name not in known]
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


def _tools(
    tool: ResponseTool, path: str, offered: OfferedTools, namespace: str = FUNCTIONS
) -> Iterator[Tool]:
    """The tools of a definition, which is noted in the other fields of `offered`."""
    kind, is_outer = tool.type, namespace == FUNCTIONS
    is_hosted = isinstance(tool.environment, dict) and "container" in str(tool.environment.get("type"))
    if kind in {"function", "custom"}:
        yield _tool(tool, path, namespace)
    elif kind == "namespace" and is_outer:
        name = required(tool.name, f"{path}.name")
        offered.namespaces.append(Namespace(name=name, description=tool.description, path=path))
        for j, inner in enumerate(tool.tools or ()):
            yield from _tools(inner, f"{path}.tools[{j}]", offered, name)
    elif is_hosted:
        offered.left_out.append(f"tools[].{kind}.environment"[:80])
    elif is_outer and kind in MACHINE_TOOLS and (kind != "tool_search" or tool.execution == "client"):
        offered.machine.append(kind)
        yield _machine_tool(tool, path)
    else:
        offered.left_out.append(f"tools[].{kind}"[:80])


def _machine_tool(tool: ResponseTool, path: str) -> Tool:
    made = MACHINE_TOOLS[tool.type].tool.function(tool.type, path)
    if tool.parameters is None:
        return made
    description = tool.description or made.description
    return msgspec.structs.replace(made, description=description, parameters=tool.parameters, strict=False)


def _tool(tool: ResponseTool, path: str, namespace: str) -> Tool:
    unsupported = "async" if tool.is_async else "allowed_callers"
    if tool.is_async or "direct" not in (tool.allowed_callers or ["direct"]):
        raise InvalidRequest(f"`{path}.{unsupported}` is not supported.", param=f"{path}.{unsupported}")
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


def call_choice(body: ResponseBody) -> CallChoice:
    """Which tools may be called, and whether a call is required. Raises InvalidRequest."""
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return CallChoice(must_call=choice == "required")
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


def turn_request(
    body: ResponseBody,
    offered: OfferedTools,
    earlier: Sequence[Item],
    items: Sequence[Item],
    num_bytes: int,
) -> TurnRequest:
    """The request of the body after `earlier` items; `items` are its `input`, `num_bytes` the length of both.
    Instructions are those of this body only: the API does not carry them over."""

    def path_of(i: int) -> str:
        return "previous_response_id" if i < len(earlier) else f"input[{i - len(earlier)}]"

    leading = () if body.instructions is None else (Instructions(body.instructions),)
    conversation = Conversation(
        turns=(*leading, *turns([*earlier, *items], path_of)),
        tools=tuple(offered.tools),
        namespaces=tuple(offered.namespaces),
        reasoning_effort=NEAREST_EFFORT[effort(body)],
        model_identity=identity_of(body.chat_template_args, body.chat_template_kwargs),
        answer_format=answer_format(None if body.text is None else body.text.format, "text.format"),
    )
    gives_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    return TurnRequest.of(
        body,
        conversation,
        call_choice(body),
        path="input",
        num_bytes=num_bytes,
        max_tokens=body.max_output_tokens,
        max_calls=1 if body.parallel_tool_calls is False else None,
        logprobs=(body.top_logprobs or 0) if gives_logprobs else None,
    )


def effort(body: ResponseBody) -> AnyEffort:
    """The reasoning effort, from whichever field gives it."""
    requested = None if body.reasoning is None else body.reasoning.effort
    return effort_of(requested, body.chat_template_args, body.chat_template_kwargs)
