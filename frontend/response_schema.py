"""The request body of the Responses API, as msgspec structs that validate what they decode."""

from typing import Annotated, Any, Literal

import msgspec

from frontend.schema import (
    Count,
    Effort,
    FunctionName,
    JsonObjectFormat,
    Metadata,
    NamedSchema,
    SamplingFields,
    TemplateArgs,
    TextFormat,
    TopLogprobs,
)

LOGPROBS = "message.output_text.logprobs"
# What can be asked to be included, all but the first of parts that no answer of this server has: reasoning is
# given as plain `content`, and taken back as such.
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


class Reasoning(msgspec.Struct, kw_only=True):
    """How much to think. There are no summaries: `auto` gets none, as the answer says."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class SchemaFormat(NamedSchema, kw_only=True, tag_field="type", tag="json_schema"):
    """`text.format`: JSON that follows a schema; unless `strict`, as far as it can be enforced."""


class TextConfig(msgspec.Struct, kw_only=True):
    """What is asked of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool; of all types only `function` is served. `parameters` is its JSON schema."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None


class FunctionByName(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """`tool_choice`: this function must be called."""

    name: str


class AllowedFunction(msgspec.Struct, kw_only=True):
    """One of the functions that may be called."""

    name: str
    type: Literal["function"] = "function"


class FunctionsByName(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: the prompt shows all tools, but only these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], msgspec.Meta(min_length=1)]


class ResponseBody(SamplingFields, kw_only=True):
    """`POST /v1/responses`. Extensions are the chat API's, under the same names."""

    # Its items are read by `frontend.response_items`.
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionByName | FunctionsByName | None = None
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
