"""The error tree: what each error is for a client, and on the wire."""

import pytest

from baton import errors
from baton.errors import BatonError, ErrorInfo, from_wire

# class: code, HTTP status, OpenAI's type
TREE: dict[str, tuple[str, int, str]] = {
    "BatonError": ("internal_error", 500, "server_error"),
    "InvalidRequest": ("invalid_request", 400, "invalid_request_error"),
    "ModelNotFound": ("model_not_found", 404, "invalid_request_error"),
    "Overloaded": ("overloaded", 429, "rate_limit_error"),
    "NoWorkers": ("no_workers", 503, "service_unavailable_error"),
    "NotReady": ("not_ready", 503, "service_unavailable_error"),
    "WorkerLost": ("worker_lost", 502, "server_error"),
    "WorkerUnreached": ("worker_lost", 502, "server_error"),
    "BrokerLost": ("broker_unavailable", 503, "service_unavailable_error"),
    "HandoffFailed": ("handoff_failed", 502, "server_error"),
    "HandoffStalled": ("handoff_stalled", 502, "server_error"),
    "DeadlineExceeded": ("deadline_exceeded", 504, "timeout_error"),
    "EngineFailure": ("engine_failure", 500, "server_error"),
    "NotResumable": ("not_resumable", 500, "server_error"),
}


def test_each_error_has_its_code_status_and_type() -> None:
    found = {
        name: (each.code, each.status, each().kind)
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, BatonError)
    }
    assert found == TREE


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_the_same_after_the_wire(name: str) -> None:
    kind: type[BatonError] = getattr(errors, name)
    received = from_wire(kind("why", param="top_p", retry_after_s=2.5).to_wire())

    assert type(received).__name__ == ("WorkerLost" if name == "WorkerUnreached" else name)
    assert (str(received), received.param, received.retry_after_s) == ("why", "top_p", 2.5)


def test_an_error_of_a_newer_peer_is_an_internal_one() -> None:
    received = from_wire(ErrorInfo(code="from_the_future", message="why", param="n", retry_after_s=1.0))

    assert type(received) is BatonError
    assert received.to_wire() == ErrorInfo(code="internal_error", message="why", param="n", retry_after_s=1.0)


def test_a_deadline_has_a_message_of_its_own() -> None:
    assert "--request-timeout-s" in errors.DeadlineExceeded().message
