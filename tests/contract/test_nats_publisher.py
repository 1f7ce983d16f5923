"""What one connection to NATS publishes, how much of it may wait, and what strangers publish to it."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from baton import frames
from baton.nats import MAC_BYTES, Mac, Mailbox, Publisher
from baton.streams import WorkerLink
from baton.telemetry import unauthenticated
from baton.transport import Transport
from tests.alive import Newborn
from tests.conftest import LaunchServer
from tests.planes import Endless, Plane, a_request
from tests.waiting import PATIENCE_S, until

HALF = bytes(600_000)
"""More than half of what may wait."""


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


async def test_frames_that_were_forgotten_are_never_published(nats_server: str) -> None:
    async with connected(nats_server) as (client, publisher, subject):
        received = await client.subscribe(subject)
        publisher.put(subject, b"old", "")
        publisher.forget_all()
        publisher.put(subject, b"new", "")
        assert (await received.next_msg(timeout=PATIENCE_S)).data == b"new"


async def later(publisher: Publisher, subject: str) -> None:
    publisher.put(subject, b"late", "")


async def test_what_waits_is_published_before_it_closes_and_nothing_after(nats_server: str) -> None:
    async with connected(nats_server) as (client, _, subject):
        received = await client.subscribe(subject)
        await client.flush()
        async with connected(nats_server) as (_, publisher, _):
            publisher.put(subject, b"waits", "")
            await asyncio.gather(publisher.close(), later(publisher, subject))
        await client.publish(subject, b"last")
        messages = [(await received.next_msg(timeout=PATIENCE_S)).data for _ in range(2)]
        assert messages == [b"waits", b"last"]


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


def test_a_frame_is_genuine_with_its_key_on_its_subject_only() -> None:
    signed = Mac("key", "subject").sign(b"frame")
    assert Mac("key", "subject").opened(signed) == b"frame"
    assert Mac("key", "another").opened(signed) is None
    assert Mac("another", "subject").opened(signed) is None


def test_what_strangers_publish_is_counted_and_changes_nothing(nats_server: str) -> None:
    links = Newborn(WorkerLink)

    async def scenario(caller: Transport, worker: Transport) -> None:
        endless = Endless()
        stranger = await nats.connect(nats_server)
        async with worker.serve("w", endless.answer) as address:
            subject = address.removeprefix("nats://").partition("#")[0]
            seen = await stranger.subscribe(f"{subject}.*")
            await stranger.flush()
            running = caller.call(address, a_request())
            await anext(running)
            frame = await seen.next_msg(timeout=PATIENCE_S)
            num_before = unauthenticated.num_messages
            await stranger.publish(f"{subject}.new", b"garbage")  # from no one, so it is not even read
            await stranger.publish(f"{subject}.new", b"garbage", reply="someone")
            await stranger.publish(frame.subject, b"garbage", reply=frame.reply)
            await stranger.publish(frame.reply, b"garbage", headers={"Status": "404"})
            await stranger.publish(frame.reply, frame.data)  # genuine, elsewhere
            await until(lambda: unauthenticated.num_messages >= num_before + 4)
            another = caller.call(address, a_request())
            await anext(another)
            assert unauthenticated.num_messages == num_before + 4
            assert links.count() == 1  # the caller's
            assert not endless.closed.is_set()
            await another.aclose()
            await running.aclose()
        await stranger.close()

    Plane("nats-asyncio", nats_server).run(scenario)
