"""Errors as HTTP shows them: OpenAI's envelope, Retry-After, and what a client is told of the unforeseen."""

import logging
from collections.abc import Callable, Sequence

import msgspec

from baton.errors import BatonError, DeadlineExceeded

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]


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


Envelope = Callable[[BatonError], msgspec.Struct]
"""An error in the shape of an API."""


class BodyTooLarge(BatonError):
    """The body is larger than this server reads."""

    code = "body_too_large"
    status = 413
    kind = "invalid_request_error"


class EncodedBody(BatonError):
    """The body is compressed, or encoded in another way."""

    code = "unsupported_encoding"
    status = 415
    kind = "invalid_request_error"


def as_baton_error(error: Exception, request_id: str) -> BatonError:
    """What the client is told; a failure that nobody foresaw is logged with its traceback."""
    match error:
        case BatonError():
            return error
        case TimeoutError():
            return DeadlineExceeded()
        case _:
            log.error("unexpected failure request_id=%s", request_id, exc_info=error)
            return BatonError(f"Something broke in the server; its log has request {request_id}.")


def retry_after(error: BatonError) -> Headers:
    """The Retry-After header of 429 and 503: whole seconds, 1 at least."""
    if error.status not in {429, 503}:
        return []
    return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s or 1)))]
