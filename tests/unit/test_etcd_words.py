"""What is sent to etcd, and when: keys, endpoints, messages, renewals."""

import msgspec
import pytest

from baton.discovery import decode_worker
from baton.etcd import instance_key
from baton.etcd_rpc import _target
from tests.registry import worker


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


@pytest.mark.parametrize("fields", [{"name": "a b"}, {"name": "a\n"}, {"host": "a\x1b[2J"}, {"pid": -1}])
def test_a_registration_whose_name_would_spoil_a_page_is_skipped(fields: dict[str, object]) -> None:
    assert decode_worker(msgspec.json.encode(worker("p0")), "here") == worker("p0")
    assert decode_worker(msgspec.json.encode(msgspec.structs.replace(worker("p0"), **fields)), "here") is None
