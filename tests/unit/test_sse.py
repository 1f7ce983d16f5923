"""The outbox: what is ready goes out together, errors come last, slow readers slow the writers."""

import asyncio

import pytest

from frontend.http.sse import KEEP_ALIVE, MAX_UNSENT_BYTES, Outbox
from tests.clock import jumping
from tests.waiting import PATIENCE_S


async def test_everything_ready_is_taken_as_one_piece() -> None:
    outbox = Outbox(1)
    for data in (b"a", b"", b"b"):
        outbox.put(data)
    outbox.close()
    assert [await outbox.take(), await outbox.take()] == [b"ab", b""]


async def test_a_waiting_reader_gets_the_next_bytes_and_the_end_of_the_last_writer() -> None:
    outbox = Outbox(2)
    for data in (b"a", b"b"):
        reading = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)  # the reader waits
        outbox.put(data)
        outbox.close()
        assert await asyncio.wait_for(reading, PATIENCE_S) == data
    assert await outbox.take() == b""


async def test_the_first_error_comes_after_what_was_put_before_it() -> None:
    outbox = Outbox(3)
    outbox.put(b"a")
    outbox.close()
    assert not outbox.is_over
    outbox.close(ValueError("first"))
    outbox.close(ValueError("second"))
    assert await outbox.take() == b"a"
    assert not outbox.is_over
    with pytest.raises(ValueError, match="first"):
        await outbox.take()


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_a_waiting_reader_gets_the_end(error: ValueError | None) -> None:
    outbox = Outbox(1)
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)  # the reader waits
    outbox.close(error)
    await asyncio.wait([reading], timeout=PATIENCE_S)
    assert reading.exception() is error


async def test_a_failure_drops_what_was_not_taken_and_what_comes_later() -> None:
    outbox = Outbox(1)
    outbox.put(b"a")
    outbox.fail(ValueError("gone"))
    outbox.put(b"b")  # as a background response does, which goes on
    with pytest.raises(ValueError, match="gone"):
        await outbox.take()


async def test_a_writer_ahead_of_a_slow_reader_waits_for_room() -> None:
    outbox = Outbox(1)
    await outbox.send(b"x" * MAX_UNSENT_BYTES)
    was_full = outbox.full
    sending = asyncio.create_task(outbox.send(b"x"))
    await asyncio.sleep(0)  # it waits, or is through
    assert [was_full, outbox.full, sending.done()] == [False, True, False]
    assert len(await outbox.take()) == MAX_UNSENT_BYTES + 1
    await asyncio.wait_for(sending, PATIENCE_S)


@jumping
async def test_an_idle_outbox_sends_comments_at_its_pace() -> None:
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


class Reading:
    """An outbox with a reader, which waits; while the client is not `quick`, a write waits."""

    def __init__(self) -> None:
        self.outbox = Outbox(1)
        self.received: list[bytes] = []
        self.is_quick = asyncio.Event()
        self.is_quick.set()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while data := await self.outbox.take(self._write):
            await self._write(b"reader: " + data)

    async def _write(self, data: bytes) -> None:
        await self.is_quick.wait()
        self.received.append(data)

    async def end(self) -> list[bytes]:
        """What the client has received at the end."""
        self.is_quick.set()
        self.outbox.close()
        await asyncio.wait_for(self._reading, PATIENCE_S)
        return self.received


async def reading() -> Reading:
    made = Reading()
    await asyncio.sleep(0)  # the reader waits
    return made


@jumping
async def test_a_writer_writes_by_itself_while_the_reader_waits_which_is_a_sign_of_life() -> None:
    scene = await reading()
    ticking = asyncio.create_task(scene.outbox.keep_alive(10.0))
    for data in (b"a", b"", b"b"):
        await asyncio.sleep(6.0)
        await scene.outbox.send(data)
    ticking.cancel()
    assert await scene.end() == [b"a", b"b"]


async def test_what_is_sent_before_the_reader_wakes_is_written_with_what_was_put() -> None:
    scene = await reading()
    scene.outbox.put(b"a")
    await scene.outbox.send(b"b")
    assert await scene.end() == [b"reader: ab"]


async def test_what_is_sent_while_the_reader_writes_comes_after_it() -> None:
    scene = await reading()
    scene.is_quick.clear()
    scene.outbox.put(b"a")
    for _ in range(5):
        await asyncio.sleep(0)  # the reader writes
    for data in (b"b", b"c"):
        await asyncio.wait_for(scene.outbox.send(data), PATIENCE_S)
    assert await scene.end() == [b"reader: a", b"reader: bc"]


async def test_a_writer_waits_for_a_client_that_does_not_read() -> None:
    scene = await reading()
    scene.is_quick.clear()
    sending = asyncio.create_task(scene.outbox.send(b"a"))
    await asyncio.sleep(0)  # the writer waits
    assert not sending.done()
    scene.is_quick.set()
    await asyncio.wait_for(sending, PATIENCE_S)
    assert await scene.end() == [b"a"]
