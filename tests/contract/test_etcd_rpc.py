"""The etcd client against real servers: dead and silent endpoints, closing, and what is logged."""

import asyncio
from contextlib import aclosing

import pytest

from baton.etcd import EtcdDiscovery
from baton.etcd_rpc import EtcdError, EtcdRpc
from tests.conftest import LaunchServer, free_port
from tests.registry import worker
from tests.waiting import PATIENCE_S, scaled

KEY = b"test_etcd_rpc"


async def test_calls_that_fail_together_leave_the_dead_endpoint_once(etcd_server: str) -> None:
    rpc = EtcdRpc(f"http://127.0.0.1:{free_port()},{etcd_server}", timeout_s=scaled(3))
    calls = [rpc.call("KV/Range", key=KEY) for _ in range(2)]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(failure, EtcdError) for failure in failures)
    await rpc.call("KV/Range", key=KEY)
    await rpc.close()


async def test_a_watch_that_gets_no_answer_fails_in_time(launch_etcd: LaunchServer) -> None:
    etcd = launch_etcd()
    rpc = EtcdRpc(etcd.url, timeout_s=scaled(0.5))
    await rpc.call("KV/Range", key=KEY)
    etcd.freeze()
    try:
        async with asyncio.timeout(PATIENCE_S), aclosing(rpc.watch(KEY, 1, None)) as batches:
            with pytest.raises(EtcdError, match="did not answer"):
                await anext(batches)
    finally:
        etcd.kill()
        await rpc.close()


async def test_closing_ends_running_watches_and_later_calls(etcd_server: str) -> None:
    rpc = EtcdRpc(etcd_server, timeout_s=scaled(3))
    async with asyncio.timeout(PATIENCE_S), aclosing(rpc.watch(KEY, 1, None)) as batches:
        assert await anext(batches) == []
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)  # `anext` waits now
        await rpc.close()
        with pytest.raises(EtcdError):
            await waiting
    with pytest.raises(EtcdError, match="closed"):
        await rpc.call("KV/Range", key=KEY)


async def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    discovery = EtcdDiscovery(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(scaled(1.5)), discovery.register(worker("w1")):  # three attempts
            pass
    await discovery.close()
    assert caplog.text.count("registry=unreachable") == 1
