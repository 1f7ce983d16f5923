"""Networks that lose packets without closing a connection: short gaps, and no answer changes.

Where there is no root, `tests/contract/test_transport_faults.py` cuts one connection, with a relay."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.answers import Stream, num_attempts, read_all, whole_answer
from tests.network import Network, why_not
from tests.stack import Process, Stack
from tests.waiting import FAILOVER_S, wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with closing(Network("prefill", "decode-1", "decode-2")) as network:
        yield network


@pytest.fixture(scope="module")
def stack(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The frontend `here`, and the hosts prefill, decode-1 and decode-2 with a worker each."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        del stack.environ["BATON_LIVENESS_S"]
        stack.frontend()
        for name in ("prefill", "decode-1", "decode-2"):
            stack.environ["BATON_HOST"], stack.prefix = network.hosts[name]
            stack.worker(name.partition("-")[0], name=name)
        stack.wait_ready(1, 2)
        yield stack


def heal(stack: Stack, network: Network) -> None:
    """Everything works again, after packets were dropped."""
    assert network.heal() > 0
    stack.wait_ready(1, 2)
    stack.wait_idle()


def test_a_decode_worker_that_is_cut_off_is_replaced(stack: Stack, network: Network) -> None:
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(4)]  # round-robin: two on each

    network.cut("decode-1")

    assert read_all(streams, expected) < FAILOVER_S
    heal(stack, network)


@pytest.mark.slow
def test_with_a_fifth_of_all_packets_lost_streams_lose_nothing(stack: Stack, network: Network) -> None:
    expected = whole_answer(stack, 400)
    streams = [Stream(stack, 400).read(3) for _ in range(16)]

    network.harm("lose", 0.2)

    read_all(streams, expected)
    heal(stack, network)


def test_without_a_path_from_prefill_to_decode_the_decode_worker_prefills(
    stack: Stack, network: Network
) -> None:
    expected = whole_answer(stack)
    network.cut("prefill", "decode-1", "decode-2")

    streams = [Stream(stack) for _ in range(4)]

    assert read_all(streams, expected) < FAILOVER_S
    failed = stack.get("/requests?failed=4").json()["requests"]
    verdicts = {(each["verdict"]["stage"], each["verdict"]["cause"].split()[0]) for each in failed}
    assert verdicts == {("kv_move", "no")}  # no KV came from ... to ...
    stalled_s = [sum(each["record"]["legs"][0]["attempts"][0]["stages"].values()) for each in failed]
    assert [each["verdict"]["excess_s"] for each in failed] == pytest.approx(stalled_s, rel=0.2, abs=0.1)
    assert len(stack.health()["cut_pairs"]) == 2
    assert len(stack.health()["instances"]) == 3
    assert [num_attempts(stack, f"prompt {i}") for i in range(2)] == [1, 1]  # no pull is tried
    heal(stack, network)


@pytest.mark.slow
def test_a_pair_hands_over_again_when_its_network_works(stack: Stack, network: Network) -> None:
    network.cut("prefill", "decode-1", "decode-2")
    for _ in range(2):
        whole_answer(stack, 5)
    assert len(stack.health()["cut_pairs"]) == 2

    network.heal()
    wait_for(lambda: not stack.health()["cut_pairs"])

    num_moved = stack.gauge("baton_handoffs_total")
    assert whole_answer(stack, prompt="moved again")
    assert stack.gauge("baton_handoffs_total") > num_moved


@pytest.mark.slow
def test_streams_outlive_a_network_that_cuts_the_frontend_off_from_nats(tmp_path: Path) -> None:
    network = Network("nats", "workers")
    nats, workers = network.hosts["nats"], network.hosts["workers"]
    environ = {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": f"nats://{nats.address}:4222"}
    with closing(network), Stack(tmp_path, environ) as stack:
        server = [*nats.prefix, "nats-server", "-a", nats.address]
        stack.processes.append(Process("nats", server, tmp_path / "nats.log", stack.environ))
        frontend = stack.frontend()
        stack.environ["BATON_HOST"], stack.prefix = workers
        for role in ("prefill", "decode", "decode"):
            stack.worker(role)
        stack.wait_ready(1, 2)
        expected = whole_answer(stack)
        streams = [Stream(stack).read(1 + i) for i in range(4)]

        network.cut("nats", "here")
        wait_for(lambda: "plane=unreachable" in frontend.text())
        assert network.heal() > 0

        read_all(streams, expected)
        stack.wait_idle()
