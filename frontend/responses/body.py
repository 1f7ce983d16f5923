"""The Responses API's bodies, their conversion into a TurnRequest, and small answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

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
from frontend.responses.items import ADDITIONAL_TOOLS, MACHINE_TOOLS, Item, ToolSearchOutputItem, turns
from frontend.turn.fields import (
    NEAREST_EFFORT,
    AnyEffort,
    ConversationFields,
    Count,
    FunctionName,
    JsonObjectFormat,
    NamedSchema,
    Refused,
    TextFormat,
    answer_format,
    required,
)
from frontend.turn.request import CallChoice, TurnRequest

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# Only the first two have an effect: no answer of this server contains the others.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(msgspec.Struct, kw_only=True):
    """Reasoning effort, and whether the reasoning is output as a summary, which is the full text."""

    refused: ClassVar[Refused] = {
        # gpt-oss sees the reasoning of the current turn, whatever is asked for.
        "context": (("auto", "current_turn", "all_turns"), "Allowed values: auto, current_turn, all_turns."),
        "mode": (("standard",), "Only standard is available."),
    }

    effort: AnyEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class SchemaFormat(NamedSchema, kw_only=True, tag_field="type", tag="json_schema"):
    """`text.format`: JSON that follows a schema; without `strict`, some keywords may be ignored."""


class TextConfig(msgspec.Struct, kw_only=True):
    """Options of the answer's text."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ResponseTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool: a `function` with a JSON schema of its `parameters`, a `custom` tool with text input, a
    `namespace` of such `tools`, or one of `local_shell`, `shell` and `apply_patch`, which the client runs, as
    it does `tool_search` with `execution` client. Other types are OpenAI's hosted tools."""

    hints: ClassVar[frozenset[str]] = frozenset({"eager_input_streaming"})

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None
    format: "ToolFormat | None" = None
    tools: "list[ResponseTool] | None" = None
    environment: Any = None
    execution: Literal["client", "server"] | None = None


class AdditionalTools(msgspec.Struct, kw_only=True):
    """An item of `input` with tools."""

    tools: list[ResponseTool]


class ToolFormat(msgspec.Struct, kw_only=True):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A reference to a tool: to one of the client's machine by its `type`, to others by name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoice(NamedTool, kw_only=True, omit_defaults=True):
    """`tool_choice`: this tool must be called, which is referred to as in `NamedTool`, or, of
    `allowed_tools`, only `tools` may be, although the prompt shows all."""

    type: Literal["function", "custom", "shell", "local_shell", "apply_patch", "allowed_tools"]
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1)] | None = None


class ResponseBody(ConversationFields, kw_only=True):
    """`POST /v1/responses`, with the same extensions as chat completions."""

    refused: ClassVar[Refused] = {
        "messages": ((), "In the Responses API, use `input`."),
        "max_tokens": ((), "In the Responses API, use `max_output_tokens`."),
        "max_completion_tokens": ((), "In the Responses API, use `max_output_tokens`."),
        "response_format": ((), "In the Responses API, use `text.format`."),
        "reasoning_effort": ((), "In the Responses API, use `reasoning.effort`."),
        "logprobs": ((False,), f'In the Responses API, use `include`: ["{LOGPROBS}"].'),
        "n": ((1,), "A response has a single answer."),
        "stop": (([],), "The Responses API has no stop strings; use `stop_token_ids`."),
        "access_programs": ((), "Access programs are not available."),
        "background_options": (
            ({}, {"completion_window": "soonest"}),
            "Background responses always start immediately.",
        ),
        "context_management": (([],), "Shorten the input before you send it."),
        "conversation": ((), "Use `previous_response_id`."),
        "image": (({},), "This model reads and writes text only."),
        "moderation": ((), "Moderation is not available."),
        "prompt": ((), "Prompt templates are not available; use `instructions` and `input`."),
    }

    # `frontend.responses.items` validates the items.
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    max_tool_calls: Count | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[Includable] | None = None
    max_output_tokens: Count | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background and self.store is False:
            raise InvalidRequest.at("background", "needs `store`: true.")
        if not (self.input or self.instructions or self.previous_response_id):
            raise InvalidRequest.at("input", "is missing, as are `instructions` and `previous_response_id`.")

    @property
    def effort(self) -> AnyEffort:
        """The reasoning effort, from whichever field gives it."""
        return self.effort_of(None if self.reasoning is None else self.reasoning.effort)


class OfferedTools(msgspec.Struct):
    """The tools that the prompt shows. `machine` are the types of machine tools among them, `left_out` the
    paths of hosted tools, which only OpenAI's servers run."""

    tools: list[Tool] = []
    machine: list[str] = []
    namespaces: list[Namespace] = []
    left_out: list[str] = []


def offered_tools(body: ResponseBody, earlier: Iterable[Item]) -> OfferedTools:
    """The tools that the model may see: the body's, and those that its searches, also `earlier` ones, found.
    Raises InvalidRequest, naming the field."""
    own = [(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    found = [
        ("previous_response_id", tool)
        for item in earlier
        if isinstance(item, ToolSearchOutputItem)
        for tool in msgspec.convert(item.tools, list[ResponseTool])
    ]
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if item.get("type") in (ADDITIONAL_TOOLS, "tool_search_output"):
            tools = convert(item, AdditionalTools, f"input[{i}]").tools
            added = own if item["type"] == ADDITIONAL_TOOLS else found
            added += [(f"input[{i}].tools[{j}]", tool) for j, tool in enumerate(tools)]
    offered = OfferedTools()
    offered.tools = [made for path, tool in own for made in _tools(tool, path, offered)]
    known = {tool.called for tool in offered.tools}
    others = {made.called: made for path, tool in found for made in _tools(tool, path, offered)}
    offered.tools += [tool for name, tool in others.items() if name not in known]
    return OfferedTools(left_out=offered.left_out) if body.tool_choice == "none" else offered


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
        offered.namespaces.append(Namespace(name=name, description=tool.description))
        for j, inner in enumerate(tool.tools or ()):
            yield from _tools(inner, f"{path}.tools[{j}]", offered, name)
    elif is_hosted:
        offered.left_out.append(f"tools[].{kind}.environment"[:80])
    elif is_outer and kind in MACHINE_TOOLS and (kind != "tool_search" or tool.execution == "client"):
        offered.machine.append(kind)
        made = MACHINE_TOOLS[kind].function(kind, path)
        if tool.parameters is not None:
            description = tool.description or made.description
            made = replace(made, description=description, parameters=tool.parameters, strict=False)
        yield made
    else:
        offered.left_out.append(f"tools[].{kind}"[:80])


def _tool(tool: ResponseTool, path: str, namespace: str) -> Tool:
    unsupported = "async" if tool.is_async else "allowed_callers"
    if tool.is_async or "direct" not in (tool.allowed_callers or ["direct"]):
        raise InvalidRequest.at(f"{path}.{unsupported}", "is not supported.")
    grammar = None
    if tool.type == "custom" and tool.format is not None and tool.format.type == "grammar":
        grammar = TextGrammar(
            syntax=required(tool.format.syntax, f"{path}.format.syntax"),
            text=required(tool.format.definition or None, f"{path}.format.definition"),
            path=f"{path}.format.definition",
        )
    return Tool(
        name=required(tool.name, f"{path}.name"),
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        takes_text=tool.type == "custom",
        grammar=grammar,
        namespace=namespace,
        path=path,
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
    body: ResponseBody, earlier: Sequence[Item], items: Mapping[str, Item], num_bytes: int
) -> tuple[TurnRequest, Sequence[str], list[str]]:
    """The request of the body after `earlier` items, the types of the machine tools that it offers, and the
    fields without effect; `items` are its `input`, `num_bytes` the length of both. Instructions are those of
    this body only: the API does not carry them over."""
    offered = offered_tools(body, earlier)
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    conversation = Conversation(
        turns=(*leading, *turns(earlier, items)),
        tools=tuple(offered.tools),
        namespaces=tuple(offered.namespaces),
        reasoning_effort=NEAREST_EFFORT[body.effort],
        answer_format=answer_format(None if body.text is None else body.text.format, "text.format"),
    )
    gives_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    request = TurnRequest(
        fields=body,
        prompt=conversation,
        calls=call_choice(body),
        path="input",
        num_bytes=num_bytes,
        max_tokens=body.max_output_tokens,
        max_calls=body.max_calls,
        logprobs=(body.top_logprobs or 0) if gives_logprobs else None,
    )
    ignored = [*dict.fromkeys(offered.left_out)]
    if NEAREST_EFFORT[body.effort] != body.effort:
        ignored.append("reasoning.effort")
    if body.stream_options is not None and body.stream_options.include_timings:
        ignored.append("stream_options.include_timings")
    return request, offered.machine, ignored


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct, kw_only=True):
    """`GET /v1/responses/{id}/input_items`: one page."""

    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
