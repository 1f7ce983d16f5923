"""Direct pulls whose reads end when the test says so, from a source in this process."""

import asyncio
import gc
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import HandoffFailed, HandoffStalled
from baton.frames import FrameWriter
from tests.clock import jumping
from tests.kv_peer import near, needs_nixl, victim
from tests.waiting import PATIENCE_S, until
from workers.kv.memory import Memory, host_memory
from workers.kv.stream import STALL_S
from workers.kv.transceiver import CacheTransceiver

pytestmark = needs_nixl
NUM_BYTES = 4096


@pytest.fixture(autouse=True)
def read_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each error of a future is read by someone: asyncio would log it as a bug."""
    yield
    gc.collect()
    assert "never retrieved" not in caplog.text


class Pair:
    """A source, one offer of it, and a puller whose reads end when the test says so."""

    def __init__(self, source: CacheTransceiver, puller: CacheTransceiver) -> None:
        self.source = source
        self.begun: list[Any] = []
        self.ticket = source.offer(host_memory(bytearray(NUM_BYTES)))
        self._puller = puller
        self._ended: Future[None] = Future()

    @property
    def is_given_up(self) -> bool:
        return any(read.give_up_at < float("inf") for read in self.begun)

    async def pull(self) -> "asyncio.Task[None]":
        """A pull whose read has begun."""
        into = host_memory(bytearray(NUM_BYTES))
        pull = asyncio.create_task(self._puller.pull(self.ticket, into, PATIENCE_S))
        await until(lambda: self.begun)
        return pull

    async def read(self, read: object) -> None:
        """In place of UCX, on its thread."""
        self.begun.append(read)
        await asyncio.wrap_future(self._ended)

    def end(self, *, is_complete: bool) -> None:
        if is_complete:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(ConnectionAbortedError("given up"))


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    # The first has a socket: without one the clock jumps while UCX starts.
    async with near("tcp"), near("ucx") as source, near("ucx") as puller:
        each = Pair(source, puller)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(puller._direct, "_read", each.read)  # noqa: SLF001  the test ends its reads
            yield each


@jumping
async def test_a_long_read_is_no_stall() -> None:
    async with pair() as each:
        pull = await each.pull()
        await asyncio.sleep(STALL_S * 3)
        each.end(is_complete=True)
        await pull
        assert await each.source.moved(each.ticket) == NUM_BYTES


@jumping
async def test_a_cancelled_pull_ends_when_its_memory_is_not_written_any_more() -> None:
    async with pair() as each:
        pull = await each.pull()
        for _ in range(3):
            pull.cancel()
            assert await asyncio.wait([pull], timeout=1) == (set(), {pull})
        assert each.is_given_up
        each.end(is_complete=False)
        with pytest.raises(asyncio.CancelledError):
            await pull


@jumping
async def test_a_read_of_a_withdrawn_offer_is_given_up() -> None:
    async with pair() as each:
        pull = await each.pull()
        each.source.withdraw(each.ticket)
        await until(lambda: each.is_given_up)
        assert not pull.done()
        each.end(is_complete=False)
        with pytest.raises(HandoffFailed, match="no longer offered"):
            await pull


@jumping
async def test_bytes_of_an_offer_that_was_withdrawn_meanwhile_do_not_count() -> None:
    async with pair() as each:
        pull = await each.pull()
        each.end(is_complete=True)
        each.source.withdraw(each.ticket)
        with pytest.raises(HandoffFailed, match="no longer offered"):
            await pull


@jumping
async def test_a_source_that_cannot_be_reached_any_more_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as each:
        pull = await each.pull()
        monkeypatch.setattr(FrameWriter, "put", lambda *_: None)  # no heartbeat leaves any more
        await until(lambda: each.is_given_up)
        each.end(is_complete=False)
        with pytest.raises(HandoffStalled):
            await pull


async def test_between_containers_that_share_no_processes_ucx_streams_and_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In process namespaces of their own, the first read fails."""
    apart = ("unshare", "--pid", "--ipc", "--fork", "--kill-child")
    if subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this user may not make namespaces")
    with victim("ucx", *apart) as source, victim("ucx", *apart) as puller:
        for seed in range(2):
            assert (await puller.pull(await source.offer(NUM_BYTES, seed), seed)).intact
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == printed.err.count("kv streamed") == 1


async def test_an_indirect_source_is_remembered_but_not_for_memory_of_a_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with near("ucx-stream") as source, near("ucx-stream") as puller:
        for _ in range(2):
            ticket = source.offer(payload := host_memory(bytearray(b"x" * NUM_BYTES)))
            await puller.pull(ticket, host_memory(into := bytearray(NUM_BYTES)), PATIENCE_S)
            assert into == b"x" * NUM_BYTES
            del payload
        assert caplog.text.count("kv streamed") == 1
        ticket = source.offer(host_memory(bytearray(NUM_BYTES)))
        on_device = Memory(address=1 << 40, num_bytes=NUM_BYTES, owner=None, device_index=0)
        with pytest.raises(HandoffFailed, match="no direct path from the source to this CUDA device"):
            await puller.pull(ticket, on_device, PATIENCE_S)
