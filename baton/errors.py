"""The error tree: each error's code and HTTP status."""

from typing import ClassVar

import msgspec

_BY_CODE: dict[str, type["BatonError"]] = {}
_KINDS = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error on the wire; `code` selects the class on the receiving side."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class BatonError(Exception):
    """Base class. `message` is one sentence that tells the user what to do.

    `status` is the HTTP status, `param` the offending field, if any."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    default: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: str = "", status: int = 0) -> None:
        if code:
            cls.code = code
            if cls.__module__ == __name__:
                _BY_CODE[code] = cls
        if status:
            cls.status = status

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.message = message or self.default
        super().__init__(self.message)
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's `error.type`, which follows from the status."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_wire(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s
        )


class InvalidRequest(BatonError, code="invalid_request", status=400):
    """The request is invalid; retrying it does not help."""

    @classmethod
    def at(cls, path: str, what: str) -> "InvalidRequest":
        """What is wrong with the field at `path`."""
        return cls(f"`{path}` {what}", param=path)


class ModelNotFound(BatonError, code="model_not_found", status=404):
    """No worker serves a model with this name."""


class Overloaded(BatonError, code="overloaded", status=429):
    """Every queue that could take the request is full; retry after `retry_after_s`."""


class NoWorkers(BatonError, code="no_workers", status=503):
    """No live worker has the role that the request needs."""


class NotReady(BatonError, code="not_ready", status=503):
    """The process is starting or draining and accepts no new requests."""


class WorkerLost(BatonError, code="worker_lost", status=502):
    """The worker died or became unreachable during the request. `is_silent`: nothing came from it for the
    liveness limit, which may be the network's fault."""

    is_silent = False


class WorkerUnreached(WorkerLost):
    """The worker was gone before it got the request."""


class BrokerLost(BatonError, code="broker_unavailable", status=503):
    """The request plane's broker is unreachable. That says nothing about the workers behind it."""


class HandoffFailed(BatonError, code="handoff_failed", status=502):
    """The KV cache did not reach the decode worker: it expired or was refused, or its source died."""


class HandoffStalled(HandoffFailed, code="handoff_stalled"):
    """No KV reaches the decode worker: both workers may be healthy, but not the network between them."""


class DeadlineExceeded(BatonError, code="deadline_exceeded", status=504):
    """The request's deadline was exceeded."""

    default = "The request exceeded its deadline (the server's --request-timeout-s)."


class EngineFailure(BatonError, code="engine_failure", status=500):
    """The engine failed on this request, but keeps running; a dead engine is WorkerLost."""


class NotResumable(EngineFailure, code="not_resumable"):
    """The engine cannot go on in the middle of this answer; it may make it again from its beginning."""


def from_wire(info: ErrorInfo) -> BatonError:
    """The exception for `info`; an unknown code, from a newer peer, becomes a plain BatonError."""
    cls = _BY_CODE.get(info.code, BatonError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
