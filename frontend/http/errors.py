"""HTTP error responses: OpenAI's envelope, Retry-After, and the mapping of unexpected exceptions."""

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from baton.errors import BatonError, DeadlineExceeded

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error: message, OpenAI's type, the path of the offending field, Baton's code."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every error response."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: BatonError) -> "ErrorBody":
        """The envelope of an error."""
        return cls(
            error=ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
        )


Envelope = Callable[[BatonError], msgspec.Struct]
"""Builds an API's error body."""


class BodyTooLarge(BatonError):
    """The body exceeds the size limit."""

    code = "body_too_large"
    status = 413
    kind = "invalid_request_error"


class EncodedBody(BatonError):
    """The body has a content encoding, such as gzip."""

    code = "unsupported_encoding"
    status = 415
    kind = "invalid_request_error"


def as_baton_error(error: Exception, request_id: str) -> BatonError:
    """The error for the client; unexpected exceptions are logged with their traceback."""
    match error:
        case BatonError():
            return error
        case TimeoutError():
            return DeadlineExceeded()
        case _:
            log.error("unexpected failure request_id=%s", request_id, exc_info=error)
            return BatonError(f"Internal server error; see the server's log for request {request_id}.")


def error_headers(error: BatonError) -> Headers:
    """401: how to authenticate. 429 and 503: Retry-After in whole seconds, rounded up, at least 1."""
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if error.status not in {429, 503}:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1)))]
