"""The Discovery contract, for etcd (a real server) and files."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from baton.discovery import Discovery
from baton.etcd import PREFIX, EtcdDiscovery
from baton.etcd_rpc import EtcdRpc, prefix_end
from baton.files import FilesDiscovery
from baton.telemetry import unauthenticated
from tests.conftest import LaunchServer
from tests.registry import Snapshot, etcd_api, onlooker, worker
from tests.waiting import PATIENCE_S, scaled, signal_process, until

TTL_S = scaled(2.0)

# A worker process: registers itself, reports it, and keeps running.
_CHILD = """
import asyncio, sys
from pathlib import Path
from tests.registry import worker

async def main(kind, where, ttl_s, worker_id):
    if kind == "etcd":
        from baton.etcd import EtcdDiscovery
        discovery = EtcdDiscovery(where, lease_ttl_s=ttl_s)
    else:
        from baton.files import FilesDiscovery
        discovery = FilesDiscovery(Path(where), ttl_s=ttl_s)
    async with discovery.register(worker(worker_id)):
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]))
"""


class Registry:
    """One kind of registry: makes clients, child processes, and damage."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self.where = where
        self._children: list[subprocess.Popen[str]] = []

    @asynccontextmanager
    async def open(self, ttl_s: float = TTL_S) -> AsyncGenerator[Discovery, None]:
        discovery: Discovery
        if self.kind == "etcd":
            discovery = EtcdDiscovery(self.where, lease_ttl_s=ttl_s)
        else:
            discovery = FilesDiscovery(Path(self.where), ttl_s=ttl_s)
        try:
            yield discovery
        finally:
            await discovery.close()

    def spawn(self, worker_id: str) -> subprocess.Popen[str]:
        """A registered worker process."""
        command = [sys.executable, "-c", _CHILD, self.kind, self.where, str(TTL_S), worker_id]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "registered\n"
        return child

    async def write(self, name: str, value: bytes) -> None:
        """Write a value as another program might."""
        if self.kind == "files":
            (Path(self.where) / f"{name}.json").write_bytes(value)
            return
        rpc = EtcdRpc(self.where, timeout_s=scaled(3))
        lease = (await rpc.call("Lease/LeaseGrant", TTL=2)).ID
        key = PREFIX + f"other/program/x/{name}".encode()
        await rpc.call("KV/Put", key=key, value=value, lease=lease)
        await rpc.close()

    def delete_everything(self) -> None:
        """Delete all registrations, as an operator might by mistake."""
        if self.kind == "etcd":
            etcd_api(self.where, "kv/deleterange", key=PREFIX, range_end=prefix_end(PREFIX))
        else:
            for path in Path(self.where).iterdir():
                path.unlink()

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture(scope="module")
def own_etcd(launch_etcd: LaunchServer) -> str:
    return launch_etcd().url


@pytest.fixture(params=["etcd", "files"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    if request.param == "etcd":
        registry = Registry("etcd", request.getfixturevalue("own_etcd"))
        registry.delete_everything()
    else:
        registry = Registry("files", str(tmp_path / "registry"))
    yield registry
    registry.stop()


def ids(snapshot: Snapshot) -> list[str]:
    return [info.worker_id for info in snapshot]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_worker_is_seen_with_every_field_until_it_leaves(
    registry: Registry, is_cancelled: bool
) -> None:
    may_leave = asyncio.Event()

    async def live(discovery: Discovery) -> None:
        async with discovery.register(worker("w1")):
            await may_leave.wait()

    async with registry.open(10 * PATIENCE_S) as discovery, onlooker(discovery) as looker:
        assert looker.now == ()
        living = asyncio.create_task(live(discovery))
        await looker.until(lambda snapshot: snapshot == (worker("w1"),))
        living.cancel() if is_cancelled else may_leave.set()
        await looker.until_shown()  # long before its lease would expire
        await asyncio.wait([living])
        assert living.cancelled() == is_cancelled


async def test_every_watcher_sees_the_same_and_a_late_one_sees_all_at_once(registry: Registry) -> None:
    async with (
        registry.open() as first,
        registry.open() as second,
        onlooker(first) as early,
        second.register(worker("b")),
        first.register(worker("a", namespace="other")),
    ):
        await early.until_shown("a", "b")
        async with onlooker(second) as late:
            assert ids(late.now or ()) == ["a", "b"]
            assert late.num_snapshots == 1
            async with first.register(worker("c")):
                await early.until_shown("a", "b", "c")
                await late.until_shown("a", "b", "c")


async def test_a_newer_registration_replaces_an_older_one_and_outlives_it(registry: Registry) -> None:
    newer = worker("w1", incarnation="second")
    async with registry.open() as discovery, onlooker(discovery) as looker, AsyncExitStack() as older:
        await older.enter_async_context(discovery.register(worker("w1")))
        await looker.until_shown("w1")
        async with discovery.register(newer):
            await looker.until(lambda snapshot: snapshot == (newer,))
            await older.aclose()
            async with discovery.register(worker("w2")):
                await looker.until_shown("w1", "w2")
            await looker.until(lambda snapshot: snapshot == (newer,))
            assert looker.lost == {"w2"}


async def test_many_workers_come_and_go(registry: Registry) -> None:
    names = [f"w{index:02}" for index in range(64)]
    async with registry.open() as discovery, onlooker(discovery) as looker:
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(discovery.register(worker(name)))
            await looker.until_shown(*names)
            assert looker.lost == set()
        await looker.until_shown()
        assert looker.lost == set(names)


async def test_an_idle_registry_sends_no_snapshots(registry: Registry) -> None:
    async with registry.open() as discovery, discovery.register(worker("w1")), onlooker(discovery) as looker:
        await asyncio.sleep(TTL_S)  # three lease renewals
        assert looker.num_snapshots == 1


async def test_a_killed_process_vanishes_within_the_leases_time(registry: Registry) -> None:
    child = registry.spawn("killed")
    async with (
        registry.open() as discovery,
        discovery.register(worker("alive")),
        onlooker(discovery) as looker,
    ):
        await looker.until_shown("alive", "killed")
        child.kill()
        await looker.until_shown("alive")
        assert looker.lost == {"killed"}


async def test_a_frozen_process_vanishes_and_comes_back(registry: Registry) -> None:
    child = registry.spawn("frozen")
    async with registry.open() as discovery, onlooker(discovery) as looker:
        await looker.until_shown("frozen")
        signal_process(child.pid, signal.SIGSTOP)
        took_s = await looker.until_shown()
        assert took_s > TTL_S / 3
        child.send_signal(signal.SIGCONT)
        await looker.until_shown("frozen")


async def test_a_process_that_was_killed_can_register_again_at_once(registry: Registry) -> None:
    registry.spawn("w1").kill()
    again = worker("w1", incarnation="second")
    async with registry.open() as discovery, onlooker(discovery) as looker, discovery.register(again):
        await looker.until(lambda snapshot: snapshot == (again,))
        looker.lost.clear()
        await asyncio.sleep(1.5 * TTL_S)  # the killed one's lease expires
        assert looker.lost == set()


async def test_a_deleted_registration_is_written_again(registry: Registry) -> None:
    async with registry.open() as discovery, discovery.register(worker("w1")):
        registry.delete_everything()
        await asyncio.sleep(TTL_S / 2)  # the keeper checks again within a third
        async with onlooker(discovery) as looker:
            await looker.until_shown("w1")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"worker_id": "x"', id="cut off"),
        pytest.param(b'{"worker_id": "x"}', id="fields missing"),
        pytest.param(b'{"worker_id": "\xff"}', id="not UTF-8"),
        pytest.param(b'{"x": ' + b"[" * 60_000, id="nested deeply"),
        pytest.param(b'"' + b"x" * 70_000 + b'"', id="too long"),
    ],
)
async def test_invalid_registrations_are_skipped_and_logged(
    registry: Registry, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    num_before = unauthenticated.num_messages
    async with registry.open() as discovery, discovery.register(worker("w1")):
        await registry.write("junk", value)
        async with onlooker(discovery) as looker:
            await looker.until_shown("w1")
    assert "registration=skipped" in caplog.text
    assert unauthenticated.num_messages > num_before


async def test_a_watch_closes_with_nothing_left_behind(registry: Registry) -> None:
    async def wait_for_change(discovery: Discovery) -> None:
        async with aclosing(discovery.watch()) as snapshots:
            await anext(snapshots)
            await anext(snapshots)

    alone = asyncio.all_tasks()
    async with registry.open() as discovery:
        async with aclosing(discovery.watch()) as snapshots:
            assert await anext(snapshots) == ()
        waiting = asyncio.create_task(wait_for_change(discovery))
        async with onlooker(discovery):
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    await until(lambda: asyncio.all_tasks() == alone)
