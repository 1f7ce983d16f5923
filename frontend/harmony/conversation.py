"""The words of a Harmony conversation, whatever API it came through."""

from typing import Literal

import msgspec

ReasoningEffort = Literal["low", "medium", "high"]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is its JSON schema as parsed JSON."""

    name: str
    description: str | None = None
    parameters: object = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in the history; `arguments` is text as the model wrote it, valid JSON or not."""

    call_id: str
    name: str
    arguments: str


class Instructions(msgspec.Struct, frozen=True, tag="instructions"):
    """A system or developer message of the API: goes into Harmony's developer message."""

    text: str


class UserTurn(msgspec.Struct, frozen=True, tag="user"):
    """What the user said."""

    text: str


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag="assistant"):
    """One earlier answer: reasoning, a preamble, then visible text (a preamble, too, when calls follow),
    then calls."""

    reasoning: str | None = None
    preamble: str | None = None
    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """What a tool returned for the call of that id."""

    call_id: str
    text: str


Turn = Instructions | UserTurn | AssistantTurn | ToolResult


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is rendered. `current_date` is `YYYY-MM-DD`, or None to leave the line out.

    `response_schema` is (name, JSON schema) for a `# Response Formats` section. `builtin_tools` are the names
    among `browser`, `python` that the client offered.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str | None = None
    model_identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    response_schema: tuple[str, object] | None = None
    builtin_tools: tuple[str, ...] = ()
