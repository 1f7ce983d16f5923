"""TLS between processes over the TCP plane: which processes connect, and the errors of the others."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.connect import Wires
from baton.errors import WorkerLost
from baton.peer_tls import CA, CERT, KEY, PeerDistrusted, PeerTls
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from tests.certificates import Authority
from tests.clock import jumping, now_s
from tests.planes import Endless, a_request, count_up, tokens
from tests.tcp_balancer import TcpBalancer
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


def mixed(own: Authority, trusted: Authority) -> PeerTls:
    """A process that trusts another authority than the one of its certificate. It finds that at its start, so
    that no process of Baton's can be like that."""
    tls, foreign = trusted.peer("trusted"), own.sign("mixed")
    tls.connecting.load_cert_chain(*foreign)
    tls.accepting.load_cert_chain(*foreign)
    return tls


@contextlib.asynccontextmanager
async def serving(tls: PeerTls | None) -> AsyncIterator[str]:
    worker = TcpTransport(tls=tls)
    async with asyncio.timeout(PATIENCE_S), worker.serve("w", count_up) as address:
        yield address
    await worker.close()


def port_of(address: str) -> int:
    return urlsplit(address).port or 0


async def refusal(address: str, tls: PeerTls | None) -> str:
    """Why a call fails; nothing is lost but that call."""
    caller = TcpTransport(tls=tls)
    try:
        with pytest.raises(PeerDistrusted) as refused:
            await tokens(caller.call(address, a_request(2)))
        return refused.value.message
    finally:
        await caller.close()


async def test_a_process_with_tls_and_one_without_do_not_even_connect(ours: Authority) -> None:
    async with serving(ours.peer()) as address:
        assert address.startswith("tls://127.0.0.1:")
        assert "uses TLS, and this process does not (BATON_PEER_CERT is not set)" in await refusal(
            address, None
        )
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"tcp://127.0.0.1:{plain.getsockname()[1]}/w.secret"
        reason = await refusal(address, ours.peer())
        assert "does not use TLS, and this process does (BATON_PEER_CERT)" in reason
        assert "secret" not in reason
        plain.setblocking(False)
        with pytest.raises(BlockingIOError):
            plain.accept()


async def test_a_caller_of_another_authority_is_refused_by_name_while_streams_go_on(
    ours: Authority, theirs: Authority, log: pytest.LogCaptureFixture
) -> None:
    endless, caller, worker = Endless(), TcpTransport(tls=ours.peer()), TcpTransport(tls=ours.peer())
    async with worker.serve("w", endless.answer) as address:
        running = caller.call(address, a_request())
        await anext(running)
        reason = await refusal(address, theirs.peer())
        assert "its certificate is not valid for this process's authority: self-signed" in reason
        num_before = unauthenticated.num_messages
        reason = await refusal(address, mixed(own=theirs, trusted=ours))
        assert "it closed the connection after this process's certificate" in reason
        assert "worker w was lost" in reason, "the rest of its name is a secret"
        await until(lambda: unauthenticated.num_messages > num_before)
        assert "its certificate is not valid for this process's authority: unable to get" in log.text
        assert not endless.closed.is_set()
        await running.aclose()
        await endless.closed.wait()
    await caller.close()
    await worker.close()


async def test_a_worker_that_was_heard_before_the_connection_broke_is_lost_and_still_trusted(
    ours: Authority,
) -> None:
    endless, caller, worker = Endless(), TcpTransport(tls=ours.peer()), TcpTransport(tls=ours.peer())
    async with asyncio.timeout(PATIENCE_S), worker.serve("w", endless.answer) as address:
        relay = TcpBalancer(port := port_of(address))
        async with relay.listening() as own_port:
            running = caller.call(address.replace(f":{port}/", f":{own_port}/"), a_request())
            await anext(running)
            relay.abort()
            with pytest.raises(WorkerLost) as lost:
                await anext(running)
            assert not isinstance(lost.value, PeerDistrusted)
            await endless.closed.wait()
    await caller.close()
    await worker.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_peer_without_a_certificate_gets_nothing_and_is_counted(
    ours: Authority, log: pytest.LogCaptureFixture, version: ssl.TLSVersion
) -> None:
    context = ours.client()
    context.minimum_version = context.maximum_version = version
    async with serving(ours.peer()) as address:
        port = port_of(address)
        num_before = unauthenticated.num_messages
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"let me in")
            assert await reader.read() == b""
            writer.transport.abort()
        await until(lambda: unauthenticated.num_messages == num_before + 1)
        assert "last=the request plane: TLS with a caller failed: it has no certificate" in log.text


async def test_a_plain_peer_is_disconnected_and_counted(
    ours: Authority, log: pytest.LogCaptureFixture
) -> None:
    async with serving(ours.peer()) as address:
        port = port_of(address)
        num_before = unauthenticated.num_messages
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        assert unauthenticated.num_messages == num_before + 1
        assert "it does not speak TLS" in log.text


@jumping
async def test_a_handshake_ends_after_ten_seconds_and_holds_up_no_end(ours: Authority) -> None:
    tls = ours.peer()
    async with serving(tls) as address:
        host, port = "127.0.0.1", port_of(address)
        reader, writer = await asyncio.open_connection(host, port)
        began_s = now_s()
        assert await reader.read() == b""
        assert now_s() - began_s == pytest.approx(10, abs=0.5)
        writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        caller = TcpTransport(tls=tls)
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        await caller.close()
        began_s = now_s()
    assert await reader.read() == b""
    assert now_s() - began_s < 5
    writer.close()


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
@jumping
async def test_a_worker_that_does_not_shake_hands_is_lost_within_the_liveness_limit(
    ours: Authority, says: bytes
) -> None:
    received = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(4096):
                received.extend(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    caller = TcpTransport(tls=ours.peer())
    began_s = now_s()
    address = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}/w.secret"
    with pytest.raises(WorkerLost, match="does not speak TLS" if says else "does not respond"):
        await tokens(caller.call(address, a_request()))
    assert now_s() - began_s < 3
    await caller.close()
    server.close()
    await until(lambda: received)
    assert b"secret" not in received


async def test_renewed_certificates_are_for_new_connections(
    ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 0.01)
    cert, key = ours.sign("worker")
    tls = PeerTls(cert, key, ours.ca)
    endless, caller, worker = Endless(), TcpTransport(tls=ours.peer()), TcpTransport(tls=tls)
    later = TcpTransport(tls=theirs.peer())
    async with worker.serve("w", endless.answer) as address:
        running = caller.call(address, a_request())
        await anext(running)
        renewed = theirs.sign("worker")
        cert.write_bytes(renewed.cert.read_bytes())
        key.write_bytes(renewed.key.read_bytes())
        await refusal(address, theirs.peer())  # its authority is not renewed yet: nothing has changed
        before = tls.accepting
        ours.ca.write_bytes(theirs.ca.read_bytes())
        await until(lambda: tls.accepting is not before)
        another = later.call(address, a_request())
        await anext(another)
        assert not endless.closed.is_set()
        await another.aclose()
        await running.aclose()
    for each in (later, caller, worker):
        await each.close()


def broken(ours: Authority, theirs: Authority) -> Iterator[tuple[dict[str, str], str]]:
    """Environments, and what is wrong with them."""
    good, other, foreign = ours.environ("good"), ours.environ("other"), theirs.environ("foreign")
    for missing in good:
        yield {k: v for k, v in good.items() if k != missing}, "set all three, or none"
    yield good | {KEY: "/none"}, "/none are not a certificate and its key in PEM: no such file"
    yield good | {KEY: other[KEY]}, "are not a certificate and its key in PEM: key values mismatch"
    yield good | {CA: "/none"}, "/none has no certificates in PEM: no such file"
    yield good | {CA: good[KEY]}, "has no certificates in PEM: no certificate or crl found"
    yield good | {CA: foreign[CA]}, "is not valid for the authority .*: unable to get local issuer"
    yield ours.environ("expired", days=0), "is not valid for the authority .*: certificate has expired"
    yield ours.environ("server", extension="extendedKeyUsage=serverAuth"), "unsuitable certificate purpose"


def test_files_that_no_peer_would_accept_are_named_at_the_start(
    ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ, message in broken(ours, theirs):
        with monkeypatch.context() as own:
            for name, value in environ.items():
                own.setenv(name, value)
            with pytest.raises(ValueError, match=f"{CERT}, {KEY},? (and )?{CA}: .*{message}"):
                Wires(request_plane="nats", discovery_backend="etcd").check()
