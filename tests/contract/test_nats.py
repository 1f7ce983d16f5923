"""The NATS plane: what its connection publishes, an absent server, a slow one, and unknown senders."""

import asyncio
import contextlib
import gc
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from baton import frames
from baton.errors import BrokerLost, WorkerLost
from baton.messages import Reply, Request, TokenChunk
from baton.nats import ECHO, MAC_BYTES, Mailbox, NatsTransport, Publisher
from baton.pace import TICK_S
from baton.streams import WorkerLink
from baton.telemetry import unauthenticated
from tests.alive import Newborn
from tests.clock import now_s
from tests.conftest import LaunchServer, ServerProcess
from tests.planes import Endless, Plane, a_request, count_up, eventually, flood, tokens
from tests.tcp_balancer import TcpBalancer
from tests.waiting import PATIENCE_S, scaled, until

LIVENESS_S = scaled(1.0)


async def test_workers_get_time_to_return_before_calls_go_to_them(own_nats: ServerProcess) -> None:
    async with (
        Plane("nats", own_nats.url).ends(liveness_s=LIVENESS_S) as (caller, worker),
        worker.serve("w", Endless().answer) as address,
    ):
        running = caller.call(address, a_request())
        await anext(running)
        own_nats.freeze()
        with pytest.raises(BrokerLost):
            await anext(running)
        thawed_s = now_s()
        own_nats.thaw()
        await caller.reachable()
        assert now_s() - thawed_s >= 2 * TICK_S


async def test_a_server_that_stands_still_for_a_moment_costs_no_worker(
    nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    stands_still = False
    receive = Mailbox.receive

    async def receive_later(mailbox: Mailbox, message: Any) -> None:
        is_held = stands_still and mailbox.subject.startswith("baton.v1.caller.")
        if is_held:
            held.append((mailbox, message))
        else:
            await receive(mailbox, message)

    monkeypatch.setattr(Mailbox, "receive", receive_later)
    monkeypatch.setattr("baton.nats.ANSWER_S", PATIENCE_S)
    async with (
        Plane("nats", nats_server).ends(liveness_s=LIVENESS_S) as (caller, worker),
        worker.serve("w", Endless().answer) as address,
    ):
        running = caller.call(address, a_request())
        await anext(running)
        waiting = asyncio.ensure_future(anext(running))
        stands_still = True
        await until(lambda: any(message.subject.endswith(f".{ECHO}") for _, message in held))
        await asyncio.sleep(2 * TICK_S)  # longer than a server that works takes
        held.sort(key=lambda each: not each[1].subject.endswith(f".{ECHO}"))
        while held:
            await receive(*held.pop(0))
            for _ in range(9):
                await asyncio.sleep(0)  # turns of the loop, in which the answer counts
        stands_still = False
        assert not (await asyncio.wait([waiting], timeout=4 * TICK_S))[0]
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_it_reconnects_after_any_number_of_attempts_and_is_limited_as_before(
    own_nats: ServerProcess,
) -> None:
    num_attempts = 0

    async def count(_: Exception) -> None:
        nonlocal num_attempts
        num_attempts += 1

    transport = NatsTransport(own_nats.url, liveness_s=9.0, reconnect_time_wait=0.01, error_cb=count)
    await transport.reachable()
    for num_outages in (1, 2):
        own_nats.kill()
        await until(lambda: num_attempts >= 5 * num_outages)  # noqa: B023  awaited here
        await asyncio.to_thread(own_nats.start)
        async with asyncio.timeout(PATIENCE_S):
            await transport.reachable()
    (connection,) = connections_to(own_nats.url)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    await transport.close()


def connections_to(url: str) -> list[socket.socket]:
    """This process's connections to the server."""
    found = []
    for each in gc.get_objects():
        if type(each) is socket.socket and each.fileno() >= 0 and each.family == socket.AF_INET:
            with contextlib.suppress(OSError):  # not connected
                if each.getpeername()[1] == int(url.rpartition(":")[2]):
                    found.append(each)
    return found


@pytest.mark.parametrize("num_bytes", [0, 32 << 20])
async def test_closing_ends_all_that_waits_for_an_absent_server(
    own_nats: ServerProcess, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    publishers = Newborn(Publisher)
    transport = NatsTransport(own_nats.url, liveness_s=LIVENESS_S)
    async with transport.serve("w", Endless().answer) as address:
        running = transport.call(address, a_request())
        await anext(running)
        (publisher,) = publishers.all()
        assert isinstance(publisher, Publisher)
        own_nats.freeze()
        for is_away in (False, True):
            for _ in range(0, num_bytes, 1 << 20):
                publisher.put("subject", bytes(1 << 20), "")
            if not is_away:
                with pytest.raises(BrokerLost):
                    await anext(running)
                assert publisher.writable.is_set()  # what waited is forgotten
    await transport.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    own_nats.thaw()
    await until(lambda: not connections_to(own_nats.url))
    assert "publish_failed" not in caplog.text


async def test_one_who_stops_waiting_for_the_connection_stops_no_other(nats_server: str) -> None:
    transport = NatsTransport(f"{nats_server} , {nats_server} ")
    first, second = (asyncio.create_task(transport.reachable()) for _ in range(2))
    await asyncio.sleep(0)  # both have begun
    first.cancel()
    await second
    await transport.close()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1/w", "nats://baton.v1.caller.1234#k", "nats://$SYS.x#k"]
)
async def test_nothing_is_published_to_what_is_no_worker(nats_server: str, address: str) -> None:
    async with Plane("nats", nats_server).ends() as (caller, _):
        with pytest.raises(WorkerLost, match="is not a NATS worker address"):
            await tokens(caller.call(address, a_request()))


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[Client, Publisher, str]]:
    """A client, a publisher over it, and a subject of this test's own."""
    client, subject = Client(), f"test.{secrets.token_hex(8)}"
    await client.connect(url)
    publisher = Publisher(client, Mailbox(f"{subject}.inbox"))
    try:
        yield client, publisher, subject
    finally:
        await publisher.close()


async def test_a_frame_that_cannot_be_published_holds_up_no_other(nats_server: str) -> None:
    async with connected(nats_server) as (client, publisher, subject):
        received = await client.subscribe(subject)
        publisher.put("no subject", b"", "")
        publisher.put(subject, b"next", "")
        assert (await received.next_msg(timeout=PATIENCE_S)).data == b"next"


@pytest.mark.parametrize(
    ("max_payload", "expected"), [(70_000, 70_000), (2 * frames.MAX_FRAME_BYTES, frames.MAX_FRAME_BYTES)]
)
async def test_a_frame_and_its_mac_fit_a_message(
    launch_nats: LaunchServer, tmp_path: Path, max_payload: int, expected: int
) -> None:
    settings = tmp_path / "nats.conf"
    settings.write_text(f"max_payload: {max_payload}\nmax_pending: 256MB", encoding="utf-8")
    server = launch_nats("-c", str(settings))
    async with connected(server.url) as (_, publisher, _):
        assert publisher.max_frame_bytes == expected - MAC_BYTES
    server.kill()


async def test_what_others_publish_is_counted_and_changes_nothing(nats_server: str) -> None:
    links = Newborn(WorkerLink)
    async with Plane("nats", nats_server).ends() as (caller, worker):
        endless = Endless()
        other = await nats.connect(nats_server)
        async with worker.serve("w", endless.answer) as address:
            subject = address.removeprefix("nats://").partition("#")[0]
            seen = await other.subscribe(f"{subject}.*")
            await other.flush()
            running = caller.call(address, a_request())
            await anext(running)
            frame = await seen.next_msg(timeout=PATIENCE_S)
            num_before = unauthenticated.num_messages
            await other.publish(f"{subject}.new", b"garbage")  # from no one, so it is not even read
            await other.publish(f"{subject}.new", b"garbage", reply="someone")
            await other.publish(frame.subject, b"garbage", reply=frame.reply)
            await other.publish(frame.reply, b"garbage", headers={"Status": "404"})
            await other.publish(frame.reply, frame.data)  # genuine, elsewhere
            await until(lambda: unauthenticated.num_messages >= num_before + 4)
            another = caller.call(address, a_request())
            await anext(another)
            assert unauthenticated.num_messages == num_before + 4
            assert links.count() == 1  # the caller's
            assert not endless.closed.is_set()
            await another.aclose()
            await running.aclose()
        await other.close()


# For tests whose server stands still, which is not to be noticed.
PATIENT: dict[str, Any] = {"liveness_s": scaled(600.0), "ping_interval": 600}


async def test_a_worker_without_a_server_closes_its_generators_at_once(own_nats: ServerProcess) -> None:
    async with Plane("nats", own_nats.url).ends(**PATIENT) as (caller, worker):
        endless = Endless()
        async with worker.serve("w", endless.answer) as address:
            running = caller.call(address, a_request())
            await anext(running)
            own_nats.kill()
            await until(endless.closed.is_set, limit_s=5)  # not after the liveness limit
            await running.aclose()


def relay_to(url: str) -> TcpBalancer:
    return TcpBalancer(int(url.rpartition(":")[2]))


@pytest.mark.loops("asyncio", "uvloop")
async def test_a_process_that_is_cut_off_with_unsent_data_connects_again(nats_server: str) -> None:
    relay = relay_to(nats_server)
    async with Plane("nats", nats_server).ends() as (caller, _), relay.listening() as port:
        worker = NatsTransport(f"nats://127.0.0.1:{port}")
        async with worker.serve("w", lambda r: count_up(r) if r == a_request() else flood(r)) as address:
            running = caller.call(address, a_request(2))
            await anext(running)
            relay.cut()
            with pytest.raises(WorkerLost):
                await tokens(running)
            async with asyncio.timeout(PATIENCE_S):
                await eventually(lambda: caller.call(address, a_request()))
        await worker.close()


async def test_an_idle_process_that_is_cut_off_connects_again(nats_server: str) -> None:
    relay = relay_to(nats_server)
    ends = Plane("nats", nats_server).ends(liveness_s=scaled(1.0))
    async with ends as (caller, _), relay.listening() as port:
        worker = NatsTransport(f"nats://127.0.0.1:{port}")
        async with worker.serve("w", count_up) as address:
            relay.cut()
            with contextlib.suppress(WorkerLost):
                while True:  # until what the relay had begun to read is through
                    await tokens(caller.call(address, a_request()))
            async with asyncio.timeout(PATIENCE_S):
                await eventually(lambda: caller.call(address, a_request()))
        await worker.close()


async def test_generators_wait_while_the_server_takes_nothing(own_nats: ServerProcess) -> None:
    num_made = 0
    may_go_on = asyncio.Event()

    async def flood(_: Request) -> AsyncGenerator[Reply, None]:
        nonlocal num_made
        yield TokenChunk(token_ids=(0,))
        await may_go_on.wait()
        while num_made < 200:  # within the caller's window
            num_made += 1
            yield TokenChunk(token_ids=(1,) * 100_000)
            await asyncio.sleep(0)  # let other tasks run

    async with (
        Plane("nats", own_nats.url).ends(**PATIENT) as (caller, worker),
        worker.serve("w", flood) as address,
    ):
        running = caller.call(address, a_request())
        await anext(running)
        own_nats.freeze()
        may_go_on.set()
        num_before = 0
        while num_before != num_made or not num_made:
            num_before = num_made
            await asyncio.sleep(0.2)  # a message that does not come has no event
        own_nats.thaw()
        assert num_before < 150
        assert len(await tokens(running)) == 200 * 100_000
