"""EtcdDiscovery when etcd is killed, frozen, wiped, compacted or locked, with a real server each time."""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from baton.connect import Wires
from baton.etcd import PREFIX, EtcdDiscovery
from baton.etcd_rpc import EtcdError, EtcdRpc
from operations.doctor.probes import probe_servers
from tests.certificates import Authority
from tests.conftest import LaunchServer, ServerProcess, free_port
from tests.registry import Onlooker, etcd_api, onlooker, worker
from tests.waiting import FAILOVER_S, scaled, until

TTL_S = scaled(2.0)
HEAL_S = FAILOVER_S
AWAY = "registry=unreachable"


@pytest.fixture
def launch(launch_etcd: LaunchServer) -> Iterator[LaunchServer]:
    """Like `launch_etcd`, but its servers end with the test."""
    servers: list[ServerProcess] = []

    def launch(*extra: str, scheme: str = "http") -> ServerProcess:
        servers.append(launch_etcd(*extra, scheme=scheme))
        return servers[-1]

    yield launch
    for server in servers:
        server.kill()


@pytest.fixture
def etcd(launch: LaunchServer) -> ServerProcess:
    return launch()


@asynccontextmanager
async def client(
    url: str, ttl_s: float = TTL_S, password: str | None = None
) -> AsyncGenerator[EtcdDiscovery]:
    login = ("root", password) if password else None
    discovery = EtcdDiscovery(url, lease_ttl_s=ttl_s, login=login)
    try:
        yield discovery
    finally:
        await discovery.close()


@asynccontextmanager
async def watched(
    url: str, ttl_s: float = TTL_S, password: str | None = None
) -> AsyncGenerator[tuple[EtcdDiscovery, Onlooker]]:
    """A client with the registered worker w1, and an observer with its own client that has seen it."""
    async with (
        client(url, ttl_s, password) as working,
        client(url, ttl_s, password) as watching,
        working.register(worker("w1")),
        onlooker(watching) as looker,
    ):
        await looker.until_shown("w1")
        yield working, looker


def restart(etcd: ServerProcess) -> None:
    etcd.kill()
    etcd.start()


def wipe(etcd: ServerProcess) -> None:
    etcd.kill()
    shutil.rmtree(etcd.data)
    etcd.start()


@pytest.mark.parametrize("fault", [restart, wipe])
async def test_no_worker_is_lost_when_etcd_restarts(
    etcd: ServerProcess, fault: Callable[[ServerProcess], None]
) -> None:
    async with watched(etcd.url) as (working, looker):
        await asyncio.to_thread(fault, etcd)
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
        async with client(etcd.url) as fresh, onlooker(fresh) as later:
            await later.until_shown("w1", timeout_s=HEAL_S)
        # After the time of doubt, workers that left meanwhile disappear, and only those.
        await looker.until_shown("w1", timeout_s=HEAL_S)
        assert looker.lost == {"w2"}


async def test_no_worker_is_lost_while_etcd_is_frozen_past_the_leases(etcd: ServerProcess) -> None:
    async with watched(etcd.url) as (working, looker):
        etcd.freeze()
        await asyncio.sleep(10)  # pings fail after 9 s at most
        etcd.thaw()
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
        assert looker.lost == set()


async def test_a_short_freeze_of_etcd_delays_nothing(etcd: ServerProcess) -> None:
    async with watched(etcd.url) as (working, looker):
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2")
            etcd.freeze()
            start = time.monotonic()
        assert time.monotonic() - start < FAILOVER_S  # withdrawing gives up on a silent etcd
        await asyncio.sleep(max(0, scaled(3) - (time.monotonic() - start)))  # the duration of the freeze
        assert looker.lost == set()
        etcd.thaw()
        await looker.until_shown("w1", timeout_s=HEAL_S)
        async with client(etcd.url) as fresh, onlooker(fresh) as later:
            await later.until_shown("w1", timeout_s=HEAL_S)


async def test_a_worker_that_died_while_etcd_was_down_disappears(etcd: ServerProcess) -> None:
    async with watched(etcd.url) as (_, looker):
        async with client(etcd.url) as dying, dying.register(worker("dead")):
            await looker.until_shown("dead", "w1")
            etcd.kill()
            await dying.close()
        await asyncio.to_thread(etcd.start)
        await looker.until_shown("w1", timeout_s=2 * HEAL_S)


async def waits_in_vain(discovery: EtcdDiscovery, caplog: pytest.LogCaptureFixture) -> None:
    """No fleet is known, which is not the same as an empty one."""
    num_before = caplog.text.count(AWAY)
    watching = asyncio.ensure_future(anext(discovery.watch()))
    await until(lambda: caplog.text.count(AWAY) > num_before)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_frontend_and_a_worker_may_start_before_etcd(
    etcd: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.kill()
    async with client(etcd.url) as frontend, client(etcd.url) as starting, asyncio.TaskGroup() as tasks:
        await waits_in_vain(frontend, caplog)
        tasks.create_task(asyncio.to_thread(etcd.start))
        async with starting.register(worker("w1")), onlooker(frontend) as looker:
            await looker.until_shown("w1", timeout_s=HEAL_S)


async def test_a_compacted_revision_is_refused_and_the_fleet_listed_again(etcd: ServerProcess) -> None:
    async def first_change(rpc: EtcdRpc) -> None:
        async with aclosing(rpc.watch(PREFIX, 1, None)) as batches:
            while not await anext(batches):
                pass

    rpc = EtcdRpc(etcd.url, timeout_s=scaled(3))
    async with watched(etcd.url) as (working, looker):
        for _ in range(20):
            async with working.register(worker("brief")):
                pass
        _, revision = await rpc.list_prefix(PREFIX, 10)
        await asyncio.to_thread(etcd_api, etcd.url, "kv/compaction", revision=str(revision))
        with pytest.raises(EtcdError, match="compacted"):
            await first_change(rpc)
        await asyncio.to_thread(restart, etcd)
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
    await rpc.close()


async def doctors(etcd: ServerProcess) -> tuple[str, ...]:
    """What doctor says about it."""
    return await probe_servers(Wires(discovery_backend="etcd", etcd_endpoints=etcd.url), scaled(2))


@pytest.fixture
def locked_etcd(launch: LaunchServer) -> ServerProcess:
    """An etcd with a password, whose tokens expire after a second."""
    etcd = launch("--auth-token-ttl=1")
    etcd_api(etcd.url, "auth/user/add", name="root", password="sesame")
    etcd_api(etcd.url, "auth/role/add", name="root")
    etcd_api(etcd.url, "auth/user/grant", user="root", role="root")
    etcd_api(etcd.url, "auth/enable")
    return etcd


async def test_a_stale_token_is_renewed(locked_etcd: ServerProcess) -> None:
    async with watched(locked_etcd.url, ttl_s=30, password="sesame") as (working, looker):
        await asyncio.sleep(3)  # no call is made, so the tokens expire
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2")
            await asyncio.to_thread(restart, locked_etcd)  # drops every token
            async with working.register(worker("w3")):
                await looker.until_shown("w1", "w2", "w3", timeout_s=HEAL_S)


@pytest.mark.parametrize("password", ["wrong", None])
async def test_a_wrong_password_is_a_log_line_for_workers_and_a_finding_of_doctor(
    locked_etcd: ServerProcess,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    password: str | None,
) -> None:
    async with client(locked_etcd.url, password=password) as discovery:
        registering = asyncio.ensure_future(discovery.register(worker("w1")).__aenter__())
        await until(lambda: AWAY in caplog.text)
        registering.cancel()
    if password:
        monkeypatch.setenv("ETCD_AUTH_USERNAME", "root")
        monkeypatch.setenv("ETCD_AUTH_PASSWORD", password)
    (problem,) = await doctors(locked_etcd)
    assert caplog.text.count(AWAY) == 2
    assert ("authentication failed" if password else "user name is empty") in problem


async def test_the_next_endpoint_is_used_when_one_is_dead_or_dies(launch: LaunchServer) -> None:
    first, second = launch(), launch()
    async with watched(f"http://127.0.0.1:{free_port()},{first.url},{second.url}") as (working, looker):
        first.kill()
        async with client(second.url) as direct, onlooker(direct) as other:
            await other.until_shown("w1", timeout_s=HEAL_S)
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
        assert looker.lost == set()


async def test_tls_with_client_certificates(
    launch: LaunchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    ca, (cert, key) = authority.ca, authority.sign("etcd")
    server = [f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth"]
    etcd = launch(*server, scheme="https")
    discovery = EtcdDiscovery(etcd.url, tls_files=(ca, cert, key))
    async with discovery.register(worker("w1")), onlooker(discovery) as looker:
        await looker.until_shown("w1")
    await discovery.close()
    for trusted in (ca, Authority(tmp_path / "other").ca):
        monkeypatch.setenv("ETCD_AUTH_CA", str(trusted))
        assert await doctors(etcd)  # without a certificate of its own
