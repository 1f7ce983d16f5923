"""The Messages request body, as validating structs."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.turn.fields import Count, FunctionName, Refused, Share, StopText

# Fields that control Anthropic's servers; accepted without effect.
_HINTS = frozenset(
    {"metadata", "service_tier", "betas", "anthropic_beta", "inference_geo", "speed", "cache_control"}
)


class Source(msgspec.Struct, kw_only=True):
    """Where the content of an image or a document is: `data` if it is text, `content` if it is blocks."""

    type: str | None = None
    data: Any = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct, kw_only=True):
    """A content block; its `type` determines the required fields. Only blocks of Anthropic's servers, which
    are left out, may have an object as `content`, and only these and `search_result` a string as `source`.
    `title` and `context` are those of a document."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: str | Source | None = None
    title: Any = None
    context: Any = None


Content = str | list[Block]


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(msgspec.Struct, kw_only=True):
    """A tool. The client's own have no `type` or `custom`; other types are defined by Anthropic."""

    name: FunctionName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
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
    """Starts a thread, or continues it after a message that the server is to know."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class ThreadNotFound(BatonError):
    """Threads are not kept here; send the whole conversation with every request."""

    code = "thread_not_found"
    status = 404
    kind = "invalid_request_error"


class Counted(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that make up the prompt."""

    refused: ClassVar[Refused] = {
        "container": ((), "Code execution is not available."),
    }
    hints: ClassVar[frozenset[str]] = _HINTS | {"context_management"}
    deep: ClassVar[frozenset[str]] = frozenset({"tool_choice", "thinking", "output_config"})

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    mcp_servers: list[dict[str, Any]] | None = None


class MessagesBody(Counted, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], msgspec.Meta(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    thread: Thread | None = None

    def __post_init__(self) -> None:
        if self.thread is not None and self.thread.type == "continue":
            raise ThreadNotFound(
                "`thread`: this server keeps no conversations; send all messages, without `thread` or with "
                '`{"type": "create"}`.',
                param="thread",
            )
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "The last message in `messages` must not have role 'assistant'; this model does not support "
                "prefilled answers.",
                param="messages",
            )
