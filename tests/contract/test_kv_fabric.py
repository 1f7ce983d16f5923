"""UCX reads, polled by the test itself: which peers are kept, what ends, when polling may stop."""

import asyncio
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.alive import Newborn
from tests.kv_peer import needs_nixl, pattern
from tests.waiting import PATIENCE_S
from workers.kv.direct import Direct, Fabric, Read
from workers.kv.memory import NoDirectPath, host_memory
from workers.kv.transceiver import CacheTransceiver
from workers.kv.ucx import Agent

pytestmark = needs_nixl
NUM_BYTES = 4096


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    """Three sources and a reader that keeps two peers."""
    made = [Fabric("127.0.0.1", max_peers=2) for _ in range(4)]
    for fabric in made:
        fabric.open()
    yield made
    for fabric in made:
        fabric.close()


def ended(read: Read, *fabrics: Fabric) -> BaseException | None:
    """Poll until the read has ended; returns its error."""
    give_up = time.monotonic() + PATIENCE_S
    while not read.ended.done():
        assert time.monotonic() < give_up
        for fabric in fabrics:
            fabric.poll()
    return read.ended.exception()


def test_a_source_with_new_registrations_is_met_again(fabrics: list[Fabric]) -> None:
    source, *_, reader = fabrics
    payload, into = host_memory(pattern(NUM_BYTES, 1)), host_memory(bytearray(NUM_BYTES))
    source.lend()
    first = source.reach(payload)
    for reach in (first, first, msgspec.structs.replace(first, epoch=first.epoch + 1)):
        read = Read(reach, into)
        reader.begin(read)
        assert ended(read, source, reader) is None
    (peer,) = reader._peers.values()  # noqa: SLF001  nothing public tells
    assert peer.epoch == first.epoch + 1


def test_every_read_that_has_ended_is_released(
    fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[object] = []
    release = Agent.release

    def noted(agent: Agent, handle: object) -> None:
        released.append(handle)
        release(agent, handle)

    monkeypatch.setattr(Agent, "release", noted)
    source, *_, reader = fabrics
    source.lend()
    reach = source.reach(host_memory(pattern(NUM_BYTES, 1)))
    for number in (1, 2):
        read = Read(reach, host_memory(bytearray(NUM_BYTES)))
        reader.begin(read)
        assert ended(read, source, reader) is None
        assert len(released) == number


def test_the_number_of_kept_peers_is_bounded(fabrics: list[Fabric]) -> None:
    *sources, reader = fabrics
    for seed, source in enumerate(sources):
        buffer = bytearray(NUM_BYTES)
        source.lend()
        payload = host_memory(pattern(NUM_BYTES, seed))
        read = Read(source.reach(payload), host_memory(buffer))
        reader.begin(read)
        assert ended(read, source, reader) is None
        assert buffer == pattern(NUM_BYTES, seed)
    assert len(reader._peers) == 2  # noqa: SLF001  nothing public tells


def test_closing_ends_a_read_that_was_not_polled_yet(fabrics: list[Fabric]) -> None:
    source, *_, reader = fabrics
    payload = host_memory(pattern(NUM_BYTES, 1))
    read = Read(source.reach(payload), host_memory(bytearray(NUM_BYTES)))
    reader.begin(read)
    reader.close()
    assert isinstance(read.ended.exception(timeout=0), ConnectionAbortedError)


def test_polling_stops_with_the_last_reader(fabrics: list[Fabric]) -> None:
    source = fabrics[0]
    assert source.poll() is None
    source.lend()
    source.lend()
    source.take_back()
    assert source.poll() is not None
    source.take_back()
    assert source.poll() is None


def test_a_lost_peer_is_closed_at_once(fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the garbage collector: until then UCX may write into the reader's memory."""
    source, *_, reader = fabrics
    closed, close = list[Agent](), Agent.close

    def noted(agent: Agent) -> None:
        closed.append(agent)
        close(agent)

    monkeypatch.setattr(Agent, "close", noted)
    source.lend()
    read = Read(source.reach(host_memory(pattern(NUM_BYTES, 1))), host_memory(bytearray(NUM_BYTES)))
    reader.begin(read)
    assert ended(read, source, reader) is None
    reader.close()
    assert len(closed) == 2  # its own, and the one of its peer


async def test_a_transceiver_that_does_not_start_leaves_no_thread() -> None:
    with pytest.raises(OSError, match="assign"):
        await CacheTransceiver("192.0.2.1", direct=Direct("192.0.2.1")).start()
    assert "kv-ucx" not in {thread.name for thread in threading.enumerate()}


async def test_after_a_pull_nothing_is_polled_and_closing_frees_the_agents() -> None:
    agents = Newborn(Agent)

    async def is_idle(direct: Direct) -> bool:
        poll = direct._thread.submit(direct._fabric.poll)  # noqa: SLF001  nothing public tells
        return await asyncio.wrap_future(poll) is None

    roads = [Direct("127.0.0.1") for _ in range(2)]
    both = source, puller = [CacheTransceiver("127.0.0.1", direct=direct) for direct in roads]
    for transceiver in both:
        await transceiver.start()
    buffer = bytearray(NUM_BYTES)
    ticket = source.offer(host_memory(pattern(NUM_BYTES, 1)))
    moved = asyncio.ensure_future(source.moved(ticket))
    await puller.pull(ticket, host_memory(buffer), PATIENCE_S)
    await moved
    assert buffer == pattern(NUM_BYTES, 1)
    async with asyncio.timeout(PATIENCE_S):
        for direct in roads:
            while not await is_idle(direct):
                await asyncio.sleep(0.01)  # the end of a read has no event
    for transceiver in both:
        await transceiver.close()
    assert agents.count() == 0
    assert len(both) == 2  # they live


def test_memory_in_the_place_of_freed_memory_changes_the_epoch() -> None:
    agent = Agent("127.0.0.1")
    buffer = bytearray(2 * NUM_BYTES)
    whole = host_memory(buffer)
    assert agent.reach(whole).epoch == 0
    del whole
    part = host_memory(memoryview(buffer)[:NUM_BYTES])
    assert agent.reach(part).epoch == 1  # peers may still know the larger one
    assert agent.reach(part).epoch == 1
    rest = host_memory(memoryview(buffer)[NUM_BYTES:])
    assert agent.reach(rest).epoch == 1  # which no peer of this epoch knows
    agent.close()


def test_freed_memory_is_deregistered_and_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, num_freed = Agent("127.0.0.1"), 0
    deregister = agent._api.deregister_memory  # noqa: SLF001  nothing else tells

    def noted(descs: object) -> None:
        nonlocal num_freed
        num_freed += 1
        deregister(descs)

    monkeypatch.setattr(agent._api, "deregister_memory", noted)  # noqa: SLF001  as above
    places = memoryview(bytearray(258 * NUM_BYTES))
    for i in range(257):
        assert agent.reach(host_memory(places[i * NUM_BYTES :][:NUM_BYTES])).epoch == 0
        assert num_freed == i
    last = host_memory(places[257 * NUM_BYTES :])
    assert agent.reach(last).epoch == 1
    agent.close()


@pytest.mark.parametrize(("host", "is_loopback"), [("127.0.0.2", True), ("::1", True), ("192.0.2.1", False)])
def test_a_loopback_address_keeps_ucx_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, is_loopback: bool
) -> None:
    given: list[str] = []

    class Backends:
        def __init__(self, name: str, config: object) -> None:
            pass

        def create_backend(self, kind: str, settings: dict[str, str]) -> None:
            given.append(settings["engine_config"])

    monkeypatch.setattr("workers.kv.ucx.nixl.nixl_agent", Backends)
    Agent(host)
    (settings,) = (each.split(",") for each in given)
    assert ("NET_DEVICES=lo" in settings) == is_loopback
    assert "PROTO_EMULATION_ENABLE=n" in settings  # with it, a killed reader kills its source


def test_memory_elsewhere_leaves_the_epoch_and_thus_the_peers_connections() -> None:
    agent = Agent("127.0.0.1")
    places = memoryview(bytearray(3 * NUM_BYTES))
    middle = host_memory(places[NUM_BYTES:][:NUM_BYTES])
    agent.reach(middle)
    del middle
    around = [host_memory(places[start:][:NUM_BYTES]) for start in (0, 2 * NUM_BYTES)]
    assert [agent.reach(each).epoch for each in around] == [0, 0]
    across = host_memory(places[2 * NUM_BYTES - 1 :])
    assert agent.reach(across).epoch == 1
    agent.close()


def test_the_parts_of_a_pool_share_its_registration() -> None:
    agent = Agent("127.0.0.1")
    whole = host_memory(bytearray(2 * NUM_BYTES))
    parts = [whole.part(0, NUM_BYTES), whole.part(NUM_BYTES, NUM_BYTES)]
    assert {agent.reach(part).metadata for part in parts} == {agent.reach(whole).metadata}
    agent.close()


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_read_that_nixl_reports_as_failed_has_no_direct_path(is_raised: bool) -> None:
    class Failing:
        def check_xfer_state(self, _: object) -> str:
            if is_raised:
                raise RuntimeError("remote disconnected")
            return "ERR"

    agent = Agent("127.0.0.1")
    agent.close()
    agent._api = Failing()  # noqa: SLF001  nothing else makes it say so
    with pytest.raises(NoDirectPath):
        agent.is_done(object())
