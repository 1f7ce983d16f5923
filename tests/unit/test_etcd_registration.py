"""What a registration and a watcher ask of etcd, when, and how often: with a client that only records."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from baton.discovery import MAX_WORKERS
from baton.etcd import PREFIX, EtcdDiscovery, instance_key
from baton.etcd_rpc import Change, EtcdError, EtcdRpc
from tests.clock import jumping
from tests.registry import worker

KEY, VALUE = instance_key(worker("w1")), msgspec.json.encode(worker("w1"))


class Recorded(EtcdRpc):
    """Answers as scripted; `asked` has each call with its time."""

    def __init__(self, endpoints: str, **options: Any) -> None:
        super().__init__(endpoints, **options)
        self.options = options
        self.asked: list[tuple[float, str]] = []
        self.num_leases = 0
        self.is_alive = True
        self.has_key = True
        self.is_away = False
        self.num_tasks = 0
        self.listed: dict[bytes, bytes] = {KEY: VALUE}
        self.limits: list[int] = []
        self.changes: asyncio.Queue[list[Change] | None] = asyncio.Queue()
        self.durations_s: list[float | None] = []

    def _note(self, name: str) -> None:
        self.asked.append((round(asyncio.get_running_loop().time(), 3), name))
        if self.is_away:
            raise EtcdError("unreachable")

    async def grant(self, ttl_s: int) -> int:
        self._note(f"grant {ttl_s}")
        self.num_leases += 1
        return self.num_leases

    async def keep_alive(self, lease: int) -> bool:
        self._note(f"keep {lease}")
        return self.is_alive

    async def has(self, key: bytes) -> bool:
        assert key == KEY
        self._note("has")
        return self.has_key

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        assert (key, value) == (KEY, VALUE)
        self._note(f"put {lease}")

    async def revoke(self, lease: int) -> None:
        self.num_tasks = len(asyncio.all_tasks())
        self._note(f"revoke {lease}")

    async def list_prefix(self, prefix: bytes, limit: int) -> tuple[dict[bytes, bytes], int]:
        assert prefix == PREFIX
        self._note("list")
        self.limits.append(limit)
        return dict(self.listed), 1

    async def watch(
        self, prefix: bytes, revision: int, duration_s: float | None
    ) -> AsyncGenerator[list[Change], None]:
        assert (prefix, revision) == (PREFIX, 2)
        self.durations_s.append(duration_s)
        yield []
        try:
            async with asyncio.timeout(duration_s):
                while (changes := await self.changes.get()) is not None:
                    yield changes
        except TimeoutError:
            return
        raise EtcdError("etcd ended the watch")


@pytest.fixture(autouse=True)
def rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.etcd.EtcdRpc", Recorded)


def discovery(ttl_s: float) -> tuple[EtcdDiscovery, Recorded]:
    made = EtcdDiscovery("http://none", lease_ttl_s=ttl_s)
    assert isinstance(made._rpc, Recorded)  # noqa: SLF001  it is this test's own
    return made, made._rpc  # noqa: SLF001  as above


@jumping
async def test_a_lease_is_renewed_and_what_etcd_lost_is_written_again_and_nothing_else() -> None:
    registry, rpc = discovery(5.5)
    rpc.is_alive = False
    async with registry.register(worker("w1")):
        assert [name for _, name in rpc.asked] == ["grant 6", "put 1"]  # leases have whole seconds
        rpc.asked.clear()
        await asyncio.sleep(2)
        assert [name for _, name in rpc.asked] == ["keep 1", "grant 6", "put 2"]
        rpc.is_alive = True
        rpc.asked.clear()
        await asyncio.sleep(4)
        assert [name for _, name in rpc.asked] == ["keep 2", "has"] * 2
        rpc.has_key = False
        rpc.asked.clear()
        await asyncio.sleep(2)
        assert [name for _, name in rpc.asked] == ["keep 2", "has", "put 2"]
    assert rpc.asked[-1][1] == "revoke 2"
    assert rpc.num_tasks == 1  # nothing renews it any more


@jumping
async def test_a_registration_that_etcd_did_not_take_is_tried_twice_a_second() -> None:
    registry, rpc = discovery(30)
    rpc.is_away = True
    registering = asyncio.ensure_future(registry.register(worker("w1")).__aenter__())
    await asyncio.sleep(1.2)
    assert [time_s for time_s, _ in rpc.asked] == [0, 0.5, 1]
    registering.cancel()


@jumping
async def test_a_watcher_asks_twice_a_second_while_etcd_is_away_and_shows_an_empty_fleet_once() -> None:
    registry, rpc = discovery(30)
    rpc.is_away = True
    async with aclosing(registry.watch()) as snapshots:
        assert await anext(snapshots) == ()
        asking = asyncio.ensure_future(anext(snapshots))
        await asyncio.sleep(1.2)
        assert [time_s for time_s, _ in rpc.asked] == [0, 0.5, 1]
        rpc.is_away = False
        assert await asking == (worker("w1"),)
        assert rpc.limits == [MAX_WORKERS]


@jumping
async def test_workers_that_are_missing_after_an_outage_are_shown_for_one_lease() -> None:
    registry, rpc = discovery(30)
    async with aclosing(registry.watch()) as snapshots:
        assert await anext(snapshots) == (worker("w1"),)
        rpc.listed = {}
        rpc.changes.put_nowait(None)  # the watch breaks
        rpc.changes.put_nowait([Change(KEY, None)])
        began_s = asyncio.get_running_loop().time()
        assert await anext(snapshots) == ()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.5, abs=0.1)
        assert rpc.durations_s == [None, 30, None]
        rpc.changes.put_nowait([Change(KEY, VALUE)])
        assert await anext(snapshots) == (worker("w1"),)
        rpc.changes.put_nowait([Change(KEY, None)])
        assert await anext(snapshots) == ()


@pytest.mark.parametrize(("ttl_s", "timeout_s", "doubt_s"), [(1, 1.0, 5.0), (6, 2.0, 6), (30, 3.0, 30)])
@jumping
async def test_calls_take_a_third_of_a_lease_and_one_to_three_seconds(
    ttl_s: float, timeout_s: float, doubt_s: float
) -> None:
    registry, rpc = discovery(ttl_s)
    assert rpc.options["timeout_s"] == timeout_s
    async with aclosing(registry.watch()) as snapshots:
        await anext(snapshots)
        rpc.changes.put_nowait(None)
        asking = asyncio.ensure_future(anext(snapshots))
        await asyncio.sleep(1)
        assert rpc.durations_s == [None, doubt_s]
        asking.cancel()
        await asyncio.wait([asking])
