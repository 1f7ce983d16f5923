"""Accepting connections when that fails for a while, or for one of them."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from baton.listener import Listener
from tests.waiting import until


class Failing:
    """A listening socket of which the first accepts fail with these errors; then it fails with the last."""

    def __init__(self, *errors: OSError) -> None:
        self.num_accepts = 0
        self._errors = errors
        self._real = socket.create_server(("127.0.0.1", 0))

    def accept(self) -> tuple[socket.socket, object]:
        self.num_accepts += 1
        if self.num_accepts <= len(self._errors):
            raise self._errors[self.num_accepts - 1]
        return self._real.accept()

    def fileno(self) -> int:
        return self._real.fileno()

    def setblocking(self, flag: bool, /) -> None:
        self._real.setblocking(flag)

    def getsockname(self) -> Any:
        return self._real.getsockname()

    def close(self) -> None:
        self._real.close()


class Taken:
    """A client that connects, and what the listener takes."""

    def __init__(self, failing: Failing) -> None:
        self.failing = failing
        self.socks: list[socket.socket] = []
        self.faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.faults.append(context))
        self.listener = Listener(failing, self._take, lambda: None)
        self.client = socket.create_connection(failing.getsockname())

    def close(self) -> None:
        for sock in (self.client, *self.socks):
            sock.close()

    def _take(self, sock: socket.socket) -> None:
        self.socks.append(sock)


def test_a_connection_that_was_reset_in_the_queue_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        taken = Taken(Failing(ConnectionAbortedError(errno.ECONNABORTED, "reset")))
        await until(lambda: taken.socks)
        taken.listener.close()
        taken.close()

    asyncio.run(main())
    assert "accept=paused" not in caplog.text


def test_a_pause_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        full = OSError(errno.EMFILE, "no descriptors")
        taken = Taken(Failing(full, full, full))
        await until(lambda: taken.socks)
        taken.listener.close()
        taken.close()

    asyncio.run(main())
    assert caplog.text.count("accept=paused") == 1


def test_one_that_is_closed_in_its_pause_accepts_no_more() -> None:
    async def main() -> None:
        taken = Taken(Failing(OSError(errno.EMFILE, "no descriptors")))
        await until(lambda: taken.failing.num_accepts == 1)
        taken.listener.close()
        await asyncio.sleep(0.2)  # longer than the pause; what must not happen has no event
        assert (taken.failing.num_accepts, taken.socks, taken.faults) == (1, [], [])
        taken.close()

    asyncio.run(main())


def test_one_that_is_closed_after_a_pause_accepts_those_that_wait() -> None:
    async def main() -> None:
        taken = Taken(Failing(OSError(errno.EMFILE, "no descriptors")))
        await until(lambda: taken.socks)
        late = socket.create_connection(taken.failing.getsockname())
        taken.listener.close()
        assert len(taken.socks) == 2
        late.close()
        taken.close()

    asyncio.run(main())
