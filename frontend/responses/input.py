"""Reads what a body sends to the model: its items, its tools and their choice, and the request they make."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

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
from frontend.responses.items import (
    ITEMS,
    MACHINE_TOOLS,
    Item,
    ReasoningItem,
    ReasoningText,
    ToolSearchOutputItem,
    turns,
)
from frontend.turn.fields import NEAREST_EFFORT, AnyEffort, Part, effort_of, identity_of, required
from frontend.turn.ids import new_id
from frontend.turn.request import CallChoice, TurnRequest, answer_format, left_out, text_of_part
from frontend.turn.seal import Changed, Seal


class Reference(msgspec.Struct, kw_only=True):
    """A reference to an item of a stored response."""

    id: str


INPUT_ITEMS: Mapping[str, type[msgspec.Struct]] = {**ITEMS, "item_reference": Reference}
# The field with text, and the type of its parts.
_TEXTS = {
    "message": ("content", "input_text"),
    "reasoning": ("content", "reasoning_text"),
    "function_call_output": ("output", "input_text"),
    "custom_tool_call_output": ("output", "input_text"),
}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# Items made by OpenAI's hosted tools or by other models, which agents send back when a session moves.
LEFT_OUT = frozenset(
    {
        "web_search_call", "file_search_call", "computer_call", "computer_call_output",
        "image_generation_call", "code_interpreter_call", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "compaction", "compaction_summary", "configuration_update",
        "program", "program_output",
    }
)  # fmt: skip
ADDITIONAL_TOOLS = "additional_tools"
"""An item with tools instead of content, as Codex sends them: see `offered_tools`."""


class InputReader:
    """The items of one body's `input`, each with an id; `left_out` are the paths of unsupported content, such
    as images."""

    def __init__(
        self, body_input: str | list[dict[str, Any]] | None, seal: Seal, recall: Callable[[str], str | None]
    ) -> None:
        """`recall` returns the text of a reasoning item by id, if still known. Raises InvalidRequest, naming
        the field."""
        self.left_out: set[str] = set()
        self._seal = seal
        self._recall = recall
        if isinstance(body_input, str):
            body_input = [{"role": "user", "content": body_input}]
        read = (self._read(item, f"input[{i}]") for i, item in enumerate(body_input or ()))
        self.items = [item for item in read if item is not None]

    def _read(self, fields: dict[str, Any], path: str) -> Item | Reference | None:
        kind = fields.get("type")
        if kind is None:  # optional for these two
            kind = "message" if "role" in fields else "item_reference"
        if kind == ADDITIONAL_TOOLS:
            return None
        if not isinstance(kind, str) or kind not in {*INPUT_ITEMS, *LEFT_OUT}:
            allowed = ", ".join(sorted({*INPUT_ITEMS, ADDITIONAL_TOOLS}))
            raise InvalidRequest(
                f"`{path}.type` {kind!r:.80} is not supported; allowed values: {allowed}.",
                param=f"{path}.type",
            )
        if kind in LEFT_OUT or _is_hosted_search(fields):
            self.left_out.add(f"input[].{kind}")
            return None
        fields = _present(fields, kind)
        if kind in _TEXTS:
            self._read_texts(fields, kind, path)
        item: Any = convert(fields, INPUT_ITEMS[kind], path)
        if isinstance(item, ReasoningItem):
            item = self._reasoning(item, path)
        item.id = item.id or new_id(_PREFIXES.get(kind, "item"))
        return cast("Item | Reference", item)

    def _read_texts(self, fields: dict[str, Any], kind: str, path: str) -> None:
        """Replace content parts by parts of the item's own type, or by notes about what cannot be read."""
        name, part_type = _TEXTS[kind]
        content = fields.get(name)
        if kind == "message":
            part_type = "output_text" if fields.get("role") == "assistant" else part_type
            content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, list):
            texts = (self._text(part, f"{path}.{name}[{i}]") for i, part in enumerate(content))
            fields[name] = [{"type": part_type, "text": text} for text in texts]
        if kind == "reasoning" and isinstance(fields.get("summary"), list):
            parts = (convert(part, Part, f"{path}.summary[{i}]") for i, part in enumerate(fields["summary"]))
            fields["summary"] = [{"type": "summary_text", "text": part.text or ""} for part in parts]

    def _text(self, part: object, path: str) -> str:
        read = convert(part, Part, path)
        text = text_of_part(read, path)
        if text is None:
            self.left_out.add(f"input[].{read.type}"[:80])
            return left_out(read.type)
        return text

    def _reasoning(self, item: ReasoningItem, path: str) -> ReasoningItem:
        """The item with its `content`, with its `encrypted_content` of this service, or recalled by id."""
        content = item.content
        if not content and item.encrypted_content:
            content = self._opened(item.encrypted_content, f"{path}.encrypted_content")
        if not content and item.id and (text := self._recall(item.id)) is not None:
            content = [ReasoningText(text=text)]
        if not content and item.summary:
            self.left_out.add("input[].summary")
        return ReasoningItem(id=item.id, content=content)

    def _opened(self, sealed: str, path: str) -> list[ReasoningText]:
        try:
            text = self._seal.open(sealed)
        except Changed:
            raise InvalidRequest(
                f"`{path}` was changed; send it back unchanged, or leave it out.", param=path
            ) from None
        if text is None:
            self.left_out.add("input[].encrypted_content")
            return []
        return [ReasoningText(text=text)]


def _is_hosted_search(fields: dict[str, Any]) -> bool:
    """Whether the item is of a `tool_search` that OpenAI's servers ran."""
    is_search = fields.get("type") in {"tool_search_call", "tool_search_output"}
    return is_search and (fields.get("execution") == "server" or fields.get("call_id") is None)


def _present(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields that are not null: OpenAI's types allow null for absent ones. Messages, reasoning, function
    calls and results are complete, whatever `status` they come back with."""
    dropped = {"status"} if kind in _PREFIXES else set()
    return {name: value for name, value in fields.items() if value is not None and name not in dropped}


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
    offered = OfferedTools()
    for i, tool in enumerate(body.tools or ()):
        _offer(tool, f"tools[{i}]", offered)
    for path, tool in _among_input(body, ADDITIONAL_TOOLS):
        _offer(tool, path, offered)
    listed = offered.tools.copy()
    for path, tool in (*_found_before(earlier), *_among_input(body, "tool_search_output")):
        _offer(tool, path, offered)
    known = {tool.called for tool in listed}
    found = {tool.called: tool for tool in offered.tools[len(listed) :] if tool.called not in known}
    offered.tools = [*listed, *found.values()]
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
