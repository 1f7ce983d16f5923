"""The data model of a Harmony conversation, independent of the API."""

from array import array
from typing import Literal

import msgspec

from baton.messages import Syntax

FUNCTIONS = "functions"
# Tools that gpt-oss was trained with and may call although they are not offered.
BUILTIN_TOOLS = ("browser", "python")
ReasoningEffort = Literal["low", "medium", "high"]


def called_name(namespace: str, name: str) -> str:
    """The tool name in the parser's deltas."""
    return name if namespace == FUNCTIONS else f"{namespace}.{name}"


def is_builtin(name: str) -> bool:
    """Whether a call's name belongs to a built-in tool: `browser.search`, `python`."""
    return name.partition(".")[0] in BUILTIN_TOOLS


class TextGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that a text must match; `path` is the field that contains it."""

    syntax: Syntax
    text: str
    path: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call; `parameters` is its JSON schema, parsed (None: no arguments). `strict`
    enforces the schema in every call. With `takes_text`, the arguments are text that follows the `grammar`,
    if any. `path` is the field that defines the tool."""

    name: str
    description: str | None = None
    parameters: object = None
    strict: bool = False
    takes_text: bool = False
    grammar: TextGrammar | None = None
    namespace: str = FUNCTIONS
    path: str = "tools"

    @property
    def called(self) -> str:
        """The tool name in the parser's deltas, without the namespace `functions`."""
        return called_name(self.namespace, self.name)


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A group of tools other than `functions`."""

    name: str
    description: str | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in the history; `arguments` is text as the model wrote it, valid JSON or not."""

    call_id: str
    name: str
    arguments: str
    takes_text: bool = False
    namespace: str = FUNCTIONS

    @property
    def called(self) -> str:
        return called_name(self.namespace, self.name)


class Instructions(msgspec.Struct, frozen=True, tag="instructions"):
    """A system or developer message of the API, rendered as Harmony's developer message."""

    text: str


class UserTurn(msgspec.Struct, frozen=True, tag="user"):
    """A user message."""

    text: str


Kind = Literal["thought", "text", "call"]


class WrittenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the model wrote it: the tokens after `<|start|>assistant` for the first one of an answer,
    else from `<|start|>` on; `text` is its body, `call` its recipient."""

    kind: Kind
    text: str
    token_ids: array  # type: ignore[type-arg]  # it takes none when it runs, where msgspec reads it
    call: str = ""


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag="assistant"):
    """One earlier answer: reasoning, visible text (a preamble if calls follow), calls. `is_preamble`: it
    ended after its preamble. `written` are its messages as the model wrote them, if known."""

    reasoning: str | None = None
    text: str | None = None
    is_preamble: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    written: tuple[WrittenMessage, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether the text is a final answer: no later prompt shows the reasoning before it."""
        return bool(self.text) and not (self.tool_calls or self.is_preamble)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """The result of a tool call; `path` is the field that contains the call's id."""

    call_id: str
    text: str
    path: str = "tool_call_id"


Turn = Instructions | UserTurn | AssistantTurn | ToolResult


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the visible answer: text that follows `grammar`, else JSON that follows `schema`. Without
    `strict`, keywords that cannot be enforced are ignored. The prompt shows a schema that has a `name`.
    `path` is the field that demands the format."""

    schema: object
    grammar: TextGrammar | None = None
    name: str | None = None
    description: str | None = None
    strict: bool = False
    path: str = "response_format"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The complete input of the prompt. `current_date` is `YYYY-MM-DD`, or None to omit it."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str | None = None
    answer_format: AnswerFormat | None = None


MessageKind = Literal["thought", "text", "preamble", "call"]
"""A preamble is text for the user before a call: commentary without a recipient."""


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """The start of a message, which has text unless it is a call. `name` is the called tool's without
    `functions.`, `index` counts the calls from 0. The parser leaves `call_id` empty."""

    kind: MessageKind
    name: str = ""
    index: int = 0
    call_id: str = ""


class Text(msgspec.Struct, frozen=True, array_like=True):
    """More text of the open message or call, verbatim; `start` and `stop` are its tokens' positions."""

    text: str
    start: int
    stop: int


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of the open message; `complete` is False if the stream ended inside it."""

    complete: bool = True


Delta = Begin | Text | End
