"""EtcdDiscovery over a cluster of three etcd members, of which some are killed, frozen or away."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ServerProcess, binary, free_port
from tests.contract.test_etcd_faults import HEAL_S, TTL_S, client, watched
from tests.registry import worker

NUM_MEMBERS = 3


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    peers = {f"m{i}": f"http://127.0.0.1:{free_port()}" for i in range(NUM_MEMBERS)}
    cluster = ",".join(f"{name}={url}" for name, url in peers.items())
    servers = []
    for name, peer_url in peers.items():
        url, data = f"http://127.0.0.1:{free_port()}", tmp_path / name
        command = [binary("etcd", "etcd-server"), f"--name={name}", f"--data-dir={data}"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        command += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        command += [f"--initial-cluster={cluster}", "--initial-cluster-state=new"]
        servers.append(ServerProcess(command, url, data, ready=b"ready to serve client requests"))
    start(servers)
    yield servers
    for server in servers:
        server.kill()


def start(servers: list[ServerProcess]) -> None:
    """At once: a member alone waits for a quorum."""
    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        list(threads.map(ServerProcess.start, servers))


def all_of(members: list[ServerProcess]) -> str:
    return ",".join(member.url for member in members)


async def test_no_worker_is_lost_when_each_member_is_killed_in_turn(members: list[ServerProcess]) -> None:
    async with watched(all_of(members)) as (working, looker):
        for number, member in enumerate(members):
            member.kill()
            async with working.register(worker(f"during-{number}")):
                await looker.until_shown("w1", f"during-{number}", timeout_s=HEAL_S)
            await asyncio.to_thread(member.start)
        await looker.until_shown("w1", timeout_s=HEAL_S)
        assert "w1" not in looker.lost


@pytest.mark.slow
@pytest.mark.parametrize("frozen", range(NUM_MEMBERS))
async def test_no_worker_is_lost_when_a_member_stands_still(
    members: list[ServerProcess], frozen: int
) -> None:
    """One of them leads, and one is that of the client."""
    async with watched(all_of(members)) as (working, looker):
        members[frozen].freeze()
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
            await asyncio.sleep(2 * TTL_S)
            assert looker.lost == set()
        members[frozen].thaw()


async def test_no_worker_is_lost_while_there_is_no_quorum(members: list[ServerProcess]) -> None:
    async with watched(all_of(members)) as (working, looker):
        for member in members[:2]:
            member.kill()
        await asyncio.sleep(2 * TTL_S)
        assert looker.lost == set()
        await asyncio.to_thread(start, members[:2])
        async with working.register(worker("w2")):
            await looker.until_shown("w1", "w2", timeout_s=HEAL_S)
        async with client(all_of(members)) as fresh, fresh.register(worker("w3")):
            await looker.until(lambda now: {"w1", "w3"} <= {w.worker_id for w in now}, HEAL_S)
        assert "w1" not in looker.lost
