"""What is sent to etcd, and when: keys, endpoints, messages, renewals."""

import pytest

from baton.discovery import decode_worker
from baton.etcd import instance_key
from baton.etcd_rpc import _target
from baton.telemetry import unauthenticated
from tests.registry import worker


def test_a_key_is_made_from_the_endpoint_and_the_worker_id() -> None:
    assert instance_key(worker("p0")) == b"v1/instances/dynamo/prefill/generate/p0"


def test_a_worker_id_cannot_leave_its_place_in_the_key() -> None:
    assert instance_key(worker("../a b")) == b"v1/instances/dynamo/prefill/generate/..%2Fa%20b"


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("http://localhost:2379", ("localhost:2379", False)),
        (" https://etcd.example:443/ ", ("etcd.example:443", True)),
        ("http://etcd", ("etcd:2379", False)),
        ("http://[::1]:2379", ("[::1]:2379", False)),
    ],
)
def test_an_endpoint_becomes_a_grpc_target(endpoint: str, target: tuple[str, bool]) -> None:
    assert _target(endpoint) == target


@pytest.mark.parametrize(
    "junk", [b"x" * 70_000, b"", b"{", b"{}", b"[" * 60_000, b'"\xff"', b"null", b'{"x": ' + b"[" * 60_000]
)
def test_what_is_no_registration_is_skipped_and_counted(junk: bytes) -> None:
    num_before = unauthenticated.num_messages
    assert decode_worker(junk, "here") is None
    assert unauthenticated.num_messages == num_before + 1
