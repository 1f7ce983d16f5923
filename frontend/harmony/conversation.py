"""The words of a Harmony conversation, whatever API it came through."""

from array import array
from typing import Literal

import msgspec

from baton.messages import Syntax

FUNCTIONS = "functions"
ReasoningEffort = Literal["low", "medium", "high"]
MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."


def called_name(namespace: str, name: str) -> str:
    """The name by which the parser tells calls of a tool."""
    return name if namespace == FUNCTIONS else f"{namespace}.{name}"


class TextGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """What a text must match; `path` is the field that has the grammar."""

    syntax: Syntax
    text: str
    path: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is its JSON schema as parsed JSON (None: no arguments). The
    arguments of a `strict` one follow the schema in every call. One that `takes_text` has text for arguments,
    which follows the `grammar` if there is one. `path` is the field that describes it."""

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
        """The name by which the parser tells its calls: the namespace is left out of plain functions."""
        return called_name(self.namespace, self.name)


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A group of tools besides `functions`; `path` is the field that names it."""

    name: str
    description: str | None = None
    path: str = "tools"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in the history; `arguments` is text as the model wrote it, valid JSON or not."""

    call_id: str
    name: str
    arguments: str
    takes_text: bool = False
    namespace: str = FUNCTIONS

    @property
    def called(self) -> str:
        """The name by which the parser tells it."""
        return called_name(self.namespace, self.name)


class Instructions(msgspec.Struct, frozen=True, tag="instructions"):
    """A system or developer message of the API: goes into Harmony's developer message."""

    text: str


class UserTurn(msgspec.Struct, frozen=True, tag="user"):
    """What the user said."""

    text: str


Kind = Literal["thought", "text", "call"]


class WrittenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the model wrote it: the tokens after `<|start|>assistant` for the first one of an answer,
    else from `<|start|>` on; `text` is its body."""

    kind: Kind
    text: str
    token_ids: "array[int]"
    is_first: bool


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag="assistant"):
    """One earlier answer: reasoning, a preamble, then visible text (a preamble, too, when calls follow),
    then calls. `written` are the messages in which the model said just that, if they are known."""

    reasoning: str | None = None
    preamble: str | None = None
    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    written: tuple[WrittenMessage, ...] = ()


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """What a tool returned for the call of that id; `path` is the field that has the id."""

    call_id: str
    text: str
    path: str = "tool_call_id"


Turn = Instructions | UserTurn | AssistantTurn | ToolResult


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The visible answer is text that follows `grammar` or, without one, JSON that follows `schema`; unless
    `strict`, what cannot be enforced of the schema is left out. The prompt shows a schema under its `name`,
    if it has one. `path` is the field that demands it."""

    schema: object
    grammar: TextGrammar | None = None
    name: str | None = None
    description: str | None = None
    strict: bool = False
    path: str = "response_format"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is rendered. `current_date` is `YYYY-MM-DD`, or None to leave the line out.

    `builtin_tools` are the names among `browser`, `python` that the client offered.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str | None = None
    model_identity: str = MODEL_IDENTITY
    knowledge_cutoff: str = "2024-06"
    answer_format: AnswerFormat | None = None
    builtin_tools: tuple[str, ...] = ()
