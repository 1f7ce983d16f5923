"""The outbox: what is ready goes out together, errors come last, slow readers slow the writers."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from frontend.http.sse import KEEP_ALIVE, MAX_UNSENT_BYTES, Outbox
from tests.clock import jumping
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_everything_ready_is_taken_as_one_piece() -> None:
    async def scenario() -> list[bytes]:
        outbox = Outbox(1)
        outbox.put(b"a")
        outbox.put(b"")
        outbox.put(b"b")
        outbox.close()
        return [await outbox.take(), await outbox.take()]

    assert run(scenario()) == [b"ab", b""]


def test_the_reader_waits_for_the_next_bytes_and_ends_with_the_last_writer() -> None:
    async def scenario() -> list[bytes]:
        outbox = Outbox(2)
        taken: list[bytes] = []

        async def read() -> None:
            while data := await outbox.take():
                taken.append(data)

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await asyncio.sleep(0)  # the reader waits now
            outbox.put(b"a")
            outbox.close()
            await until(lambda: taken)
            outbox.put(b"b")
            outbox.close()
        return taken

    assert run(scenario()) == [b"a", b"b"]


def test_a_writers_error_comes_after_what_was_put_before_it() -> None:
    async def scenario() -> None:
        outbox = Outbox(2)
        outbox.put(b"a")
        outbox.close()
        assert not outbox.is_over
        outbox.close(ValueError("broken"))
        assert await outbox.take() == b"a"
        assert not outbox.is_over
        await outbox.take()

    with pytest.raises(ValueError, match="broken"):
        run(scenario())


def test_of_two_errors_the_first_is_told() -> None:
    async def scenario() -> None:
        outbox = Outbox(2)
        outbox.close(ValueError("first"))
        outbox.close(ValueError("second"))
        await outbox.take()

    with pytest.raises(ValueError, match="first"):
        run(scenario())


@pytest.mark.parametrize("error", [None, ValueError("broken")])
def test_a_reader_that_waits_is_told_of_the_end(error: ValueError | None) -> None:
    async def scenario() -> bytes:
        outbox = Outbox(1)
        reading = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)  # the reader waits now
        outbox.close(error)
        return await asyncio.wait_for(reading, 5)

    if error is None:
        assert run(scenario()) == b""
    else:
        with pytest.raises(ValueError, match="broken"):
            run(scenario())


def test_to_fail_is_to_drop_what_was_not_taken_and_what_comes_later() -> None:
    async def scenario() -> None:
        outbox = Outbox(1)
        outbox.put(b"a")
        outbox.fail(ValueError("gone"))
        outbox.put(b"b")  # as a background response does, which goes on
        await outbox.take()

    with pytest.raises(ValueError, match="gone"):
        run(scenario())


def test_a_writer_ahead_of_a_slow_reader_waits_for_room() -> None:
    async def scenario() -> None:
        outbox = Outbox(1)
        outbox.put(b"x")
        await outbox.take()
        fullness = []
        for data in (b"x" * MAX_UNSENT_BYTES, b"x"):
            outbox.put(data)
            fullness.append(outbox.full)
        assert fullness == [False, True]
        waiting = asyncio.create_task(outbox.room())
        await asyncio.sleep(0)  # `room` waits, or is through
        assert not waiting.done()
        assert len(await outbox.take()) == (1 << 20) + 1
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert not outbox.full

    run(scenario())


@jumping
async def test_a_silent_outbox_says_at_its_pace_that_it_is_alive() -> None:
    outbox = Outbox(1)
    ticking = asyncio.create_task(outbox.keep_alive(10.0))
    await asyncio.sleep(35.0)
    assert await outbox.take() == 3 * KEEP_ALIVE
    outbox.put(b"a")
    await asyncio.sleep(10.0)  # the tick at 40 s finds that something was put
    assert await outbox.take() == b"a"
    await asyncio.sleep(10.0)
    assert await outbox.take() == KEEP_ALIVE
    ticking.cancel()


class Client:
    """Takes what is written; while it is `slow`, a write waits."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.is_quick = asyncio.Event()
        self.is_quick.set()

    async def write(self, data: bytes) -> None:
        await self.is_quick.wait()
        self.received.append(data)


async def reader(outbox: Outbox, client: Client) -> None:
    while data := await outbox.take(client.write):
        await client.write(b"reader: " + data)


def test_a_writer_writes_by_itself_while_the_reader_waits() -> None:
    async def scenario() -> list[bytes]:
        outbox, client = Outbox(1), Client()
        await outbox.send(b"a")
        reading = asyncio.create_task(reader(outbox, client))
        await asyncio.sleep(0)  # the reader takes what came before it, and waits
        await outbox.send(b"b")
        await outbox.send(b"")
        await outbox.send(b"c")
        outbox.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        return client.received

    assert run(scenario()) == [b"reader: a", b"b", b"c"]


@jumping
async def test_what_a_writer_writes_by_itself_is_a_sign_of_life() -> None:
    outbox, client = Outbox(1), Client()
    reading = asyncio.create_task(reader(outbox, client))
    ticking = asyncio.create_task(outbox.keep_alive(10.0))
    for _ in range(3):
        await asyncio.sleep(8.0)
        await outbox.send(b"a")
    ticking.cancel()
    outbox.close()
    await reading
    assert client.received == [b"a"] * 3


def test_a_writer_keeps_its_order_while_the_reader_writes() -> None:
    async def scenario() -> list[bytes]:
        outbox, client = Outbox(1), Client()
        client.is_quick.clear()
        outbox.put(b"a")
        reading = asyncio.create_task(reader(outbox, client))
        await asyncio.sleep(0)  # the reader waits for the client
        await outbox.send(b"b")
        await outbox.send(b"c")
        client.is_quick.set()
        outbox.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        return client.received

    assert run(scenario()) == [b"reader: a", b"reader: bc"]


def test_what_is_sent_before_the_reader_wakes_is_written_with_what_was_put() -> None:
    async def scenario() -> list[bytes]:
        outbox, client = Outbox(1), Client()
        reading = asyncio.create_task(reader(outbox, client))
        await asyncio.sleep(0)  # the reader waits
        outbox.put(b"a")
        await outbox.send(b"b")
        outbox.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        return client.received

    assert run(scenario()) == [b"reader: ab"]


def test_what_is_sent_while_a_reader_that_waited_writes_comes_after_it() -> None:
    async def scenario() -> list[bytes]:
        outbox, client = Outbox(1), Client()
        reading = asyncio.create_task(reader(outbox, client))
        await asyncio.sleep(0)  # the reader waits
        client.is_quick.clear()
        outbox.put(b"a")
        for _ in range(5):
            await asyncio.sleep(0)  # the reader writes
        sending = asyncio.create_task(outbox.send(b"b"))
        await asyncio.sleep(0)  # it was sent
        assert sending.done()
        client.is_quick.set()
        outbox.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        return client.received

    assert run(scenario()) == [b"reader: a", b"reader: b"]


def test_a_writer_waits_for_a_client_that_does_not_read() -> None:
    async def scenario() -> list[bytes]:
        outbox, client = Outbox(1), Client()
        reading = asyncio.create_task(reader(outbox, client))
        await asyncio.sleep(0)  # the reader waits
        client.is_quick.clear()
        sending = asyncio.create_task(outbox.send(b"a"))
        await asyncio.sleep(0)  # the writer waits
        assert not sending.done()
        client.is_quick.set()
        await asyncio.wait_for(sending, PATIENCE_S)
        outbox.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        return client.received

    assert run(scenario()) == [b"a"]


def test_a_writer_far_ahead_of_the_reader_waits_when_it_sends() -> None:
    async def scenario() -> None:
        outbox = Outbox(1)
        await outbox.send(b"x" * MAX_UNSENT_BYTES)
        sending = asyncio.create_task(outbox.send(b"x"))
        await asyncio.sleep(0)  # it waits, or is through
        assert not sending.done()
        await outbox.take()
        await asyncio.wait_for(sending, PATIENCE_S)

    run(scenario())


@jumping
async def test_a_stream_that_has_begun_needs_no_comment() -> None:
    outbox = Outbox(1)
    outbox.taken(0.1, b": hello")
    outbox.put(b"first")
    assert await outbox.take() == b"first"
    asyncio.get_running_loop().call_later(1, outbox.put, b"second")
    assert await outbox.take() == b"second"
