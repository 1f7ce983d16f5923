"""What the bindings of Dynamo's runtime raise, as Baton's errors."""

import re

import msgspec

from baton.errors import (
    BatonError,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.messages import UNDECODABLE, WorkerInfo

_MAX_TEXT = 500
_UNREACHED = "not found for endpoint|TCP connection|before response stream was established"
_LOST = "worker {worker} was lost: {reason}"
_FAILED = "Worker {worker} failed on this request: {reason}."
_ERRORS: tuple[tuple[str, type[BatonError], str], ...] = (
    ("InvalidRequest|InvalidArgument", InvalidRequest, "The engine refuses the request: {reason}."),
    (f"Unavailable: .*({_UNREACHED})", WorkerUnreached, _LOST),
    # Without an answer from the worker's process; the request has a deadline of its own.
    ("Unavailable|DeadlineExceeded|Cancelled", WorkerLost, _LOST),
    ("RateLimited|ResourceExhausted|CapacityExhausted", Overloaded, _FAILED),
    ("", EngineFailure, _FAILED),
)
"""By the beginning of the text, since the bindings raise ValueError for nearly all; the first one counts."""


class _HttpError(msgspec.Struct):
    message: str


def error_of(error: Exception, worker: WorkerInfo, *, has_handoff: bool) -> BatonError:
    """What ended a call. A worker that refuses a request with a handoff refuses the handoff."""
    text = re.sub("^(ValueError|Exception): ", "", f"{type(error).__name__}: {error}")
    _, kind, sentence = next(each for each in _ERRORS if re.match(each[0], text))
    if kind is InvalidRequest and has_handoff:
        kind, sentence = HandoffFailed, _FAILED
    name, _, said = text.partition(": ")
    try:
        said = msgspec.json.decode(said, type=_HttpError).message  # Dynamo's HttpError
    except UNDECODABLE:
        said = re.sub("^(ValueError|TypeError): ", "", said)
    return kind(sentence.format(worker=worker.label, reason=first_line(said or name)))


def first_line(text: str) -> str:
    """The first line of an engine's text, without the period at its end."""
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[0][:_MAX_TEXT].rstrip(". ")
