"""The limit of connections and their eviction; accepting continues after a lack of descriptors."""

import asyncio
import errno
import itertools
import os
import resource
import socket
import subprocess
import sys

import pytest

from baton.listener import ConnectionLimit, Listener, num_connections
from tests.waiting import until


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


class Short(socket.socket):
    """A listening socket whose first `num_errors` accepts fail for lack of descriptors."""

    num_errors = 3
    num_calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_calls += 1
        if self.num_errors:
            self.num_errors -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_without_descriptors_it_makes_room_pauses_and_goes_on() -> None:
    taken: list[socket.socket] = []
    num_asked = 0

    def make_room() -> None:
        nonlocal num_asked
        num_asked += 1

    sock = Short(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    listener = Listener(sock, taken.append, make_room)
    began = asyncio.get_running_loop().time()
    with socket.create_connection(sock.getsockname()):
        await until(lambda: taken)
    assert num_asked == 3
    assert sock.num_calls <= 5  # it does not spin
    assert asyncio.get_running_loop().time() - began > 0.2
    listener.close()
    for connection in taken:
        connection.close()


async def test_closing_accepts_the_connections_that_wait() -> None:
    taken: list[socket.socket] = []
    sock = socket.create_server(("127.0.0.1", 0), backlog=100)
    listener = Listener(sock, taken.append, lambda: None)
    clients = [socket.create_connection(sock.getsockname()) for _ in range(50)]
    assert not taken  # the event loop has not run
    number = sock.fileno()
    listener.close()
    assert not asyncio.get_running_loop().remove_reader(number)  # it has removed it
    assert len(taken) == 50
    for connection in [*taken, *clients]:
        connection.close()


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


class Ended(asyncio.Protocol):
    """A protocol that records how its connection ended."""

    def __init__(self) -> None:
        self.errors: list[Exception | None] = []

    def connection_lost(self, error: Exception | None) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(64, 64, 64), (64, 200, 200), (64, 1000, 500), (600, 1000, 600)]
)
def test_the_soft_limit_is_raised_towards_the_hard_one_within_reason(
    soft: int, hard: int, raised: int
) -> None:
    code = (
        "import resource; from baton.listener import num_connections, raise_descriptor_limit;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); raise_descriptor_limit(500);"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], num_connections(4, 10**9))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(raised), str(raised // 4)]


def test_a_listener_with_a_reserve_gets_the_rest_if_that_is_more_than_its_part() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert num_connections(2, 10**9, reserve=10) == soft - 10
    assert num_connections(2, 10**9, reserve=soft) == soft // 2
    assert num_connections(2, 7, reserve=10) == 7
