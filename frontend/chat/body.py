"""The chat completion request body, as validating structs."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.turn.fields import (
    AnyEffort,
    CommonFields,
    Content,
    Count,
    FunctionName,
    JsonObjectFormat,
    Metadata,
    NamedSchema,
    Refused,
    StopText,
    StopTexts,
    TemplateArgs,
    TextFormat,
    TopLogprobs,
)


class FunctionCall(msgspec.Struct, kw_only=True):
    """A called function; `arguments` is text as the model wrote it, valid JSON or not."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct, kw_only=True):
    """A called custom tool and its input."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer; it has the field that `type` names."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message. `system` and `developer` give instructions; `assistant` is an earlier answer, as this server
    returned it, the only one that may lack `content`; `tool` is the result of the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is its JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputGrammar(msgspec.Struct, kw_only=True):
    """A grammar in Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, msgspec.Meta(min_length=1)]


class InputFormat(msgspec.Struct, kw_only=True):
    """The format of a custom tool's input: any text, or text that follows the `grammar`."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool whose input is text."""

    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool; it has the field that `type` names."""

    type: Literal["function", "custom"] = "function"
    function: FunctionTool | None = None
    custom: CustomTool | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """A reference to a tool by name."""

    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    """One of the tools that may be called; it has the field that `type` names."""

    type: Literal["function", "custom"] = "function"
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """`tool_choice`: this tool must be called, or only these may be, although the prompt shows all; it has
    the field that `type` names."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that follows a schema. Without `strict`, keywords that cannot be enforced are
    ignored."""

    json_schema: NamedSchema


class ReasoningFields(msgspec.Struct, kw_only=True):
    """Reasoning effort, in OpenRouter's form; `exclude` leaves the reasoning out of the answer."""

    effort: AnyEffort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatBody(CommonFields, kw_only=True):
    """`POST /v1/chat/completions`. Extensions: `chat_template_args` (or `chat_template_kwargs`), and
    `include_reasoning`, which controls whether the answer contains reasoning text."""

    refused: ClassVar[Refused] = {
        **CommonFields.refused,
        "audio": ((), "This model outputs text only."),
        "modalities": ((["text"],), 'This model outputs text only; send ["text"].'),
        "functions": (([],), "It is deprecated; use `tools`."),
        "function_call": (("none", "auto"), "It is deprecated; use `tool_choice`."),
        "web_search_options": ((), "Web search is not available; offer a search function in `tools`."),
        "moderation": ((), "Moderation is not available."),
    }
    hints: ClassVar[frozenset[str]] = CommonFields.hints | {"store", "prediction"}
    deep: ClassVar[frozenset[str]] = frozenset(
        {
            "nvext", "stream_options", "chat_template_args", "chat_template_kwargs", "tools", "tool_choice",
            "response_format", "reasoning", "structured_outputs",
        }
    )  # fmt: skip

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count | None = None
    stop: StopText | StopTexts | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: AnyEffort | None = None
    reasoning: ReasoningFields | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None
    include_reasoning: bool | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    metadata: Metadata | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
