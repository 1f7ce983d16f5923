"""The Responses API's bodies, as validating structs, and small answers."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.responses.items import Item
from frontend.turn.fields import (
    AnyEffort,
    ConversationFields,
    Count,
    FunctionName,
    JsonObjectFormat,
    NamedSchema,
    Refused,
    TextFormat,
)

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
