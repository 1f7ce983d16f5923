"""The Responses API's request body, as validating structs."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from frontend.turn.fields import (
    AnyEffort,
    Count,
    FunctionName,
    JsonObjectFormat,
    Metadata,
    NamedSchema,
    OpenAIFields,
    Refused,
    TemplateArgs,
    TextFormat,
    TopLogprobs,
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
    """`text.format`: JSON that follows a schema. Without `strict`, keywords that cannot be enforced are
    ignored."""


class TextConfig(msgspec.Struct, kw_only=True):
    """Options of the answer's text."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
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


class FunctionByName(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="function"):
    """`tool_choice`: this function must be called."""

    name: str
    namespace: str | None = None


class CustomByName(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="custom"):
    """`tool_choice`: this custom tool must be called."""

    name: str
    namespace: str | None = None


class ShellByType(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    """`tool_choice`: `shell` must be called."""


class LocalShellByType(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell"):
    """`tool_choice`: `local_shell` must be called."""


class PatchByType(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    """`tool_choice`: `apply_patch` must be called."""


class AllowedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the tools that may be called."""

    type: str
    name: str | None = None
    namespace: str | None = None


class FunctionsByName(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: the prompt shows all tools, but only these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1)]


ToolChoice = (
    Literal["none", "auto", "required"]
    | FunctionByName
    | CustomByName
    | ShellByType
    | LocalShellByType
    | PatchByType
    | FunctionsByName
)


class ResponseBody(OpenAIFields, kw_only=True):
    """`POST /v1/responses`, with the same extensions as chat completions."""

    refused: ClassVar[Refused] = {
        **OpenAIFields.refused,
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
    deep: ClassVar[frozenset[str]] = frozenset(
        {
            "nvext", "stream_options", "chat_template_args", "chat_template_kwargs", "reasoning", "text",
            "tools", "tool_choice", "structured_outputs",
        }
    )  # fmt: skip

    # `frontend.responses.given` validates the items.
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[Includable] | None = None
    top_logprobs: TopLogprobs | None = None
    max_output_tokens: Count | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None
