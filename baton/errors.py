"""Every failure a user can meet: its code, its HTTP status, and whether another worker may be tried."""

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels: `code` picks the class on the other side."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class BatonError(Exception):
    """Base of the tree. `message` is one sentence that tells the user what to do.

    `status` is the HTTP status, `kind` OpenAI's `error.type`, `param` the offending field if there is one.
    `retryable` says that the same request may succeed on another worker.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> ErrorInfo:
        """The struct that crosses the process boundary."""
        return ErrorInfo(
            code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s
        )


class InvalidRequest(BatonError):
    """The request itself is wrong; sending it again changes nothing."""

    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class ModelNotFound(BatonError):
    """No worker serves a model of this name."""

    code = "model_not_found"
    status = 404
    kind = "invalid_request_error"


class Overloaded(BatonError):
    """Every queue that could take the request is full; `retry_after_s` says when to come back."""

    code = "overloaded"
    status = 429
    kind = "rate_limit_error"
    retryable = True


class NoWorkers(BatonError):
    """No live worker has the role that the request needs."""

    code = "no_workers"
    status = 503
    kind = "service_unavailable_error"


class NotReady(BatonError):
    """The process is still starting, or draining: it takes no new requests."""

    code = "not_ready"
    status = 503
    kind = "service_unavailable_error"
    retryable = True


class WorkerLost(BatonError):
    """The worker died or became unreachable while it held the request."""

    code = "worker_lost"
    status = 502
    retryable = True


class HandoffFailed(BatonError):
    """The KV cache did not arrive at the decode worker: expired, refused, or the source is gone."""

    code = "handoff_failed"
    status = 502
    retryable = True


class DeadlineExceeded(BatonError):
    """The request's time is over."""

    code = "deadline_exceeded"
    status = 504
    kind = "timeout_error"

    def __init__(
        self,
        message: str = "The request's deadline is over; ask for less, or allow more time.",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class EngineFailure(BatonError):
    """The engine failed on this request, and lives on; with a dead engine, it is WorkerLost."""

    code = "engine_failure"
    status = 500


_BY_CODE: dict[str, type[BatonError]] = {
    cls.code: cls
    for cls in (
        BatonError, InvalidRequest, ModelNotFound, Overloaded, NoWorkers, NotReady, WorkerLost,
        HandoffFailed, DeadlineExceeded, EngineFailure,
    )
}  # fmt: skip


def from_wire(info: ErrorInfo) -> BatonError:
    """The exception that `to_wire` described; an unknown code (a newer peer) becomes plain BatonError."""
    cls = _BY_CODE.get(info.code, BatonError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
