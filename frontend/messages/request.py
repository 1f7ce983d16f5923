"""The Messages body, and its conversion into a TurnRequest."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.harmony.conversation import (
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    ReasoningEffort,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.turn.fields import (
    NEAREST_EFFORT,
    NUMBER,
    TEXT,
    ClientTool,
    CommonFields,
    Count,
    FunctionName,
    Refused,
    Share,
    StopText,
    note,
    required,
)
from frontend.turn.request import CallChoice, TurnRequest
from frontend.turn.thoughts import PARAGRAPH, Seal, joined, one_answer


class Source(msgspec.Struct, kw_only=True):
    """Where the content of an image or a document is: `data` if it is text, `content` if it is blocks."""

    type: str | None = None
    data: Any = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct, kw_only=True):
    """A content block; its `type` determines the required fields. Only blocks of Anthropic's servers, which
    are left out, may have an object as `content`. `title` and `context` are those of a document."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "AnyContent" = None
    is_error: bool | None = None
    source: str | Source | None = None
    title: Any = None
    context: Any = None


Content = str | list[Block]
AnyContent = Content | dict[str, Any] | None


class MessageParam(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolParam(msgspec.Struct, kw_only=True):
    """A tool. The client's own have no `type` or `custom`; other types are defined by Anthropic."""

    name: FunctionName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(msgspec.Struct, kw_only=True):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the answer contains thinking blocks, and the thinking budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, kw_only=True):
    """Output format: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Reasoning effort and output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Thread(msgspec.Struct, kw_only=True):
    """Starts a thread, or continues it after a message that the server keeps."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class ThreadNotFound(BatonError, code="thread_not_found", status=404):
    """Threads are not kept here; send the whole conversation with every request."""


class Counted(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: as `POST /v1/messages`, whose answer's fields have no effect."""

    refused: ClassVar[Refused] = {"container": ((), "Code execution is not available.")}
    # They control Anthropic's servers.
    hints: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata", "service_tier", "betas", "anthropic_beta", "inference_geo", "speed", "cache_control",
            "context_management",
        }
    )  # fmt: skip
    shallow: ClassVar[frozenset[str]] = frozenset({"messages", "system", "tools"})

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1)]
    system: Content | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[StopText], msgspec.Meta(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    thread: Thread | None = None


class MessagesBody(Counted, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count

    def __post_init__(self) -> None:
        if self.thread is not None and self.thread.type == "continue":
            raise ThreadNotFound(
                "`thread`: this server keeps no conversations; send all messages, without `thread` or with "
                '`{"type": "create"}`.',
                param="thread",
            )
        if self.messages[-1].role == "assistant":
            raise InvalidRequest.at(
                "messages",
                "must not end with role 'assistant'; this model does not support prefilled answers.",
            )


# Thinking budgets, in tokens, up to which the effort is lower than high.
_BUDGETS: tuple[tuple[int, ReasoningEffort], ...] = ((2048, "low"), (12_000, "medium"))
# Claude Code's first line, for Anthropic, has a new checksum in each request: no cached KV would be found.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_COMMANDS = ["view", "create", "str_replace", "insert"]
_EDITING = (
    "`view` shows a path, or the first to the last line of `view_range`; `create` writes `file_text`; "
    "`str_replace` puts `new_str` in place of `old_str`, which must be unique in the file; `insert` puts "
    "`insert_text` after `insert_line`, 0 for the top."
)
_EDITS = {
    "path": TEXT,
    "view_range": {"type": "array", "items": NUMBER},
    "insert_line": NUMBER,
    **dict.fromkeys(("file_text", "old_str", "new_str", "insert_text"), TEXT),
}
# Tools that Anthropic defines and the client runs, by their types without the date.
_CLIENT_TOOLS = {
    "bash": ClientTool(
        "Runs commands in one bash session on the user's machine.",
        {"command": TEXT, "restart": {"type": "boolean", "description": "Start a new session instead."}},
        ["command"],
    ),
    "text_editor": ClientTool(
        f"Views, creates and edits files on the user's machine. {_EDITING}",
        {"command": TEXT | {"enum": _COMMANDS}, **_EDITS},
        ["command", "path"],
    ),
    "memory": ClientTool(
        "Views and edits the files in /memories, which are kept between conversations. View this folder "
        f"first, and note in it what will matter later. {_EDITING} `rename` moves `old_path` to `new_path`.",
        {
            "command": TEXT | {"enum": [*_COMMANDS, "delete", "rename"]},
            **_EDITS,
            "old_path": TEXT,
            "new_path": TEXT,
        },
        ["command"],
    ),
}


def turn_request(body: Counted, num_bytes: int, seal: Seal) -> tuple[TurnRequest, list[str]]:
    """The request of a body of `num_bytes`, and the paths of the tools and the content that it leaves out,
    such as images. Raises InvalidRequest, naming the field."""
    reader = _Reader(seal)
    choice = body.tool_choice or ToolChoiceParam(type="auto")
    tools = _offered_tools(body, choice.type, reader.ignored)
    system = _BILLING.sub("", reader.text(body.system, "system"), count=1)
    instructions = [Instructions(system)] if system else []
    conversation = Conversation(
        turns=(*instructions, *joined(reader.turns(body.messages))),
        tools=tuple(tools),
        reasoning_effort=_effort(body),
        answer_format=_answer_format(body),
    )
    names = frozenset({required(choice.name, "tool_choice.name")}) if choice.type == "tool" else None
    fields = CommonFields(model=body.model, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    request = TurnRequest(
        fields=fields,
        prompt=conversation,
        calls=CallChoice(must_call=choice.type in {"any", "tool"}, names=names),
        path="messages",
        num_bytes=num_bytes,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        max_calls=1 if choice.disable_parallel_tool_use else None,
    )
    return request, sorted(reader.ignored)


def _offered_tools(body: Counted, kind: str, ignored: set[str]) -> list[Tool]:
    """The tools that the model may see with this kind of choice. Others are ignored, since Anthropic's
    servers run them or the model would have to see images. Raises InvalidRequest, also if only those are
    given."""
    tools, idle = [], []
    for i, param in enumerate(body.tools or ()):
        path = f"tools[{i}]"
        defined = _CLIENT_TOOLS.get((param.type or "").rpartition("_")[0])
        if defined is not None:
            tools.append(defined.function(required(param.name, f"{path}.name"), path))
        elif param.type in {None, "custom"}:
            made = Tool(
                name=required(param.name, f"{path}.name"),
                description=param.description,
                parameters=required(param.input_schema, f"{path}.input_schema"),
                strict=bool(param.strict),
                path=path,
            )
            tools.append(made)
        else:
            ignored.add(f"tools[].{param.type}"[:80])
            if param.type != "mcp_toolset":  # a connection of the session, not what this request is about
                idle.append(str(param.type)[:72])
    if kind == "auto" and idle and not tools:
        raise InvalidRequest.at(
            "tools",
            f"has only {', '.join(idle)}, which cannot run here; a client's own have no `type`, or `custom`.",
        )
    return [] if kind == "none" else tools


def _effort(body: Counted) -> ReasoningEffort:
    """The nearest effort that gpt-oss has; it cannot turn reasoning off, so `disabled` is low."""
    config, thinking = body.output_config or OutputConfig(), body.thinking or Thinking(type="adaptive")
    if config.effort is not None:
        return NEAREST_EFFORT[config.effort]
    if thinking.type == "disabled":
        return "low"
    if thinking.type == "adaptive" or thinking.budget_tokens is None:
        return "medium"
    return next((effort for budget, effort in _BUDGETS if thinking.budget_tokens <= budget), "high")


def _answer_format(body: Counted) -> AnswerFormat | None:
    config = body.output_config or OutputConfig()
    for form, path in ((config.format, "output_config.format"), (body.output_format, "output_format")):
        if form is not None:
            return AnswerFormat(schema=form.schema, name="answer", strict=True, path=f"{path}.schema")
    return None


class _Reader:
    """Reads a body's content; `ignored` are the paths of what it leaves out. Raises InvalidRequest."""

    def __init__(self, seal: Seal) -> None:
        self.ignored: set[str] = set()
        self._seal = seal

    def turns(self, messages: Sequence[MessageParam]) -> Iterator[Turn]:
        """The turns of all messages; those of one answer are not joined."""
        for i, message in enumerate(messages):
            path = f"messages[{i}].content"
            match message.role:
                case "system":
                    yield Instructions(self.text(message.content, path))
                case "user":
                    yield from self._user_turns(message.content, path)
                case _:
                    yield self._answer(message.content, path)

    def text(self, content: AnyContent, path: str) -> str:
        """The text of a content; notes stand for what is not text."""
        return PARAGRAPH.join(
            text for block, where in _blocks(content, path) for text in self._texts(block, where)
        )

    def _user_turns(self, content: Content, path: str) -> Iterator[Turn]:
        """Tool results, then the user's text."""
        texts: list[str] = []
        for block, where in _blocks(content, path):
            if block.type != "tool_result":
                texts += self._texts(block, where)
                continue
            text = self.text(block.content, f"{where}.content")
            yield ToolResult(
                call_id=required(block.tool_use_id, f"{where}.tool_use_id"),
                text=f"Error: {text}" if block.is_error else text,
                path=f"{where}.tool_use_id",
            )
        if texts:
            yield UserTurn(PARAGRAPH.join(texts))

    def _answer(self, content: Content, path: str) -> AssistantTurn:
        """An earlier answer. Reasoning that this service did not sign is left out."""
        parts: list[AssistantTurn] = []
        for block, where in _blocks(content, path):
            thought, signature = block.thinking or "", block.signature or ""
            if block.type == "tool_use":
                call = ToolCall(
                    call_id=required(block.id, f"{where}.id"),
                    name=required(block.name, f"{where}.name"),
                    arguments=msgspec.json.encode(block.input or {}).decode(),
                )
                parts.append(AssistantTurn(tool_calls=(call,)))
            elif block.type == "thinking" and self._seal.is_ours(thought, signature, f"{where}.signature"):
                parts.append(AssistantTurn(reasoning=thought))
            else:
                parts += [AssistantTurn(text=text) for text in self._texts(block, where) if text]
        return one_answer(parts)

    def _texts(self, block: Block, path: str) -> Iterator[str]:
        """The block's text, if any; other content is replaced by a note."""
        match block.type, block.source:
            case "text", _:
                yield required(block.text, f"{path}.text")
            case "document", (
                Source(type="text", data=str() as content)
                | Source(type="content", content=str() | list() as content)
            ):
                yield from (text for text in (block.title, block.context) if isinstance(text, str) and text)
                yield self.text(content, f"{path}.source.content")
            case "search_result", _:
                required(block.content, f"{path}.content")
                yield self.text(block.content, f"{path}.content")
            case "redacted_thinking" | "thinking", _:
                self.ignored.add("messages[].content[].thinking")
            case kind, _:
                yield note(kind, "messages[].content[]", self.ignored)


def _blocks(content: AnyContent, path: str) -> Iterator[tuple[Block, str]]:
    """The blocks with their paths; text is one block. Raises InvalidRequest for an object."""
    if isinstance(content, str):
        yield Block(type="text", text=content), path
    elif isinstance(content, dict):
        raise InvalidRequest.at(path, "must be a string or an array, not an object.")
    else:
        yield from ((block, f"{path}[{i}]") for i, block in enumerate(content or ()))
