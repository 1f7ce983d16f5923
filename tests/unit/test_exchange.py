"""A request and its answer in ASGI's terms: bodies and their memory, ids, headers, errors."""

import asyncio
import logging
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from frontend.http.body import FREE_BYTES, Bodies, BodiesFull, BodyTooLarge, EncodedBody
from frontend.http.exchange import ClientGone, Exchange, as_baton_error, error_headers, ignored_header
from tests.clock import jumping


def exchange(*messages: dict[str, Any], **headers: str) -> Exchange:
    coming = list(messages)

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(_: object) -> None:
        raise AssertionError

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Exchange({"path": "/", "headers": encoded, "query_string": b"a=%ff"}, receive, send)


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def test_a_client_is_known_by_its_key_under_either_apis_header() -> None:
    openai, anthropic = exchange(authorization="Bearer k"), exchange(x_api_key="k")
    assert len({openai.owner, anthropic.owner, exchange(x_api_key="other").owner, exchange().owner}) == 4
    assert "secret" not in exchange(x_api_key="secret").owner  # it is stored
    assert (exchange().owner, anthropic.owner) == ("", exchange(x_api_key="k").owner)


@pytest.mark.parametrize(
    ("each", "result"),
    [
        (exchange(part(b"12345", more=True), part(b"67890")), b"1234567890"),
        (exchange(part(b""), content_length="10"), b""),
        (exchange(content_length="11"), BodyTooLarge),
        (exchange(part(b"12345678901")), BodyTooLarge),
        (exchange(part(b"123456789", more=True), part(b"01", more=True)), BodyTooLarge),  # waits for no rest
        (exchange(part(b"12345678901"), content_length="none"), BodyTooLarge),
        (exchange(content_encoding="gzip"), EncodedBody),
        (exchange(content_encoding="identity, br"), EncodedBody),
        (exchange(part(b"1", more=True), GONE), ClientGone),
    ],
)
async def test_a_body_has_ten_bytes_at_most_and_no_encoding(
    each: Exchange, result: bytes | type[Exception]
) -> None:
    with nullcontext() if isinstance(result, bytes) else pytest.raises(result):
        async with Bodies(max_body_bytes=10).received(each) as body:
            assert body == result


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        *((each, True) for each in ("a", "run-7/a.b:c_D", "x" * 128)),
        *((each, False) for each in ("", "a b", "a\n", "x" * 129, "é", 'a"', "a,b")),
    ],
)
def test_a_request_id_is_the_clients_if_it_is_valid_else_long_and_random(given: str, is_kept: bool) -> None:
    made = {exchange(x_request_id=given).request_id for _ in range(20)}
    assert made == {given} if is_kept else len(made) == 20
    assert is_kept or {len(each) for each in made} == {32}


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (Overloaded("Full."), [(b"retry-after", b"1")]),
        (Overloaded("Full.", retry_after_s=2.1), [(b"retry-after", b"3")]),
        (NotReady("Stopping.", retry_after_s=0.2), [(b"retry-after", b"1")]),
        (InvalidRequest("Wrong.", retry_after_s=5), []),
    ],
)
def test_a_client_that_should_retry_learns_when(error: BatonError, header: list[tuple[bytes, bytes]]) -> None:
    assert error_headers(error) == header


def test_the_header_of_ignored_fields_is_short_and_printable() -> None:
    assert ignored_header(()) == []
    assert ignored_header(("a", "b.c")) == [(b"x-baton-ignored", b"a, b.c")]
    ((_, value),) = ignored_header(("a\r\nx: y", "é", "z" * 5000))
    assert value.startswith(rb"a??x: y, \xe9, zzz")
    assert len(value) == 1000


def test_an_unforeseen_failure_is_logged_and_the_client_gets_the_requests_id_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        error = as_baton_error(RuntimeError("secret"), "r7")
    assert (error.status, "r7" in error.message, "secret" in error.message) == (500, True, False)
    assert "secret" in caplog.text
    assert isinstance(as_baton_error(TimeoutError(), "r"), DeadlineExceeded)


class Sender:
    """A client that sends parts of a body, and can leave; its body is used until it `may_end`."""

    def __init__(self, bodies: Bodies) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._read(bodies))

    async def _read(self, bodies: Bodies) -> int:
        async def send(_: object) -> None:
            raise AssertionError

        each = Exchange({"path": "/", "headers": [], "query_string": b""}, self._parts.get, send)
        async with bodies.received(each) as body:
            await self.may_end.wait()
            return len(body)

    async def send(self, num_bytes: int, *, more: bool = True) -> None:
        self._parts.put_nowait(part(bytes(num_bytes), more=more))
        for _ in range(5):
            await asyncio.sleep(0)  # the reader takes it

    def leave(self) -> None:
        self._parts.put_nowait(GONE)


@asynccontextmanager
async def senders(num: int, bodies: Bodies) -> AsyncIterator[list[Sender]]:
    found = [Sender(bodies) for _ in range(num)]
    yield found
    for sender in found:
        sender.task.cancel()
    await asyncio.gather(*(sender.task for sender in found), return_exceptions=True)
    assert bodies.num_bytes == 0


@jumping
async def test_long_bodies_share_the_memory_and_short_ones_are_always_read() -> None:
    bodies = Bodies(4 * FREE_BYTES)
    async with senders(4, bodies) as (first, second, third, short):
        await first.send(3 * FREE_BYTES)
        await second.send(3 * FREE_BYTES)
        assert bodies.num_bytes == 4 * FREE_BYTES
        await third.send(FREE_BYTES + 1)
        with pytest.raises(BodiesFull):
            await third.task
        await short.send(FREE_BYTES, more=False)
        short.may_end.set()
        assert await short.task == FREE_BYTES
        await first.send(1, more=False)
        with pytest.raises(BodiesFull):
            await first.task
        assert bodies.num_bytes == 2 * FREE_BYTES


@jumping
async def test_a_body_over_the_budget_is_read_while_there_is_no_other() -> None:
    bodies = Bodies(FREE_BYTES)
    async with senders(3, bodies) as (first, second, short):
        await first.send(3 * FREE_BYTES)
        await second.send(2 * FREE_BYTES)
        with pytest.raises(BodiesFull):
            await second.task
        for sender, num_bytes in ((short, FREE_BYTES), (first, FREE_BYTES)):
            sender.may_end.set()
            await sender.send(num_bytes, more=False)
        assert [await short.task, await first.task] == [FREE_BYTES, 4 * FREE_BYTES]


@jumping
async def test_a_body_counts_until_it_is_used_or_its_client_has_left() -> None:
    bodies = Bodies(4 * FREE_BYTES)
    async with senders(2, bodies) as (used, left):
        await used.send(2 * FREE_BYTES, more=False)
        await left.send(2 * FREE_BYTES)
        assert bodies.num_bytes == 2 * FREE_BYTES
        used.may_end.set()
        await used.task
        assert bodies.num_bytes == FREE_BYTES
        left.leave()
        with pytest.raises(ClientGone):
            await left.task
        assert bodies.num_bytes == 0


async def test_a_body_is_in_memory_once_while_it_is_used() -> None:
    sent = [part(bytes(FREE_BYTES), more=True) for _ in range(40)]
    each = exchange(*sent, part(b""))
    tracemalloc.start()
    try:
        async with Bodies().received(each) as body:
            num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) <= num_bytes < 1.5 * len(body)
