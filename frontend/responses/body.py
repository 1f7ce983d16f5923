"""The request body of the Responses API, as msgspec structs that validate what they decode."""

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
# What can be asked to be included; but for the first two, of parts that no answer of this server has.
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
    """How much to think, and whether the thoughts are given as a summary: they are given whole then."""

    refused: ClassVar[Refused] = {
        "context": (("auto", "current_turn"), "Reasoning is kept up to the next final answer."),
        "mode": (("standard",), "There is one mode: `standard`."),
    }

    effort: AnyEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class SchemaFormat(NamedSchema, kw_only=True, tag_field="type", tag="json_schema"):
    """`text.format`: JSON that follows a schema; unless `strict`, as far as it can be enforced."""


class TextConfig(msgspec.Struct, kw_only=True):
    """What is asked of the answer's text."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool: a `function` with the JSON schema of its `parameters`, a `custom` one that takes text, a
    `namespace` of such `tools`, or `local_shell`, `shell` and `apply_patch`, which the client's machine runs.
    Other types are run by OpenAI's servers."""

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


class ToolFormat(msgspec.Struct, kw_only=True):
    """What a custom tool's input may be."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class FunctionByName(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """`tool_choice`: this function must be called."""

    name: str


class CustomByName(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """`tool_choice`: this custom tool must be called."""

    name: str


class ShellByType(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    """`tool_choice`: the shell must be called."""


class LocalShellByType(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell"):
    """`tool_choice`: the local shell must be called."""


class PatchByType(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    """`tool_choice`: a patch must be applied."""


class AllowedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the tools that may be called."""

    type: str
    name: str | None = None


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
    """`POST /v1/responses`. Extensions are the chat API's, under the same names."""

    refused: ClassVar[Refused] = {
        **OpenAIFields.refused,
        "messages": ((), "Responses call it `input`."),
        "max_tokens": ((), "Responses call it `max_output_tokens`."),
        "max_completion_tokens": ((), "Responses call it `max_output_tokens`."),
        "response_format": ((), "Responses call it `text.format`."),
        "reasoning_effort": ((), "Responses call it `reasoning.effort`."),
        "logprobs": ((False,), f'Responses call it `include`: ["{LOGPROBS}"].'),
        "n": ((1,), "A response has one answer."),
        "stop": (([],), "Responses have no stop strings; `stop_token_ids` are served."),
        "access_programs": ((), "There are no access programs."),
        "background_options": (({}, {"completion_window": "soonest"}), "Background work begins at once."),
        "context_management": (([],), "The context is not managed: send what the model shall read."),
        "conversation": ((), "There are no conversation objects; use `previous_response_id`."),
        "image": (({},), "Input and answers are text."),
        "moderation": ((), "There is no moderation."),
        "prompt": ((), "There are no stored prompt templates."),
    }
    deep: ClassVar[frozenset[str]] = frozenset(
        {
            "nvext", "stream_options", "chat_template_args", "chat_template_kwargs", "reasoning", "text",
            "tools", "tool_choice", "structured_outputs",
        }
    )  # fmt: skip

    # Its items are read by `frontend.responses.given`.
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
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None
