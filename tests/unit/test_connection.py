"""One HTTP connection whose client reads slowly or not at all, second by second."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from frontend.http.connection import Connection, Patience

UNREAD_S = 60.0


class Pipe(asyncio.Transport):
    """Holds `unsent_bytes` until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent_bytes = 0
        self.closes = False
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return self.unsent_bytes

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self.closes

    def abort(self) -> None:
        """See asyncio.Transport."""
        self.is_aborted = True

    def pause_reading(self) -> None:
        """See asyncio.Transport."""


def play(part: Callable[[Connection, Pipe, float], None]) -> None:
    """Run `part` with a connection that was last checked at the given time, when nothing was unsent."""

    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Never asked."""

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        patience = Patience(unread_s=UNREAD_S, idle_s=1e9)
        connection, pipe = Connection(config, ServerState(), patience), Pipe()
        connection.connection_made(pipe)
        now_s = asyncio.get_running_loop().time()
        connection.check(now_s)
        part(connection, pipe, now_s)

    asyncio.run(main())


def dropped_at(connection: Connection, pipe: Pipe, *seconds: tuple[float, int]) -> float | None:
    """When the client is dropped, if it leaves so many bytes unread at those times."""
    for now_s, pipe.unsent_bytes in seconds:
        connection.check(now_s)
        if pipe.is_aborted:
            return now_s
    return None


@pytest.mark.parametrize("end", ["paused", "closing"])
def test_a_client_is_dropped_when_it_has_read_nothing_for_too_long(end: str) -> None:
    def part(connection: Connection, pipe: Pipe, at_s: float) -> None:
        pipe.closes = end == "closing"
        if end == "paused":
            connection.pause_writing()
        full = [(at_s + second, 100) for second in (1, 30, 59, 61)]
        assert dropped_at(connection, pipe, *full) == at_s + 61

    play(part)


def test_each_byte_that_a_client_reads_gives_it_time() -> None:
    def part(connection: Connection, pipe: Pipe, at_s: float) -> None:
        connection.pause_writing()
        assert dropped_at(connection, pipe, (at_s + 50, 100), (at_s + 55, 99), (at_s + 110, 99)) is None
        assert dropped_at(connection, pipe, (at_s + 114, 98), (at_s + 173, 98)) is None
        assert dropped_at(connection, pipe, (at_s + 175, 98)) == at_s + 175

    play(part)


def test_what_is_not_stuck_is_not_judged() -> None:
    def part(connection: Connection, pipe: Pipe, at_s: float) -> None:
        assert dropped_at(connection, pipe, *((at_s + 50 * i, 100 * i) for i in range(5))) is None
        pipe.closes = True  # and nothing is unsent
        assert dropped_at(connection, pipe, (at_s + 300, 0), (at_s + 400, 0)) is None

    play(part)


def test_a_client_that_catches_up_between_two_checks_has_read() -> None:
    def part(connection: Connection, pipe: Pipe, at_s: float) -> None:
        connection.pause_writing()
        assert dropped_at(connection, pipe, (at_s - 61, 100)) is None
        connection.resume_writing()
        connection.pause_writing()  # as full as before
        assert dropped_at(connection, pipe, (at_s + 59, 100)) is None
        assert dropped_at(connection, pipe, (at_s + 62, 100)) == at_s + 62

    play(part)
