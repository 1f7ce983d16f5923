"""A body of too many parts is refused before it is decoded; what looks like parts in its texts is text."""

import json

import pytest

from frontend.http import body
from frontend.http.body import MAX_ENTRIES, MAX_PARTS, MAX_UNKNOWN, TooManyParts, check_parts
from frontend.responses.runs import MAX_REFERENCES
from tests.scripted_frontend import MODEL, Client, ScriptedTokens

ITEM = b'{"role":"user","content":"a"}'
MANY = MAX_PARTS // 3 + 1  # items of three parts


def many(what: bytes, num: int) -> bytes:
    return b",".join([what] * num)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"input":[' + many(ITEM, MANY) + b"]}",
        b"{" + many(b'"a":1', MAX_PARTS + 1) + b"}",
        b'{"a":[' + many(b"[]", MAX_PARTS + 1) + b"]}",
        b'{"a":' + b"[" * (MAX_PARTS + 1),
        b'{"a":[' + many(b"7", MAX_ENTRIES + 2) + b"]}",
        b'{"a":["' + b'{[:\\"' * MAX_PARTS + b'",' + many(b"[]", MAX_PARTS + 1) + b"]}",
    ],
    ids=["items", "fields", "arrays", "depth", "numbers", "after a text"],
)
def test_a_body_of_too_many_parts_is_refused(raw: bytes) -> None:
    with pytest.raises(TooManyParts):
        check_parts(raw)


@pytest.mark.parametrize("text", ["{[:,", '"{', "\\{", '\\"[', "\\\\", "日:", "\\\\\\" + '"{'], ids=ascii)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 64 << 10])
def test_texts_have_no_parts(text: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(body, "MAX_PARTS", 4)
    check_parts(json.dumps({"a": [text * 20, text * 30], "b": text}).encode())
    with pytest.raises(TooManyParts):
        check_parts(json.dumps({"a": [text * 20], "b": text, "c": [text]}).encode())


async def test_each_api_refuses_a_body_of_too_many_parts_with_a_400() -> None:
    client = Client(ScriptedTokens("<|return|>"))
    messages = [{"role": "user", "content": "a"}]
    for path, sent in (
        ("/v1/responses", {"input": messages * MANY}),
        ("/v1/chat/completions", {"messages": messages * MANY}),
        ("/v1/messages", {"messages": messages * MANY, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "x": [[]] * (MAX_PARTS + 1)}),
        ("/v1/completions", {"prompt": [1] * (MAX_ENTRIES + 2)}),
    ):
        reply = await client.post(path, {"model": MODEL, **sent})
        assert reply.status == 400
        assert path == "/v1/messages" or reply.error["code"] == "too_many_parts"
    references = [{"type": "item_reference", "id": "a"}] * (MAX_REFERENCES + 1)
    reply = await client.post("/v1/responses", {"model": MODEL, "input": references})
    assert (reply.status, reply.error["param"]) == (400, "input")


async def test_so_many_unknown_fields_are_counted_and_no_more() -> None:
    client = Client(ScriptedTokens("<|return|>"))
    await client.chat(**{f"unknown.{i}": 1 for i in range(5 * MAX_UNKNOWN)})
    assert client.metric("baton_ignored_fields_total", field="other") == MAX_UNKNOWN - 100
