"""What is sent to etcd, and when: keys, endpoints, messages, renewals."""

import asyncio

import msgspec
import pytest

from baton.discovery import MAX_WORKERS, decode_worker
from baton.etcd import EtcdDiscovery, _Registration, instance_key
from baton.etcd_rpc import _MESSAGES, EtcdError, _target, prefix_end
from baton.telemetry import unauthenticated
from tests.clock import jumping
from tests.registry import worker


def test_a_key_is_made_from_the_endpoint_and_the_worker_id() -> None:
    assert instance_key(worker("p0")) == b"v1/instances/dynamo/prefill/generate/p0"


def test_a_worker_id_cannot_leave_its_place_in_the_key() -> None:
    assert instance_key(worker("../a b")) == b"v1/instances/dynamo/prefill/generate/..%2Fa%20b"


@pytest.mark.parametrize("namespace", ["", "a/b", "a.b"])
def test_an_endpoint_of_another_form_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="not an endpoint"):
        instance_key(worker("p0", namespace=namespace))


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


@pytest.mark.parametrize("endpoint", ["", "localhost:2379", "ftp://x:1", "http://", "http://x:1/path"])
def test_what_is_no_endpoint_is_refused_with_the_form_to_write(endpoint: str) -> None:
    with pytest.raises(ValueError, match="use http://host:port"):
        _target(endpoint)


def test_a_prefix_ends_before_its_next_neighbour() -> None:
    assert prefix_end(b"v1/instances/") == b"v1/instances0"


def test_messages_have_etcds_field_numbers() -> None:
    put = _MESSAGES["PutRequest"](key=b"k", value=b"v", lease=300)
    assert put.SerializeToString() == b"\x0a\x01k\x12\x01v\x18\xac\x02"
    create = _MESSAGES["WatchRequest"](create_request={"key": b"k", "start_revision": 5})
    assert create.SerializeToString() == b"\x0a\x05\x0a\x01k\x18\x05"


def test_fields_of_a_newer_etcd_are_ignored() -> None:
    reply = _MESSAGES["LeaseGrantResponse"].FromString(b"\x10\x07\x18\x0a\x9a\x06\x02hi")
    assert (reply.ID, reply.TTL) == (7, 10)


def test_a_registration_is_read_up_to_64_kib() -> None:
    written = msgspec.json.encode(worker("p0"))
    assert decode_worker(written.ljust(64 * 1024), "here") == worker("p0")
    assert decode_worker(written.ljust(64 * 1024 + 1), "here") is None
    assert MAX_WORKERS == 4096


@pytest.mark.parametrize(
    "junk", [b"x" * 70_000, b"", b"{", b"{}", b"[" * 60_000, b'"\xff"', b"null", b'{"x": ' + b"[" * 60_000]
)
def test_what_is_no_registration_is_skipped_and_counted(junk: bytes) -> None:
    num_before = unauthenticated.num_messages
    assert decode_worker(junk, "here") is None
    assert unauthenticated.num_messages == num_before + 1


class Lease(_Registration):
    """A lease whose first renewal fails; records when it is renewed."""

    def __init__(self) -> None:
        self.renewed_s: list[float] = []

    async def hold(self) -> None:
        self.renewed_s.append(asyncio.get_running_loop().time())
        if len(self.renewed_s) == 1:
            raise EtcdError("unreachable")


@jumping
async def test_a_lease_that_could_not_be_renewed_is_tried_again_soon() -> None:
    lease = Lease()
    keeping = asyncio.create_task(EtcdDiscovery("http://none", lease_ttl_s=30)._keep(lease))  # noqa: SLF001  the leases of real servers take as long
    await asyncio.sleep(25)
    keeping.cancel()
    assert lease.renewed_s == pytest.approx([10, 10.5, 20.5])
