"""The next frontend takes the listening socket of the running one, over real Unix sockets."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from frontend.processes import supervisor
from frontend.processes.supervisor import Port
from tests.waiting import PATIENCE_S, until

OTHER_UID = os.getuid() + 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TAKE_TIMEOUT_S", PATIENCE_S)


class Running:
    """A frontend that serves on a port, until the next one does."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.number = port.listener.getsockname()[1]
        self.passing = asyncio.create_task(port.passed_on())

    async def taken(self) -> Port | None:
        """What a process that starts meanwhile takes."""
        return await asyncio.to_thread(Port.taken, self.number)

    def knock(self) -> socket.socket:
        """The end of a process that asks for the port in its own way."""
        taker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        taker.connect(supervisor._name(self.number))  # noqa: SLF001  where frontends ask
        taker.setblocking(False)
        return taker

    async def end(self) -> None:
        self.passing.cancel()
        await asyncio.wait([self.passing])
        self.port.close()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    made = Running(Port(socket.create_server(("127.0.0.1", 0))))
    await asyncio.sleep(0)  # the task's first turn
    yield made
    await made.end()


async def next_one(running: Running) -> Port:
    taken = await running.taken()
    assert taken is not None
    return taken


async def test_the_running_frontend_drains_once_the_next_one_serves_on_its_socket(running: Running) -> None:
    taken = await next_one(running)
    was_taken = taken.is_taken
    assert os.fstat(taken.listener.fileno()).st_ino == os.fstat(running.port.listener.fileno()).st_ino
    assert not running.passing.done()
    following = Running(taken)
    await running.passing
    assert (was_taken, taken.is_taken) == (True, False)
    running.port.close()
    with socket.create_connection(("127.0.0.1", running.number)) as client:
        connection, address = taken.listener.accept()
        with connection:
            assert address == client.getsockname()
    await following.end()


async def test_the_port_can_be_taken_again_at_once(running: Running) -> None:
    taken = await next_one(running)
    following = Running(taken)
    after = await asyncio.to_thread(Port.taken, running.number)
    assert after is not None
    last = Running(after)
    await asyncio.gather(running.passing, following.passing)
    taken.close()
    await last.end()
    assert await running.taken() is None  # nobody waits at the name


@pytest.mark.parametrize("word", [b"", b"x"])
async def test_a_next_frontend_that_ends_before_it_serves_changes_nothing(
    running: Running, word: bytes
) -> None:
    with running.knock() as taker:
        if word:
            taker.send(word)
    (await next_one(running)).close()
    assert not running.passing.done()


async def test_nothing_is_taken_where_none_runs_or_one_has_stopped_listening_or_hangs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Port.taken(1) is None
    monkeypatch.setattr(supervisor, "TAKE_TIMEOUT_S", 0.05)
    assert Port.taken(running.number) is None  # while nothing else runs here
    monkeypatch.setattr(supervisor, "TAKE_TIMEOUT_S", PATIENCE_S)
    running.port.listener.close()
    assert await running.taken() is None


async def test_a_port_whose_name_is_in_use_is_served_without_being_passed_on(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    second = Running(Port(running.port.listener.dup()))
    await until(lambda: "a next frontend cannot take over the port error=" in caplog.text)
    assert not second.passing.done()
    await second.end()
    (await next_one(running)).close()


async def test_another_users_frontend_neither_gets_nor_gives_a_socket(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process takes itself for another user's; the kernel knows better."""
    name = supervisor._name(running.number)  # noqa: SLF001  which depends on the user
    monkeypatch.setattr(supervisor, "_name", lambda _: name)
    monkeypatch.setattr(os, "getuid", lambda: OTHER_UID)
    with running.knock() as taker:
        assert await asyncio.get_running_loop().sock_recv(taker, 1) == b""
    assert Port.taken(running.number) is None
