"""TLS between a source of KV and its pullers: who gets bytes, and the errors of those who get none."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from baton.errors import HandoffFailed
from baton.peer_tls import PeerTls
from baton.telemetry import unauthenticated
from tests.certificates import Authority
from tests.kv_peer import near, pulled, readers_of
from tests.waiting import until
from workers.kv.memory import host_memory
from workers.kv.stream import Stream
from workers.kv.transceiver import CacheTransceiver

PAYLOAD = bytes(range(256)) * 4096


def transceiver(tls: PeerTls | None) -> AbstractAsyncContextManager[CacheTransceiver]:
    return near(CacheTransceiver("127.0.0.1", tls))


@pytest.mark.loops("asyncio", "uvloop")
async def test_pulls_over_tls_share_a_connection_to_ask_on(ours: Authority) -> None:
    async with transceiver(ours.peer("one")) as one, transceiver(ours.peer("two")) as two:
        for _ in range(3):
            ticket = one.offer(host_memory(bytearray(PAYLOAD)))
            assert ticket.wire == one.transport_name == "tcp+tls"
            assert await pulled(two, ticket) == PAYLOAD
            assert await one.moved(ticket) == len(PAYLOAD)
            assert len(two._transport._links) == 1  # noqa: SLF001  nothing public shows it


@pytest.mark.parametrize("source_has_it", [True, False])
async def test_with_tls_on_one_side_only_nothing_is_sent(ours: Authority, source_has_it: bool) -> None:
    tls = ours.peer()
    async with (
        transceiver(tls if source_has_it else None) as source,
        transceiver(None if source_has_it else tls) as here,
    ):
        ticket = source.offer(host_memory(bytearray(PAYLOAD)))
        names = ("tcp+tls", "tcp") if source_has_it else ("tcp", "tcp+tls")
        reason = "the KV is offered over {}, this worker uses {}".format(*names)
        with pytest.raises(HandoffFailed) as failed:
            await pulled(here, ticket)
        assert failed.value.message == reason
        assert not here._transport._links  # noqa: SLF001  there is no connection


async def test_a_puller_that_is_not_trusted_gets_nothing_while_another_pulls(
    ours: Authority, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    foreign = Authority(tmp_path / "theirs")
    tls, mixed = ours.peer(), ours.peer("mixed")
    mixed.connecting.load_cert_chain(*foreign.sign("foreign"))
    num_before = unauthenticated.num_messages
    async with transceiver(tls) as source, transceiver(tls) as good, transceiver(mixed) as bad:
        large = source.offer(host_memory(bytearray(PAYLOAD * 24)))
        running = asyncio.ensure_future(pulled(good, large))
        ticket = source.offer(host_memory(bytearray(PAYLOAD)))
        with pytest.raises(HandoffFailed, match=r"refuses this process's certificate|lost"):
            await pulled(bad, ticket)
        assert unauthenticated.num_messages == num_before + 1
        assert "its certificate is not valid for this process's authority" in log.text
        async with transceiver(foreign.peer()) as other:
            with pytest.raises(HandoffFailed, match="its certificate is not valid for this"):
                await pulled(other, ticket)
        assert await running == PAYLOAD * 24
        assert await pulled(good, ticket) == PAYLOAD


async def test_withdrawing_ends_a_pull_over_tls_at_once(ours: Authority) -> None:
    async with transceiver(ours.peer()) as source, transceiver(ours.peer()) as here:
        large = source.offer(host_memory(bytearray(PAYLOAD * 48)))
        running = asyncio.ensure_future(pulled(here, large))
        await until(lambda: readers_of(source, large), pause_s=0)
        source.withdraw(large)
        with pytest.raises(HandoffFailed):
            await running
        assert await pulled(here, source.offer(host_memory(bytearray(PAYLOAD)))) == PAYLOAD


async def test_bytes_that_have_a_socket_of_their_own_are_given_over_tls_only(ours: Authority) -> None:
    payload, into = host_memory(bytearray(PAYLOAD)), bytearray(len(PAYLOAD))
    async with Stream("127.0.0.1", ours.peer()).lend(payload) as way:
        with pytest.raises(OSError, match=r"closed|reset"):
            await Stream("127.0.0.1").fetch("tcp://127.0.0.1", way, host_memory(into))
        assert into[:7] in (bytes(7), b"\x15\x03\x03\0\x02\x02\x46")  # nothing, or an alert
        await Stream("127.0.0.1", ours.peer()).fetch("tcp://127.0.0.1", way, host_memory(into))
        assert into == PAYLOAD
