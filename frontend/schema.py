"""The request bodies of the chat and completion APIs, as msgspec structs that validate what they decode."""

from typing import Annotated, Any, Literal

import msgspec

MAX_STOPS = 4

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopText = Annotated[str, msgspec.Meta(min_length=1)]
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)]
TokenName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}$")]
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
Effort = Literal["low", "medium", "high"]


class Nvext(msgspec.Struct, kw_only=True):
    """NVIDIA's extensions; each wins over the top-level field of the same name."""

    ignore_eos: bool | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    greed_sampling: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What all APIs say about choosing tokens. `top_k` 0 or -1 is off; of requests that wait, those of a
    smaller `priority` are served first. `ignore_eos`, `min_tokens`, `top_k`, `min_p`, `repetition_penalty`,
    `stop_token_ids`, `priority` are extensions, named as NVIDIA's and vLLM's do."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    logit_bias: dict[TokenName, Bias] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    nvext: Nvext | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChoiceFields(SamplingFields, kw_only=True):
    """What the chat and completion APIs say besides: how long an answer is, where it stops, how many there
    are."""

    max_tokens: Count | None = None
    n: Count | None = None
    stop: StopText | StopTexts | None = None


class Part(msgspec.Struct, kw_only=True):
    """A content part; of all types only `text` (and `refusal` in the history) is served."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part]


class SystemMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="system"):
    """Instructions, under their older name."""

    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="developer"):
    """Instructions."""

    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="user"):
    """What the user said."""

    content: Content
    name: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function a call names, and its arguments as text, valid JSON or not."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call that an earlier answer made."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer, in the shape in which this server gives it."""

    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    name: str | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="tool"):
    """What a tool returned."""

    tool_call_id: str
    content: Content
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is its JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool; only functions are served."""

    function: FunctionTool
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """A function that is meant by its name."""

    name: str


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """`tool_choice`: this function must be called."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, kw_only=True):
    """One of the functions that may be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    """The functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: the prompt shows all tools, but only these may be called."""

    allowed_tools: AllowedTools


class TextFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """`response_format`: any text."""


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_object"):
    """`response_format`: some JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema with the name under which the prompt shows it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that follows a schema; unless `strict`, as far as it can be enforced."""

    json_schema: NamedSchema


class TemplateArgs(msgspec.Struct, kw_only=True):
    """What the chat template takes."""

    reasoning_effort: Effort | None = None
    model_identity: str | None = None


class ChatBody(ChoiceFields, kw_only=True):
    """`POST /v1/chat/completions`. Extensions: `chat_template_args` (also spelled `chat_template_kwargs`) and
    `include_reasoning`, which says whether reasoning text is given to the client."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: Effort | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None
    include_reasoning: bool | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    metadata: Metadata | None = None


class CompletionBody(ChoiceFields, kw_only=True):
    """`POST /v1/completions`: raw text or token ids; a list of either gives `n` choices for each.

    Control tokens written in a text prompt are taken as such; those of the answer are left out of its text
    unless `skip_special_tokens` is false. `max_tokens` is 16 unless given, as OpenAI's.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    skip_special_tokens: bool | None = None
