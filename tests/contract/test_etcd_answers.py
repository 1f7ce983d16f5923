"""The etcd client and each answer: refusals, stale tokens, dead endpoints, watches and calls that end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest

from baton.etcd import EtcdDiscovery
from baton.etcd_rpc import EtcdError, EtcdRpc
from baton.messages import WorkerInfo
from tests.conftest import LaunchServer, free_port
from tests.registry import worker
from tests.waiting import PATIENCE_S, scaled, until

KEY = b"test_etcd_answers"
Answer = Callable[[str, dict[str, str]], grpc.StatusCode | tuple[grpc.StatusCode, str] | bytes | None]
Watched = Callable[[], AsyncIterator[bytes]]


class Scripted(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only the stubs' class takes arguments
    """Answers calls with bytes or a status, or never, and watches with what `watched` yields."""

    def __init__(
        self, answer: Answer = lambda _method, _metadata: b"", watched: Watched | None = None
    ) -> None:
        self._answer = answer
        self._watched = watched
        self.calls: list[tuple[str, dict[str, str]]] = []

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method = details.method.rpartition("/")[2]
        metadata = {str(key): str(value) for key, value in details.invocation_metadata}
        self.calls.append((method, metadata))

        async def one(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            answer = self._answer(method, metadata)
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, bytes):
                return answer
            assert answer is not None
            code, words = answer if isinstance(answer, tuple) else (answer, "")
            await context.abort(code, words)
            raise AssertionError("abort raises")

        async def many(
            _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncGenerator[bytes, None]:
            assert self._watched is not None
            async for response in self._watched():
                yield response
            answer = self._answer(method, metadata)
            if isinstance(answer, grpc.StatusCode):
                await context.abort(answer)

        if method == "Watch":
            return grpc.unary_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)


@asynccontextmanager
async def serving(handler: Scripted) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def client(
    *urls: str, timeout_s: float = PATIENCE_S, login: tuple[str, str] | None = None
) -> AsyncIterator[EtcdRpc]:
    rpc = EtcdRpc(",".join(urls), timeout_s=timeout_s, login=login)
    try:
        yield rpc
    finally:
        await rpc.close()


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, True),
        (grpc.StatusCode.PERMISSION_DENIED, True),
        (grpc.StatusCode.UNIMPLEMENTED, True),
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
    ],
)
async def test_a_refusal_is_recognised_and_leaves_no_endpoint(
    code: grpc.StatusCode, is_refused: bool
) -> None:
    first, second = Scripted(lambda _method, _metadata: code), Scripted()
    async with serving(first) as url, serving(second) as other, client(url, other) as rpc:
        with pytest.raises(EtcdError, match=code.name):
            await rpc.call("KV/Range", key=KEY)
        if is_refused:
            with pytest.raises(EtcdError):
                await rpc.call("KV/Range", key=KEY)
        else:
            await rpc.call("KV/Range", key=KEY)
        assert len(second.calls) == (not is_refused)


@pytest.mark.parametrize(
    "words", ["invalid auth token", "auth: revision of auth store is old", "etcdserver: user name is empty"]
)
async def test_a_stale_token_is_renewed_once(words: str) -> None:
    num_logins = 0

    def answer(method: str, metadata: dict[str, str]) -> tuple[grpc.StatusCode, str] | bytes:
        nonlocal num_logins
        if method == "Authenticate":
            num_logins += 1
            return b"\x12\x01%d" % num_logins  # the token
        return b"" if metadata["token"] == "2" else (grpc.StatusCode.UNAUTHENTICATED, words)

    async with serving(Scripted(answer)) as url, client(url, login=("root", "")) as rpc:
        await rpc.call("KV/Range", key=KEY)
    assert num_logins == 2


async def confirmed() -> AsyncIterator[bytes]:
    yield b""


async def ended() -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for response in nothing:
        yield response


async def silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_a_watch_needs_a_leader_and_says_when_etcd_ends_it() -> None:
    handler = Scripted(watched=confirmed)
    async with serving(handler) as url, client(url) as rpc, aclosing(rpc.watch(KEY, 1, None)) as batches:
        assert await anext(batches) == []
        with pytest.raises(EtcdError, match="ended the watch"):
            await anext(batches)
    assert [metadata["hasleader"] for _, metadata in handler.calls] == ["true"]


async def test_a_fleet_outlives_a_watch_that_ends_before_its_first_message() -> None:
    handler = Scripted(watched=ended)
    async with serving(handler) as url, client(url) as rpc:
        with pytest.raises(EtcdError, match="ended the watch"):
            _ = [batch async for batch in rpc.watch(KEY, 1, None)]
        discovery = EtcdDiscovery(url)
        num_before = len(handler.calls)
        watching = asyncio.ensure_future(anext(discovery.watch()))
        await until(lambda: len(handler.calls) >= num_before + 4)  # it lists and watches twice
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await discovery.close()


async def test_the_endpoint_of_a_watch_without_an_answer_is_left() -> None:
    first, second = Scripted(watched=silent), Scripted()
    async with (
        serving(first) as url,
        serving(second) as other,
        client(url, other, timeout_s=scaled(2.0)) as rpc,
    ):
        with pytest.raises(EtcdError, match="did not answer"):
            _ = [batch async for batch in rpc.watch(KEY, 1, None)]
        await rpc.call("KV/Range", key=KEY)
    assert [method for method, _ in second.calls] == ["Range"]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_watch_that_is_left_or_refused_ends_at_the_server(is_refused: bool) -> None:
    has_ended = asyncio.Event()

    async def watched() -> AsyncIterator[bytes]:
        try:
            yield b"\x20\x01" if is_refused else b""
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async with serving(Scripted(watched=watched)) as url, client(url) as rpc:
        async with aclosing(rpc.watch(KEY, 1, None)) as batches:
            outcome = await asyncio.gather(anext(batches), return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            await has_ended.wait()
    assert isinstance(outcome[0], EtcdError) if is_refused else not outcome[0]


async def test_a_refusal_of_a_fresh_token_is_not_tried_again() -> None:
    def answer(method: str, _: dict[str, str]) -> tuple[grpc.StatusCode, str] | bytes:
        return b"\x12\x01t" if method == "Authenticate" else (grpc.StatusCode.PERMISSION_DENIED, "denied")

    handler = Scripted(answer)
    async with serving(handler) as url, client(url, login=("root", "")) as rpc:
        with pytest.raises(EtcdError, match="denied"):
            await rpc.call("KV/Range", key=KEY)
    assert [method for method, _ in handler.calls] == ["Authenticate", "Range"]


async def test_a_call_without_an_answer_fails_in_time() -> None:
    handler = Scripted(lambda _method, _metadata: None)
    async with serving(handler) as url, client(url, timeout_s=0.1) as rpc, asyncio.timeout(PATIENCE_S):
        with pytest.raises(EtcdError, match="DEADLINE_EXCEEDED"):
            await rpc.call("KV/Range", key=KEY)


async def test_no_proxy_is_used_for_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    async with serving(Scripted()) as url, client(url) as rpc:
        await rpc.call("KV/Range", key=KEY)


async def test_a_large_fleet_is_listed(own_etcd: str) -> None:
    async with client(own_etcd) as rpc:
        lease = (await rpc.call("Lease/LeaseGrant", TTL=600)).ID
        for i in range(5):
            await rpc.call("KV/Put", key=b"%b/%d" % (KEY, i), value=bytes(1 << 20), lease=lease)
        values, _ = await rpc.list_prefix(KEY, 9)
        assert len(values) == 5


async def test_a_change_between_the_list_and_the_watch_is_seen(
    own_etcd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = EtcdRpc.list_prefix
    has_registered, may_watch = asyncio.Event(), asyncio.Event()

    async def list_and_wait(rpc: EtcdRpc, prefix: bytes, limit: int) -> tuple[dict[bytes, bytes], int]:
        found = await listed(rpc, prefix, limit)
        has_registered.set()
        await may_watch.wait()
        return found

    monkeypatch.setattr(EtcdRpc, "list_prefix", list_and_wait)
    discovery = EtcdDiscovery(own_etcd)
    async with aclosing(discovery.watch()) as snapshots:
        first = asyncio.ensure_future(anext(snapshots))
        await has_registered.wait()
        async with discovery.register(worker("w1")):
            may_watch.set()
            async with asyncio.timeout(PATIENCE_S):
                fleet: tuple[WorkerInfo, ...] = await first
                while not fleet:
                    fleet = await anext(snapshots)
    await discovery.close()


async def test_a_worker_is_shown_once_and_only_while_its_registration_can_be_read(
    launch_etcd: LaunchServer,
) -> None:
    server = launch_etcd()
    discovery = EtcdDiscovery(server.url)
    async with client(server.url) as rpc, aclosing(discovery.watch()) as snapshots:
        assert await anext(snapshots) == ()
        async with discovery.register(worker("w1")):
            assert len(await anext(snapshots)) == 1
            values, _ = await rpc.list_prefix(b"v1/", 9)
            ((key, value),) = values.items()
            lease = (await rpc.call("Lease/LeaseGrant", TTL=600)).ID
            await rpc.call("KV/Put", key=key, value=value, lease=lease)  # the same again, which is no change
            await rpc.call("KV/Put", key=key, value=b"garbage", lease=lease)
            assert await anext(snapshots) == ()
    await discovery.close()
    server.kill()


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    launch_etcd: LaunchServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "baton")
    server = launch_etcd()
    discovery = EtcdDiscovery(server.url, lease_ttl_s=2.0)

    async def watch_to_the_end() -> None:
        async for _ in discovery.watch():
            pass

    watching = asyncio.ensure_future(watch_to_the_end())
    async with discovery.register(worker("w1")):
        for _ in range(2):
            server.kill()
            await until_logged(caplog, "registry=unreachable")
            server.start()
            await until_logged(caplog, "registry=reachable")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await discovery.close()
    server.kill()


async def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while words not in caplog.text:
            await asyncio.sleep(0.01)  # log lines do not notify
    assert caplog.text.count("registry=") == 1
    caplog.clear()
