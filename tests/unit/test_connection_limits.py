"""One HTTP connection: its timeouts as they are by default, and how it ends when it is refused or dropped."""

import asyncio
import socket

import pytest

from baton.listener import ConnectionLimit
from frontend.http.server import MAX_HEAD_BYTES, Connection, Patience
from tests.one_connection import GET, PATIENCE, POST, Scene, converse
from tests.waiting import until

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
NO_CHUNK = b"xyz\r\n"
BODY_BYTES = 10 * Patience().bytes_a_s
PART = b"a" * BODY_BYTES


@pytest.mark.parametrize(
    ("said", "limit_s", "statuses"),
    [(b"", 75, []), (GET[:5], 30, [b"408"]), (POST.replace(b"10", b"999999999") + PART, 40, [b"408"])],
    ids=["nothing", "a part of the head", "a part of the body"],
)
def test_a_client_has_so_many_seconds(said: bytes, limit_s: float, statuses: list[bytes]) -> None:
    async def part(scene: Scene) -> None:
        scene.say(said)
        scene.check(limit_s - 0.1)
        assert (scene.statuses, scene.pipe.closes) == ([], False)
        scene.check(limit_s + 0.1)
        assert scene.statuses == statuses
        assert scene.pipe.closes is not bool(statuses)

    converse(part, Patience())


def test_a_client_that_reads_nothing_has_a_minute() -> None:
    async def part(scene: Scene) -> None:
        scene.connection.pause_writing()
        for second, is_dropped in (0, False), (59.9, False), (60.1, True):
            scene.pipe.unsent_bytes = 100
            scene.check(second)
            assert scene.pipe.is_aborted is is_dropped

    converse(part, Patience())


@pytest.mark.parametrize(("has_asked", "limit_s"), [(False, 2.0), (True, 2.0)])
def test_a_drain_waits_so_long_for_a_request(has_asked: bool, limit_s: float) -> None:
    async def part(scene: Scene) -> None:
        if has_asked:
            scene.say(GET)
            await scene.answered()
        scene.connection.shutdown()
        scene.check(limit_s - 0.1)
        assert not scene.pipe.closes
        scene.check(limit_s + 0.1)
        assert scene.pipe.closes

    converse(part, Patience())


def test_a_refused_client_has_a_moment_to_read_why() -> None:
    async def part(scene: Scene) -> None:
        scene.say(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
        assert scene.statuses == [b"431"]
        scene.check(PATIENCE.rest_s - 0.1)
        assert not scene.pipe.closes
        scene.check(PATIENCE.rest_s + 0.1)
        assert scene.pipe.closes

    converse(part)


def test_an_answered_client_may_stay_as_long_as_it_is_let() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET)
        await scene.answered()
        await asyncio.sleep(1000)  # jumped over
        assert not scene.pipe.closes

    converse(part)


def test_the_heads_of_all_requests_together_have_no_limit() -> None:
    async def part(scene: Scene) -> None:
        scene.app.may_begin.set()
        scene.app.may_end.set()
        long = GET.replace(b"host", b"y: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\nhost")
        for num in (1, 2, 3):
            scene.say(long)
            await until(lambda: scene.pipe.written.count(b"\r\n\r\n.") == num)  # noqa: B023  at once
        assert scene.statuses == [b"200"] * 3

    converse(part)


def test_a_body_may_be_longer_than_a_head() -> None:
    async def part(scene: Scene) -> None:
        scene.say(POST.replace(b"10", b"%d" % len(PART)))
        for start in range(0, len(PART), MAX_HEAD_BYTES):
            scene.say(PART[start : start + MAX_HEAD_BYTES])
        await scene.answered()
        assert scene.statuses == [b"200"]

    converse(part)


def test_the_rest_of_a_body_that_was_answered_early_is_not_read_for_long() -> None:
    async def part(scene: Scene) -> None:
        scene.say(POST.replace(b"10", b"999999999"))
        await scene.answered()
        scene.say(PART)
        scene.check(PATIENCE.rest_s - 0.1)
        assert not scene.pipe.closes
        scene.check(PATIENCE.rest_s + 0.1)
        assert scene.pipe.closes

    converse(part)


def test_a_fault_behind_a_request_that_waits_ends_both_without_a_word() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET + CHUNKED + NO_CHUNK)
        assert (scene.statuses, scene.pipe.closes) == ([], True)

    converse(part)


def test_a_fault_in_a_body_whose_answer_has_begun_ends_it() -> None:
    async def part(scene: Scene) -> None:
        scene.say(CHUNKED)
        scene.app.may_begin.set()
        await until(lambda: scene.statuses)
        scene.say(NO_CHUNK)
        assert (scene.statuses, scene.pipe.closes) == ([b"200"], True)

    converse(part)


def test_nothing_is_said_to_a_client_whose_connection_is_being_closed() -> None:
    async def part(scene: Scene) -> None:
        scene.say(GET)
        await scene.answered()
        scene.say(GET[:5])
        scene.pipe.closes = True
        scene.check(1000)
        assert (scene.statuses, scene.pipe.has_ended) == ([b"200"], False)

    converse(part)


def test_a_connection_that_makes_room_is_dropped_with_what_its_client_has_not_read() -> None:
    async def part(scene: Scene) -> None:
        scene.connection.evict()
        assert scene.pipe.is_aborted

    converse(part)


async def test_a_connection_that_makes_room_may_have_ended_by_itself() -> None:
    gone = socket.socket()
    gone.close()
    scene = Scene(sock=gone)
    scene.connection.evict()


def test_a_connection_makes_room_only_while_its_client_has_nothing_to_wait_for() -> None:
    async def part(scene: Scene) -> None:
        limit = ConnectionLimit(1, Connection.evict)
        assert limit.enter(scene.connection)
        scene.connection.limit = limit
        scene.say(GET)
        assert not limit.make_room()
        await scene.answered()
        assert limit.make_room()
        assert scene.pipe.is_aborted

    converse(part)
