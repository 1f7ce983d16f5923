"""Direct pulls whose reads end when the test says so, from a source in this process."""

import asyncio
import gc
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.errors import HandoffFailed, HandoffStalled
from tests.clock import run_jumping
from tests.kv_peer import Command, near, needs_nixl, victim
from tests.waiting import PATIENCE_S, until
from workers.kv.direct import DirectTransceiver
from workers.kv.fabric import Read
from workers.kv.memory import Memory, host_memory
from workers.kv.source import Source
from workers.kv.stall import STALL_S
from workers.kv.transceiver import Ticket
from workers.kv.ucx import Reach
from workers.kv.wire import Connection, Grant

pytestmark = needs_nixl
NUM_BYTES = 4096


@pytest.fixture(autouse=True)
def read_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each error of a future is read by someone: asyncio would log it as a bug."""
    yield
    gc.collect()
    assert "never retrieved" not in caplog.text


class Pair:
    """A source, one offer of it, and a puller whose reads are `begun` and `given_up`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = Source("ucx", "127.0.0.1", self._lend)
        self.puller = DirectTransceiver("127.0.0.1")
        self.begun: list[Read] = []
        self.given_up: list[Read] = []
        self.withdraws = False
        self._monkeypatch = monkeypatch

    @asynccontextmanager
    async def _lend(self, connection: Connection, payload: Memory, num_bytes: int) -> AsyncIterator[None]:
        await connection.send(Grant(msgspec.msgpack.encode(Reach("a", 0, b"", payload.address, None))))
        yield
        if self.withdraws:
            self.source.withdraw(self.ticket)

    async def start(self) -> None:
        await self.source.start()
        await self.puller.start()
        self.ticket: Ticket = self.source.offer(host_memory(bytearray(NUM_BYTES)))
        fabric = self.puller._fabric  # noqa: SLF001  the test ends its reads
        self._monkeypatch.setattr(fabric, "begin", self.begun.append)
        self._monkeypatch.setattr(fabric, "give_up", self.given_up.append)

    def pull(self) -> "asyncio.Task[None]":
        into = host_memory(bytearray(NUM_BYTES))
        return asyncio.create_task(self.puller.pull(self.ticket, into, PATIENCE_S))

    async def close(self) -> None:
        await self.puller.close()
        await self.source.close()


@asynccontextmanager
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    each = Pair(monkeypatch)
    await each.start()
    try:
        yield each
    finally:
        await each.close()


def test_a_long_read_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair(monkeypatch) as each:
            pull = each.pull()
            await until(lambda: each.begun)
            await asyncio.sleep(STALL_S * 3)
            each.begun[0].ended.set_result(None)
            await pull
            assert await each.source.moved(each.ticket) == NUM_BYTES

    run_jumping(main())


def test_a_cancelled_pull_ends_when_its_memory_is_not_written_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with pair(monkeypatch) as each:
            pull = each.pull()
            await until(lambda: each.begun)
            for _ in range(3):
                pull.cancel()
                assert await asyncio.wait([pull], timeout=1) == (set(), {pull})
            assert each.given_up == each.begun
            each.begun[0].ended.set_exception(ConnectionAbortedError("given up"))
            with pytest.raises(asyncio.CancelledError):
                await pull

    run_jumping(main())


def test_a_read_of_a_withdrawn_offer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair(monkeypatch) as each:
            pull = each.pull()
            await until(lambda: each.begun)
            each.source.withdraw(each.ticket)
            await until(lambda: each.given_up)
            assert not pull.done()
            each.begun[0].ended.set_exception(ConnectionAbortedError("given up"))
            with pytest.raises(HandoffFailed, match="given up"):
                await pull

    run_jumping(main())


def test_bytes_of_an_offer_that_was_withdrawn_meanwhile_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair(monkeypatch) as each:
            each.withdraws = True
            pull = each.pull()
            await until(lambda: each.begun)
            each.begun[0].ended.set_result(None)
            with pytest.raises(HandoffFailed, match="lost"):
                await pull

    run_jumping(main())


def test_a_source_that_cannot_be_reached_any_more_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(_: object, __: int) -> bytes:
        raise TimeoutError("as from the kernel")

    async def main() -> None:
        async with pair(monkeypatch) as each:
            monkeypatch.setattr(asyncio.get_running_loop(), "sock_recv", unreachable)
            pull = each.pull()
            await until(lambda: each.given_up)
            each.begun[0].ended.set_exception(ConnectionAbortedError("given up"))
            with pytest.raises(HandoffStalled):
                await pull

    run_jumping(main())


@pytest.mark.parametrize(("kind", "path"), [("ucx", "cma"), ("ucx-stream", "stream")])
async def test_both_ends_tell_what_a_transfer_took(kind: str, path: str) -> None:
    async with near(kind) as source, near(kind) as puller:
        assert (source.transport_name, source.paths, puller.paths) == ("ucx", "", "")
        ticket = source.offer(host_memory(bytearray(NUM_BYTES)))
        await puller.pull(ticket, host_memory(bytearray(NUM_BYTES)), PATIENCE_S)
        await source.moved(ticket)
        assert (source.paths, puller.paths) == (path, path)


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
        assert [(await peer.ask(Command("ping"))).paths for peer in (source, puller)] == ["stream"] * 2
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
