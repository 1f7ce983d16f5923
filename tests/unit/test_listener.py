"""ConnectionLimit and eviction of connections; accepting continues after a lack of descriptors."""

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


class Lobby:
    """An admission of strings that records evictions."""

    def __init__(self, limit: int) -> None:
        self.gone: list[str] = []
        self.admission = ConnectionLimit[str](limit, self.gone.append)


def test_up_to_the_limit_all_stay() -> None:
    lobby = Lobby(2)
    assert [lobby.admission.enter(name) for name in "ab"] == [True, True]
    assert lobby.gone == []


def test_the_longest_waiting_makes_room() -> None:
    lobby = Lobby(2)
    for name in "abc":
        assert lobby.admission.enter(name)
    assert lobby.gone == ["a"]


def test_a_served_connection_keeps_its_place() -> None:
    lobby = Lobby(2)
    for name in "ab":
        lobby.admission.enter(name)
    lobby.admission.busy("a")
    lobby.admission.enter("c")
    assert lobby.gone == ["b"]


def test_when_all_are_served_a_newcomer_is_refused() -> None:
    lobby = Lobby(1)
    lobby.admission.enter("a")
    lobby.admission.busy("a")
    assert not lobby.admission.enter("b")
    assert lobby.gone == []


def test_after_being_served_a_connection_waits_as_the_latest() -> None:
    lobby = Lobby(2)
    for name in "ab":
        lobby.admission.enter(name)
    lobby.admission.busy("a")
    lobby.admission.wait("a")
    lobby.admission.enter("c")
    assert lobby.gone == ["b"]


def test_an_evicted_connection_keeps_its_place_until_it_has_ended() -> None:
    """Its descriptor is not free earlier."""
    lobby = Lobby(2)
    for name in "abcd":
        lobby.admission.enter(name)
    assert lobby.gone == ["a", "b"]
    for name in "abcd":
        lobby.admission.leave(name)
    assert [lobby.admission.enter(name) for name in "ef"] == [True, True]
    assert lobby.gone == ["a", "b"]


def test_a_closed_connection_does_not_wait() -> None:
    lobby = Lobby(2)
    lobby.admission.enter("a")
    lobby.admission.leave("a")
    lobby.admission.wait("a")
    assert not lobby.admission.make_room()


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
