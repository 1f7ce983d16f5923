"""The bodies of answers: chat completions, completions, models, errors, in OpenAI's shapes."""

import importlib.metadata
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.errors import BatonError

SYSTEM_FINGERPRINT = f"baton-{importlib.metadata.version('baton')}"

ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, kw_only=True):
    """Of the prompt tokens: those whose KV was found in a cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Of the completion tokens: those of the reasoning."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts of a whole answer; a prompt that several choices share counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(
        cls, num_prompt: int, num_completion: int, *, num_cached: int, num_reasoning: int = 0
    ) -> "UsageBody":
        """The counts as they stand in an answer."""
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
            prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
        )


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens; `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A token of the visible text, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the visible text."""

    content: list[ContentLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The called function; `arguments` is the text that the model wrote."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. `reasoning` and `reasoning_content` are the same text, under the names of two clients."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChoiceBody(msgspec.Struct, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: ChatFinish
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/chat/completions` that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] = "default"
    metadata: dict[str, str] | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities as parallel lists; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoiceBody(msgspec.Struct, kw_only=True):
    """One answer; `finish_reason` is null in a stream until the last."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: LegacyLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"


class ModelBody(msgspec.Struct, kw_only=True):
    """A served model; `context_length` is in tokens, prompt and answer together."""

    id: str
    created: int
    context_length: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    data: list[ModelBody]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong: a sentence, OpenAI's kind, the offending field, Baton's code."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every answer that is not a success."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: BatonError) -> "ErrorBody":
        """The envelope of an error."""
        return cls(
            error=ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
        )


class ContextTooLong(BatonError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"
    status = 400
    kind = "invalid_request_error"


class BodyTooLarge(BatonError):
    """The body is larger than this server reads."""

    code = "body_too_large"
    status = 413
    kind = "invalid_request_error"
