"""Request fields shared by several APIs, and the types of their values."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import AnswerFormat, ReasoningEffort, Tool

T = TypeVar("T")

Refused = Mapping[str, tuple[tuple[object, ...], str]]
"""Fields that an API defines and Baton does not support: (values accepted as no-ops, what to do instead).
`null` is always accepted."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Repetition = Annotated[float, msgspec.Meta(gt=0, le=10)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopText = Annotated[str, msgspec.Meta(min_length=1)]
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=32)]  # evaluation harnesses send many
TokenName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}$")]
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
FormatName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
JsonSchema = dict[str, Any] | str
GrammarText = Annotated[str, msgspec.Meta(min_length=1)]
GrammarChoices = Annotated[list[GrammarText], msgspec.Meta(min_length=1)]
AnyEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The nearest effort that gpt-oss has; it cannot turn reasoning off.
NEAREST_EFFORT: dict[AnyEffort, ReasoningEffort] = {
    "none": "low", "minimal": "low", "low": "low", "medium": "medium",
    "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip


class GuidedFields(msgspec.Struct, kw_only=True):
    """vLLM's older names for structured outputs. `guided_json` is a schema, as an object or a JSON string;
    `guided_grammar` is EBNF if it contains `::=`, else Lark."""

    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: GrammarChoices | None = None
    guided_grammar: GrammarText | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's newer names for structured outputs."""

    json: JsonSchema | None = None
    regex: GrammarText | None = None
    choice: GrammarChoices | None = None
    grammar: GrammarText | None = None


class Nvext(GuidedFields, kw_only=True):
    """NVIDIA's extensions; each overrides the top-level field of the same name."""

    ignore_eos: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: Repetition | None = None
    greed_sampling: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer. `include_timings`, an extension, adds the time spent in each stage to the
    chunk with the usage, which comes with either."""

    hints: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    include_timings: bool | None = None


class CommonFields(GuidedFields, kw_only=True):
    """Fields common to OpenAI's APIs. `top_k` 0 or -1 turns it off; queued requests with a lower `priority`
    value run first; prompts with different `cache_salt`, or of different API keys, share no cached KV.
    `ignore_eos`, `min_tokens`, `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `priority` and
    `cache_salt` are extensions, under NVIDIA's and vLLM's names. The hints have no effect."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
            "service_tier", "verbosity", "truncation", "client_metadata",
        }
    )  # fmt: skip

    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[TokenName, Bias] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    nvext: Nvext | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest.at("stream_options", "needs `stream`: true.")

    @property
    def ignores_eos(self) -> bool:
        nested = None if self.nvext is None else self.nvext.ignore_eos
        return first_given(nested, self.ignore_eos, default=False)


class TemplateArgs(msgspec.Struct, kw_only=True):
    """Arguments of the chat template."""

    reasoning_effort: AnyEffort | None = None


class ConversationFields(CommonFields, kw_only=True):
    """Fields of chat completions and responses. Arguments of the chat template have two names."""

    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None

    def effort_of(self, given: AnyEffort | None) -> AnyEffort:
        """The first effort given, else medium."""
        template = filter(None, (self.chat_template_args, self.chat_template_kwargs))
        return first_given(given, *(each.reasoning_effort for each in template), default="medium")

    @property
    def max_calls(self) -> int | None:
        """The limit of calls in an answer."""
        return 1 if self.parallel_tool_calls is False else None


def first_given(*values: T | None, default: T) -> T:
    """The first value that is not None."""
    for value in values:
        if value is not None:
            return value
    return default


def required(value: T | None, path: str) -> T:
    """The value of the field at `path`. Raises InvalidRequest if it is missing."""
    if value is None:
        raise InvalidRequest.at(path, "is missing.")
    return value


ANY_OBJECT = {"type": "object"}
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
TEXT_TYPES = frozenset({"text", "input_text", "output_text", "reasoning_text"})


class Part(msgspec.Struct, kw_only=True):
    """A content part: text of any type, a refusal, or what this model cannot read, such as an image."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part]


def note(kind: str, place: str, left_out: set[str]) -> str:
    """What the prompt has instead of content of this kind, such as an image, which is added to `left_out`."""
    left_out.add(f"{place}.{kind}"[:80])
    return f"[{kind[:40]} left out: this model reads text only]"


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that an API defines and the client runs, such as `shell`: a function for the model. `properties`
    are the schemas of its arguments, which are enforced."""

    description: str
    properties: Mapping[str, object]
    required: Sequence[str]

    def function(self, name: str, path: str) -> Tool:
        parameters = {
            "type": "object",
            "properties": self.properties,
            "required": self.required,
            "additionalProperties": False,
        }
        return Tool(name=name, description=self.description, parameters=parameters, strict=True, path=path)


def text_of_part(part: Part, path: str, place: str, left_out: set[str] | None) -> str:
    """The text of a content part. What is not text is refused or replaced by a `note`. Raises InvalidRequest,
    also if the part's field is missing."""
    if part.type == "refusal":
        return required(part.refusal, f"{path}.refusal")
    if part.type in TEXT_TYPES:
        return required(part.text, f"{path}.text")
    if left_out is not None:
        return note(part.type, place, left_out)
    raise InvalidRequest.at(
        f"{path}.type", f"{part.type!r:.80} is not supported; this model reads text only: send 'text'."
    )


class TextFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Output format: any text."""


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_object"):
    """Output format: any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema and its name in the prompt."""

    name: FormatName
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that follows a schema; without `strict`, some keywords may be ignored."""

    json_schema: NamedSchema


def answer_format(
    given: TextFormat | JsonObjectFormat | JsonSchemaFormat | NamedSchema | None, path: str
) -> AnswerFormat | None:
    """The format that the field at `path` demands; without a schema, any JSON object."""
    match given:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return AnswerFormat(schema=ANY_OBJECT, path=path)
        case JsonSchemaFormat(json_schema=named):
            return answer_format(named, f"{path}.json_schema")
        case NamedSchema(schema=schema):
            return AnswerFormat(
                schema=ANY_OBJECT if schema is None else schema,
                name=None if schema is None else given.name,
                description=given.description,
                strict=bool(given.strict),
                path=f"{path}.schema",
            )
