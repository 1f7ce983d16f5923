"""The body of a chat completion, in OpenAI's shape."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from frontend.turn.choice import FinishReason
from frontend.turn.logprobs import ContentLogprob
from frontend.turn.usage import UsageBody


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the visible text."""

    content: list[ContentLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The called function; `arguments` is the text that the model wrote."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A call that the model asks for."""

    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct, kw_only=True):
    """The called custom tool and its input."""

    name: str
    input: str


class CustomCallBody(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool that the model asks for."""

    id: str
    custom: CustomCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. `reasoning` and `reasoning_content` are the same text, under the names of two clients."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody | CustomCallBody] | UnsetType = UNSET


class ChatChoiceBody(msgspec.Struct, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
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
