"""Accepting connections when that fails for a while, or for one of them."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from baton.listener import Listener
from tests.waiting import until


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


class Taken:
    """A client that connects, and what the listener takes."""

    def __init__(self, failing: Failing) -> None:
        self.failing = failing
        self.socks: list[socket.socket] = []
        self.faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.faults.append(context))
        self.num_evictions = 0
        self.listener = Listener(failing, self._take, self._make_room)
        self.client = socket.create_connection(failing.getsockname())

    def close(self) -> None:
        for sock in (self.client, *self.socks):
            sock.close()

    def _take(self, sock: socket.socket) -> None:
        self.socks.append(sock)

    def _make_room(self) -> None:
        self.num_evictions += 1


async def test_a_connection_that_was_reset_in_the_queue_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = Taken(Failing(ConnectionAbortedError(errno.ECONNABORTED, "reset")))
    await until(lambda: taken.socks)
    taken.listener.close()
    taken.close()
    assert "accept=paused" not in caplog.text


async def test_one_that_is_closed_after_a_pause_accepts_those_that_wait() -> None:
    taken = Taken(Failing(OSError(errno.EMFILE, "no descriptors")))
    await until(lambda: taken.socks)
    late = socket.create_connection(taken.failing.getsockname())
    taken.listener.close()
    assert len(taken.socks) == 2
    late.close()
    taken.close()


@pytest.mark.parametrize(
    ("number", "num_evictions"),
    [(errno.EMFILE, 1), (errno.ENFILE, 1), (errno.ENOBUFS, 0), (errno.ENOMEM, 0)],
)
async def test_connections_make_room_only_if_descriptors_lack(number: int, num_evictions: int) -> None:
    taken = Taken(Failing(OSError(number, "no")))
    await until(lambda: taken.socks)
    assert taken.num_evictions == num_evictions
    assert taken.socks[0].gettimeout() == 0  # it does not block
    taken.listener.close()
    taken.close()


async def test_other_tasks_run_between_sixteen_connections_and_the_next() -> None:
    taken = Taken(Failing())
    clients = [socket.create_connection(taken.failing.getsockname()) for _ in range(40)]
    numbers = set()
    while len(taken.socks) < 41:
        numbers.add(len(taken.socks))
        await asyncio.sleep(0)  # a turn of the loop
    assert numbers == {0, 16, 32}
    taken.listener.close()
    for each in clients:
        each.close()
    taken.close()
