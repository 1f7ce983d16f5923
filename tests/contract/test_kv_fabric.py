"""UCX reads: which peers are kept, what ends, when polling stops."""

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from baton.messages import KvGrant
from tests.kv_peer import needs_nixl, pattern
from tests.waiting import until
from workers.kv.direct import Direct
from workers.kv.memory import NoDirectPath, host_memory
from workers.kv.transceiver import CacheTransceiver
from workers.kv.ucx import Agent

pytestmark = needs_nixl
NUM_BYTES = 4096
NUM_TRIALS = 4  # each road begins with one


@asynccontextmanager
async def roads() -> AsyncIterator[list[Direct]]:
    """Three sources and a reader that keeps two peers."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("workers.kv.direct.MAX_PEERS", 2)
        made = [Direct("127.0.0.1") for _ in range(4)]
        for road in made:
            await stack.enter_async_context(road.running())
        yield made


async def moved(source: Direct, reader: Direct, seed: int = 1) -> None:
    """Move some bytes; the seed is the source's address."""
    payload, buffer = host_memory(pattern(NUM_BYTES, seed)), bytearray(NUM_BYTES)
    async with source.lend(payload) as way:
        await reader.fetch(str(seed), way, host_memory(buffer))
    assert buffer == pattern(NUM_BYTES, seed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often some methods were called, of agents that this test makes: earlier ones may still close."""
    counted = Counter[str]()
    made = []
    begin = Agent.__init__

    def note_new(agent: Agent, *args: object) -> None:
        made.append(id(agent))
        begin(agent, *args)  # type: ignore[arg-type]  # as it is called

    monkeypatch.setattr(Agent, "__init__", note_new)

    def noted(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            counted[name] += id(args[0]) in made
            method(*args)

        return call

    for name in ("progress", "release", "close"):
        monkeypatch.setattr(Agent, name, noted(name, getattr(Agent, name)))
    return counted


async def test_each_read_is_released_and_each_peer_closed_with_its_reader(calls: Counter[str]) -> None:
    """Not by the garbage collector: until then UCX may write into the reader's memory."""
    async with roads() as (source, *_, reader):
        for number in (1, 2):
            await moved(source, reader)
            assert calls["release"] == number
        assert calls["close"] == NUM_TRIALS
    assert calls["close"] == NUM_TRIALS + 5


@pytest.mark.parametrize(("linked", "num_closed"), [("012", 1), ("2", 2)])
async def test_peers_are_closed_that_ended_or_are_too_many(
    calls: Counter[str], linked: str, num_closed: int
) -> None:
    async with roads() as (*sources, reader):
        reader.has_link = linked.__contains__
        for seed, source in enumerate(sources):
            await moved(source, reader, seed)
        assert calls["close"] == NUM_TRIALS + num_closed


async def test_a_read_that_fails_ends_all_of_its_peer_and_the_next_one_meets_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error: list[OSError] = []
    polled: set[int] = set()

    def is_done(_agent: Agent, handle: object) -> bool:
        polled.add(id(handle))
        if error:
            raise error.pop()
        return False

    async with roads() as (source, *_, reader):
        with monkeypatch.context() as hanging:
            hanging.setattr(Agent, "is_done", is_done)
            pulls = [asyncio.create_task(moved(source, reader)) for _ in range(2)]
            await until(lambda: len(polled) == 2)
            error.append(NoDirectPath("lost"))
            results = await asyncio.gather(*pulls, return_exceptions=True)
        assert [isinstance(result, OSError) for result in results] == [True, True]
        await moved(source, reader)


@pytest.mark.parametrize("fails", [False, True])
async def test_when_reads_of_a_source_end_nixl_has_dropped_them(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its agent is gone, to which handles and tracebacks refer: while it lives, UCX may write."""
    living: list[weakref.ref[Any]] = []
    num_living: list[int] = []
    close = Agent.close
    error: list[Exception] = []
    polled: set[int] = set()

    def noted(agent: Agent) -> None:
        living.append(weakref.ref(agent._api.agent))  # noqa: SLF001  NIXL's own
        close(agent)

    def check_xfer_state(_nixl: object, handle: object) -> str:
        polled.add(id(handle))
        if error:
            raise error.pop()
        return "PROC"

    def pull(way: KvGrant) -> "asyncio.Task[None]":
        pull = asyncio.create_task(reader.fetch("", way, host_memory(bytearray(NUM_BYTES))))
        pull.add_done_callback(lambda _: num_living.append(sum(each() is not None for each in living)))
        return pull

    async with roads() as (source, *_, reader), source.lend(host_memory(bytearray(NUM_BYTES))) as way:
        monkeypatch.setattr(Agent, "close", noted)
        monkeypatch.setattr("workers.kv.ucx.nixl.nixl_agent.check_xfer_state", check_xfer_state)
        pulls = [pull(way) for _ in range(2)]
        await until(lambda: len(polled) == 2)
        if fails:
            error.append(TypeError("lost"))
        else:
            pulls[0].cancel()
        for each in await asyncio.gather(*pulls, return_exceptions=True):
            assert isinstance(each, OSError | asyncio.CancelledError)
        assert (len(living), num_living) == (1, [0, 0])


async def test_closing_ends_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "is_done", lambda *_: False)
    source, reader = Direct("127.0.0.1"), Direct("127.0.0.1")
    async with source.running():
        async with reader.running():
            pull = asyncio.create_task(moved(source, reader))
            assert not (await asyncio.wait({pull}, timeout=0.2))[0]
        with pytest.raises(ConnectionAbortedError):
            await pull


async def test_a_transceiver_that_does_not_start_leaves_no_thread() -> None:
    with pytest.raises(OSError, match="assign"):
        await CacheTransceiver("192.0.2.1", direct=Direct("192.0.2.1")).start()
    assert "kv-ucx" not in {thread.name for thread in threading.enumerate()}


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
