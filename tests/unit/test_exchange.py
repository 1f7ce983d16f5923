"""A request and its answer in ASGI's terms: sizes, ids, headers, errors."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from frontend.http.exchange import (
    BodyTooLarge,
    ClientGone,
    EncodedBody,
    Exchange,
    as_baton_error,
    error_headers,
    ignored_header,
)


def exchange(*messages: dict[str, Any], **headers: str) -> Exchange:
    coming = list(messages)

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(_: object) -> None:
        raise AssertionError

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Exchange({"headers": encoded, "query_string": b"a=%ff"}, receive, send)


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def read(each: Exchange, max_bytes: int = 10) -> bytes:
    return asyncio.run(each.read_body(max_bytes))


async def test_a_whole_answer_has_its_length_its_id_and_its_headers() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    each = Exchange({"headers": [(b"x-request-id", b"r7")], "query_string": b""}, no_more, send)
    began = each.started
    await each.answer(201, msgspec.Raw(b'{"a":1}'), [(b"x-more", b"1")])
    assert (began, each.started) == (False, True)
    start, end = sent
    assert start["status"] == 201
    assert dict(start["headers"]) == {
        b"content-type": b"application/json", b"content-length": b"7",
        b"x-request-id": b"r7", b"request-id": b"r7", b"x-more": b"1",
    }  # fmt: skip
    assert (end["body"], end["more_body"]) == (b'{"a":1}', False)


def test_a_client_is_known_by_its_key_under_either_apis_header() -> None:
    openai, anthropic = exchange(authorization="Bearer k"), exchange(x_api_key="k")
    assert len({openai.owner, anthropic.owner, exchange(x_api_key="other").owner, exchange().owner}) == 4
    assert "secret" not in exchange(x_api_key="secret").owner  # it is stored
    assert (exchange().owner, anthropic.owner) == ("", exchange(x_api_key="k").owner)


async def no_more() -> dict[str, Any]:
    raise AssertionError


def test_a_body_may_come_in_parts_up_to_the_limit() -> None:
    assert read(exchange(part(b"12345", more=True), part(b"67890"))) == b"1234567890"
    assert read(exchange(part(b""), content_length="10")) == b""


@pytest.mark.parametrize(
    "each",
    [
        exchange(content_length="11"),
        exchange(part(b"12345678901")),
        exchange(part(b"123456789", more=True), part(b"01", more=True)),  # the rest is not waited for
        exchange(part(b"12345678901"), content_length="none"),
    ],
    ids=["declared", "whole", "in parts", "declared wrongly"],
)
def test_a_body_over_the_limit_is_refused_as_soon_as_that_is_known(each: Exchange) -> None:
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        read(each)


@pytest.mark.parametrize("encoding", ["gzip", "identity, br"])
def test_a_compressed_body_is_refused_before_it_is_read(encoding: str) -> None:
    with pytest.raises(EncodedBody, match=encoding):
        read(exchange(content_encoding=encoding))


def test_a_client_is_gone_when_it_has_disconnected_and_not_when_it_sends() -> None:
    messages = [part(b"1", more=True), part(b"2"), {"type": "http.disconnect"}, part(b"3")]
    each = exchange(*messages)
    asyncio.run(each.client_gone())
    assert read(each) == b"3"


def test_a_client_that_leaves_while_it_sends_is_gone() -> None:
    with pytest.raises(ClientGone):
        read(exchange(part(b"1", more=True), {"type": "http.disconnect"}))


@pytest.mark.parametrize("given", ["a", "run-7/a.b:c_D", "x" * 128])
def test_a_sane_request_id_is_kept(given: str) -> None:
    assert exchange(x_request_id=given).request_id == given


@pytest.mark.parametrize("given", ["", "a b", "a\n", "x" * 129, "é", 'a"', "a,b"])
def test_any_other_request_id_is_replaced_by_a_long_random_one(given: str) -> None:
    made = {exchange(x_request_id=given).request_id for _ in range(20)}
    assert len(made) == 20
    assert {len(each) for each in made} == {32}


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (Overloaded("Full."), [(b"retry-after", b"1")]),
        (Overloaded("Full.", retry_after_s=2.1), [(b"retry-after", b"3")]),
        (NotReady("Stopping.", retry_after_s=0.2), [(b"retry-after", b"1")]),
        (InvalidRequest("Wrong.", retry_after_s=5), []),
    ],
)
def test_who_should_come_back_is_told_when(error: BatonError, header: list[tuple[bytes, bytes]]) -> None:
    assert error_headers(error) == header


def test_the_header_of_ignored_fields_is_short_and_printable() -> None:
    assert ignored_header(()) == []
    assert ignored_header(("a", "b.c")) == [(b"x-baton-ignored", b"a, b.c")]
    ((_, told),) = ignored_header(("a\r\nx: y", "é", "z" * 5000))
    assert told.startswith(rb"a??x: y, \xe9, zzz")
    assert len(told) == 1000


def test_an_unforeseen_failure_is_logged_and_tells_the_client_the_requests_id_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        told = as_baton_error(RuntimeError("secret"), "r7")
    assert (told.status, "r7" in told.message, "secret" in told.message) == (500, True, False)
    assert "secret" in caplog.text


def test_time_that_is_over_is_a_deadline_and_a_named_error_stays_itself() -> None:
    assert isinstance(as_baton_error(TimeoutError(), "r"), DeadlineExceeded)
    full = Overloaded("Full.")
    assert as_baton_error(full, "r") is full


def test_a_query_that_is_no_utf_8_harms_nobody() -> None:
    assert exchange().query == "a=%ff"
