"""The Messages API's response bodies, in Anthropic's shapes."""

from typing import Any, Literal

import msgspec

from baton.errors import BatonError
from frontend.messages.thread import ThreadNotFound
from frontend.text.served import ContextTooLong

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Visible text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning text and its signature, which must be sent back unchanged."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call that the model requests."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. `input_tokens` excludes cached tokens; the end of a stream has no `service_tier`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    service_tier: Literal["standard"] | msgspec.UnsetType = "standard"


class MessageObject(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/messages`, unless streamed."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ErrorCause(msgspec.Struct, kw_only=True):
    """The cause of an error that Anthropic's SDKs recover from."""

    error_code: Literal["thread_not_found"]


class MessagesErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error: Anthropic's type, a message, and for some errors the cause."""

    type: str
    message: str
    details: ErrorCause | None = None


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every error response of the Messages API."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"

    @classmethod
    def of(cls, error: BatonError) -> "MessagesError":
        """The envelope of an error. Claude Code compacts a conversation only if it is told so in Anthropic's
        words."""
        message = error.message
        if isinstance(error, ContextTooLong):
            message = f"prompt is too long: {message}"
        cause = ErrorCause(error_code="thread_not_found") if isinstance(error, ThreadNotFound) else None
        return cls(error=MessagesErrorDetail(type=_kind(error.status), message=message, details=cause))


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _kind(status: int) -> str:
    return _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
