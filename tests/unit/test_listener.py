"""The limit of connections and their eviction; accepting goes on when it fails for a while, or for one."""

import asyncio
import contextlib
import errno
import itertools
import socket
import ssl
from collections.abc import Iterator

import pytest

from baton.listener import ConnectionLimit, Listener
from tests.certificates import shared_peer
from tests.clock import jumping, now_s
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("shared_authority")


class Heard(asyncio.Protocol):
    """Hangs up at once, if asked to; records when its connection was made and lost."""

    def __init__(self, *, hangs_up: bool = False) -> None:
        self.made_s: float | None = None
        self.lost_s: float | None = None
        self._hangs_up = hangs_up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made_s = now_s()
        if self._hangs_up:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost_s = now_s()


@contextlib.contextmanager
def listening(protocol: Heard) -> Iterator[tuple[Listener, tuple[str, int]]]:
    sock, tls = socket.create_server(("127.0.0.1", 0)), shared_peer()
    address = sock.getsockname()
    listener = Listener(sock, lambda _: protocol, lambda: None, lambda: tls.accepting)
    try:
        yield listener, address
    finally:
        listener.close()


def connected(address: tuple[str, int]) -> ssl.SSLSocket:
    """A client that has shaken hands and reads nothing."""
    return shared_peer().connecting.wrap_socket(socket.create_connection(address))


@jumping
async def test_it_settles_when_hands_are_shaken_and_hangs_up_on_those_that_take_two_seconds() -> None:
    loop, heard = asyncio.get_running_loop(), Heard()
    with listening(heard) as (listener, address):
        await listener.settled()  # nothing to wait for
        with await loop.run_in_executor(None, connected, address):
            await until(lambda: heard.made_s is not None)
            with socket.create_connection(address) as silent:
                silent.setblocking(False)
                await asyncio.sleep(0.5)  # it is accepted
                began_s = loop.time()
                await listener.settled()
                assert loop.time() - began_s == pytest.approx(2, abs=0.3)
                assert await loop.sock_recv(silent, 1) == b""
                await listener.settled()
            assert heard.lost_s is None


@jumping
async def test_a_client_that_does_not_shake_hands_is_disconnected_after_ten_seconds() -> None:
    loop, heard = asyncio.get_running_loop(), Heard()
    with listening(heard) as (_, address), socket.create_connection(address) as silent:
        silent.setblocking(False)
        assert await loop.sock_recv(silent, 1) == b""
        assert loop.time() == pytest.approx(10, abs=1)
        await until(lambda: heard.lost_s is not None)


@pytest.mark.parametrize(
    ("limit", "steps", "admitted", "evicted"),
    [
        pytest.param(2, "+a +b", "ab", "", id="up to the limit"),
        pytest.param(2, "+a +b +c", "abc", "a", id="the longest waiting makes room"),
        pytest.param(2, "+a +b !a +c", "abc", "b", id="a served connection keeps its place"),
        pytest.param(1, "+a !a +b", "a", "", id="all are served"),
        pytest.param(2, "+a +b !a ~a +c", "abc", "b", id="after being served it waits as the latest"),
        pytest.param(2, "+a +b +c +d -a -b -c -d +e +f", "abcdef", "ab", id="until they have ended"),
        pytest.param(1, "+a -a ~a +b !b +c", "ab", "", id="a closed connection does not wait"),
    ],
)
def test_connections_that_wait_make_room(limit: int, steps: str, admitted: str, evicted: str) -> None:
    """`+`: a new connection; `!`: it is served; `~`: it waits again; `-`: it has ended."""
    gone: list[str] = []
    connections = ConnectionLimit[str](limit, gone.append)
    has_entered = {}
    for step in steps.split():
        name = step[1]
        if step[0] == "+":
            has_entered[name] = connections.enter(name)
        else:
            {"!": connections.busy, "~": connections.wait, "-": connections.leave}[step[0]](name)
    assert "".join(name for name, entered in has_entered.items() if entered) == admitted
    assert "".join(gone) == evicted


class Failing(socket.socket):
    """A listening socket of which the first accepts fail with these errors."""

    def __init__(self, *errors: OSError) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self._errors = list(errors)

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            raise self._errors.pop(0)
        return super().accept()


@pytest.mark.parametrize(
    ("number", "num", "num_evictions"),
    [(errno.ECONNABORTED, 1, 0), (errno.EMFILE, 3, 3), (errno.ENOMEM, 1, 0)],
    ids=["reset in the queue", "no descriptors", "no memory"],
)
async def test_accepting_goes_on_after_a_pause_and_connections_make_room_if_descriptors_lack(
    number: int, num: int, num_evictions: int, caplog: pytest.LogCaptureFixture
) -> None:
    is_paused = number != errno.ECONNABORTED
    taken: list[socket.socket] = []
    evictions: list[None] = []
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(Failing(*[OSError(number, "no") for _ in range(num)]))
        address, began_s = sock.getsockname(), now_s()
        listener = Listener(
            sock, lambda each: taken.append(opened.enter_context(each)), lambda: evictions.append(None)
        )
        opened.enter_context(socket.create_connection(address))
        await until(lambda: taken)
        assert len(evictions) == num_evictions
        assert taken[0].gettimeout() == 0  # it does not block
        assert ("accept=paused" in caplog.text) == is_paused
        assert now_s() - began_s > 0.09 * num * is_paused  # it does not spin
        opened.enter_context(socket.create_connection(address))
        listener.close()
        assert len(taken) == 2  # also after a pause, those that wait are accepted


async def test_processes_that_share_a_socket_get_as_many_connections_each() -> None:
    taken: list[list[socket.socket]] = [[], [], []]
    sock = socket.create_server(("127.0.0.1", 0), backlog=100)
    listeners = [Listener(sock.dup(), each.append, lambda: None, num_open=each.__len__) for each in taken]
    clients = [socket.create_connection(sock.getsockname()) for _ in range(90)]
    await until(lambda: sum(map(len, taken)) == 90)
    assert min(map(len, taken)) >= 20
    for listener in listeners:
        listener.close()
    for each in (*clients, *itertools.chain(*taken), sock):
        each.close()
