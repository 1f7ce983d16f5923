"""One HTTP connection, second by second, whose client reads slowly, sends slowly, or sends garbage."""

import asyncio
from collections.abc import Callable

import pytest

from frontend.http.server import MAX_HEAD_BYTES, MAX_PIPELINED, Connection
from tests.one_connection import GET, PATIENCE, POST, Pipe, Scene, converse
from tests.waiting import until


def play(part: Callable[[Connection, Pipe, float], None]) -> None:
    """Run `part` with a connection that was last checked at the given time, when nothing was unsent."""

    async def main() -> None:
        scene = Scene()
        scene.connection.connection_made(scene.pipe)
        now_s = asyncio.get_running_loop().time()
        scene.connection.check(now_s)
        part(scene.connection, scene.pipe, now_s)

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


def test_a_request_may_come_slowly_while_the_client_waits_for_an_earlier_answer() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET + GET[:5])
        scene.check(1000)
        assert not scene.pipe.closes
        await scene.answered()

    converse(part)


@pytest.mark.parametrize(
    "begun", [GET[:5], POST, POST + b"12345"], ids=["head", "no body", "part of the body"]
)
def test_a_request_that_began_before_the_last_answer_ended_has_a_deadline_too(begun: bytes) -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET + begun)
        scene.app.may_begin.set()
        await until(lambda: scene.statuses)
        scene.app.may_begin.clear()
        scene.app.may_end.set()
        await until(lambda: scene.pipe.written.endswith(b"\r\n\r\n."))
        scene.check(25)
        assert scene.statuses == [b"200"]
        scene.check(100)
        assert scene.statuses == [b"200", b"408"]

    converse(part)


def test_a_client_that_is_answered_before_its_body_has_come_is_idle_afterwards() -> None:
    async def part(scene: Scene) -> None:
        scene.say(POST)
        await scene.answered()
        scene.say(b"1234567890")
        scene.check(100)
        assert not scene.pipe.closes
        scene.check(2e6)
        assert scene.statuses == [b"200"]
        assert scene.pipe.closes

    converse(part)


def test_so_many_requests_may_wait_behind_one_and_no_more() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET * (1 + MAX_PIPELINED))
        assert not scene.pipe.closes
        scene.say(GET)
        assert scene.pipe.closes

    converse(part)


def test_what_comes_after_a_refused_head_is_not_read() -> None:
    async def part(scene: Scene) -> None:
        scene.say(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
        scene.say(b"\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)  # turns for what must not happen
        assert scene.app.num_asked == 0
        assert scene.statuses == [b"431"]
        assert scene.pipe.has_ended

    converse(part)


def test_a_head_may_be_as_long_as_the_limit() -> None:
    async def part(scene: Scene) -> None:
        begun = b"GET / HTTP/1.1\r\nx: "
        scene.say(begun + b"a" * (MAX_HEAD_BYTES - len(begun)))
        assert not scene.pipe.closes
        assert scene.statuses == []
        scene.say(b"a")
        assert scene.statuses == [b"431"]

    converse(part)


def test_much_garbage_is_refused_once() -> None:
    async def part(scene: Scene) -> None:
        scene.say(bytes(2 * MAX_HEAD_BYTES))
        assert scene.statuses == [b"400"]

    converse(part)


def test_an_answer_that_begins_during_a_drain_tells_that_it_is_the_last() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET)
        scene.connection.shutdown()
        await scene.answered()
        assert b"\r\nconnection: close\r\n" in scene.pipe.written
        assert scene.pipe.closes

    converse(part)


def test_a_client_that_was_answered_just_before_a_drain_may_ask_once_more() -> None:
    async def part(scene: Scene) -> None:
        await asyncio.sleep(100)
        scene.say(GET)
        await scene.answered()
        scene.connection.shutdown()
        scene.check(102)
        assert not scene.pipe.closes
        scene.check(104)
        assert scene.pipe.closes

    converse(part)


def test_a_client_that_was_promised_more_and_asks_for_nothing_is_not_waited_for_long() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET)
        scene.app.may_begin.set()
        await until(lambda: scene.statuses)
        scene.connection.shutdown()
        await scene.answered()
        assert not scene.pipe.closes
        scene.check(1000)
        assert scene.pipe.closes

    converse(part)


@pytest.mark.parametrize(("has_asked", "limit_s"), [(False, PATIENCE.linger_s), (True, PATIENCE.linger_s)])
def test_a_client_that_has_asked_for_nothing_for_so_long_is_closed_by_a_drain_at_once(
    has_asked: bool, limit_s: float
) -> None:
    async def part(scene: Scene, idle_s: float) -> bool:
        if has_asked:
            scene.say(GET)
            await scene.answered()
        await asyncio.sleep(idle_s)  # jumped over
        scene.connection.shutdown()
        return scene.pipe.closes

    async def waiting(scene: Scene) -> None:
        assert not await part(scene, limit_s - 0.1)

    async def closing(scene: Scene) -> None:
        assert await part(scene, limit_s + 0.1)

    converse(waiting)
    converse(closing)
