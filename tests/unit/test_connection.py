"""One HTTP connection, second by second, whose client reads slowly, sends slowly, or sends garbage."""

import asyncio

import pytest

from frontend.http.server import MAX_HEAD_BYTES, Connection
from tests.clock import jumping
from tests.one_connection import GET, POST, Pipe, Scene, connected
from tests.waiting import until

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
NO_CHUNK = b"xyz\r\n"


def checked() -> tuple[Connection, Pipe, float]:
    """A connection that was last checked at the given time, when nothing was unsent."""
    scene = connected()
    now_s = asyncio.get_running_loop().time()
    scene.connection.check(now_s)
    return scene.connection, scene.pipe, now_s


def dropped_at(connection: Connection, pipe: Pipe, *seconds: tuple[float, int]) -> float | None:
    """When the client is dropped, if it leaves so many bytes unread at those times."""
    for now_s, pipe.unsent_bytes in seconds:
        connection.check(now_s)
        if pipe.is_aborted:
            return now_s
    return None


@pytest.mark.parametrize("end", ["paused", "closing"])
@jumping
async def test_a_client_is_dropped_when_it_has_read_nothing_for_too_long(end: str) -> None:
    connection, pipe, at_s = checked()
    pipe.closes = end == "closing"
    if end == "paused":
        connection.pause_writing()
    full = [(at_s + second, 100) for second in (1, 30, 59, 61)]
    assert dropped_at(connection, pipe, *full) == at_s + 61


@jumping
async def test_each_byte_that_a_client_reads_gives_it_time() -> None:
    connection, pipe, at_s = checked()
    connection.pause_writing()
    assert dropped_at(connection, pipe, (at_s + 50, 100), (at_s + 55, 99), (at_s + 110, 99)) is None
    assert dropped_at(connection, pipe, (at_s + 114, 98), (at_s + 173, 98)) is None
    assert dropped_at(connection, pipe, (at_s + 175, 98)) == at_s + 175


@jumping
async def test_what_is_not_stuck_is_not_judged() -> None:
    connection, pipe, at_s = checked()
    assert dropped_at(connection, pipe, *((at_s + 50 * i, 100 * i) for i in range(5))) is None
    pipe.closes = True  # and nothing is unsent
    assert dropped_at(connection, pipe, (at_s + 300, 0), (at_s + 400, 0)) is None


@jumping
async def test_a_request_may_come_slowly_while_the_client_waits_for_an_earlier_answer() -> None:
    scene = connected()
    scene.say(GET + GET[:5])
    scene.check(1000)
    assert not scene.pipe.closes
    await scene.answered()


@pytest.mark.parametrize(
    "begun", [GET[:5], POST, POST + b"12345"], ids=["head", "no body", "part of the body"]
)
@jumping
async def test_a_request_that_began_before_the_last_answer_ended_has_a_deadline_too(begun: bytes) -> None:
    scene = connected()
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


@jumping
async def test_a_client_that_is_answered_before_its_body_has_come_is_idle_afterwards() -> None:
    scene = connected()
    scene.say(POST)
    await scene.answered()
    scene.say(b"1234567890")
    scene.check(100)
    assert not scene.pipe.closes
    scene.check(2e6)
    assert scene.statuses == [b"200"]
    assert scene.pipe.closes


@jumping
async def test_what_comes_after_a_refused_head_is_not_read() -> None:
    scene = connected()
    scene.say(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
    scene.say(b"\r\n\r\n")
    for _ in range(20):
        await asyncio.sleep(0)  # turns for what must not happen
    assert scene.app.num_asked == 0
    assert scene.statuses == [b"431"]
    assert scene.pipe.has_ended


@jumping
async def test_the_heads_of_all_requests_together_have_no_limit() -> None:
    scene = connected()
    scene.app.may_begin.set()
    scene.app.may_end.set()
    long = GET.replace(b"host", b"y: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\nhost")
    for num in (1, 2, 3):
        scene.say(long)
        await until(lambda: scene.pipe.written.count(b"\r\n\r\n.") == num)  # noqa: B023  at once
    assert scene.statuses == [b"200"] * 3


@jumping
async def test_a_fault_behind_a_request_that_waits_ends_both_without_a_word() -> None:
    scene = connected()
    scene.say(GET + CHUNKED + NO_CHUNK)
    assert (scene.statuses, scene.pipe.closes) == ([], True)


@jumping
async def test_a_fault_in_a_body_whose_answer_has_begun_ends_it() -> None:
    scene = connected()
    scene.say(CHUNKED)
    scene.app.may_begin.set()
    await until(lambda: scene.statuses)
    scene.say(NO_CHUNK)
    assert (scene.statuses, scene.pipe.closes) == ([b"200"], True)


@jumping
async def test_nothing_is_said_to_a_client_whose_connection_is_being_closed() -> None:
    scene = connected()
    scene.say(GET)
    await scene.answered()
    scene.say(GET[:5])
    scene.pipe.closes = True
    scene.check(1000)
    assert (scene.statuses, scene.pipe.has_ended) == ([b"200"], False)


async def test_a_connection_that_makes_room_may_have_ended_by_itself() -> None:
    Scene().connection.evict()
