"""Streams with an idempotency key: from any event on, another frontend sends the rest."""

import asyncio
import re
from typing import Any

import pytest

from baton.errors import Overloaded
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens

CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "logprobs": 1},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4000,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
}
TEXT = (
    "<|channel|>analysis<|message|>Hm, ë<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
    '<|message|>{"a": 1}<|call|>'
)
KEY = {"idempotency-key": "one"}
AFTER = {"last-event-id": "1.00000000"}


def streamed(
    path: str, after: str = "", *, tokens_per_chunk: int = 3, text: str = TEXT, **fields: Any
) -> Reply:
    """By a frontend of its own."""
    headers = KEY | ({"last-event-id": after} if after else {})
    tokens = ScriptedTokens(text, tokens_per_chunk=tokens_per_chunk)
    body = {"model": MODEL, "stream": True, **BODIES[path], **fields}
    return asyncio.run(Client(tokens, first_event_wait_s=60.0).post(path, body, headers=headers))


def events(reply: Reply) -> list[str]:
    """Without comments, and without the second in which they were sent."""
    found = [event for event in reply.body.decode().split("\n\n") if event and not event.startswith(":")]
    return [re.sub(r'"(created|created_at|completed_at)":\d+', "", event) for event in found]


@pytest.mark.parametrize("path", BODIES)
def test_after_any_event_the_rest_is_sent_however_tokens_come_together(path: str) -> None:
    whole = events(streamed(path, tokens_per_chunk=4))
    ids = [re.search(r"^id: (\S+)$", event, re.MULTILINE) for event in whole]
    numbered = [(place, found[1]) for place, found in enumerate(ids) if found]
    assert len(numbered) >= 10
    assert all(found is None for found in ids[len(numbered) :])  # only the closing events have no id
    assert len({event_id for _, event_id in numbered}) == len(numbered)
    for place, event_id in numbered:
        rest = events(streamed(path, event_id, tokens_per_chunk=1 + place % 5))
        assert rest == whole[place + 1 :]


def test_a_stop_text_ends_the_answer_at_the_same_token_however_tokens_come_together() -> None:
    fields: dict[str, Any] = {
        "text": "abcdefgh" * 5,
        "stop": ["def"],
        "stream_options": {"include_usage": True},
    }
    one = streamed("/v1/completions", tokens_per_chunk=1, **fields)
    assert one.events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    for num in (30, 1000):
        assert events(streamed("/v1/completions", tokens_per_chunk=num, **fields)) == events(one)


def test_an_answer_is_the_same_for_the_same_key_only() -> None:
    def first_request(**headers: str) -> tuple[int, str]:
        tokens = ScriptedTokens(TEXT)
        body = {"model": MODEL, **CHAT}
        reply = asyncio.run(Client(tokens).post("/v1/chat/completions", body, headers=headers))
        return tokens.requests[0].sampling.seed, reply.json["choices"][0]["message"]["tool_calls"][0]["id"]

    one = first_request(**KEY)
    assert first_request(**KEY) == one
    others = [
        first_request(),
        first_request(),
        first_request(**{"idempotency-key": "two"}),
        first_request(**KEY, authorization="Bearer another"),
    ]
    assert len({one, *others}) == 5


async def test_without_a_key_events_have_no_ids() -> None:
    body = {"model": MODEL, "stream": True, **CHAT}
    reply = await Client(ScriptedTokens(TEXT)).post("/v1/chat/completions", body)
    assert b"\nid:" not in reply.body


def test_another_answer_is_not_continued() -> None:
    path = "/v1/completions"
    event_ids = re.findall(r"^id: (\S+)$", streamed(path, text="abcdef").body.decode(), re.MULTILINE)
    for text in ("abXdef", "ab"):
        reply = streamed(path, event_ids[3], text=text)
        assert (reply.status, reply.error["code"]) == (409, "stream_changed")
    assert streamed(path, event_ids[1], text="abXdef").status == 200


@pytest.mark.parametrize(
    ("headers", "fields", "param", "says"),
    [
        *(
            (KEY | {"last-event-id": after}, {}, "Last-Event-ID", "the `id` of the last event")
            for after in ("7", "1.2", "1.0000000g", "-1.00000000", "1.1.00000000", "x" * 300)
        ),
        (KEY | AFTER, {"stream": False}, "Last-Event-ID", "with one choice"),
        (KEY | AFTER, {"n": 2}, "Last-Event-ID", "with one choice"),
        (AFTER, {}, "Last-Event-ID", "the same `Idempotency-Key`"),
        ({"idempotency-key": "k" * 256}, {}, "Idempotency-Key", "255 printable ASCII characters"),
        ({"idempotency-key": "schlüssel"}, {}, "Idempotency-Key", "255 printable ASCII characters"),
    ],
    ids=str,
)
async def test_what_cannot_be_continued_or_repeated_is_refused(
    headers: dict[str, str], fields: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": MODEL, "stream": True, "prompt": "Hi", **fields}
    tokens = ScriptedTokens(TEXT, refuses_with=None if fields else Overloaded("full"))
    reply = await Client(tokens).post("/v1/completions", body, headers=headers)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert says in reply.error["message"]


async def test_only_the_same_request_replaces_a_stored_response() -> None:
    client = Client(ScriptedTokens(TEXT))
    made = [
        (await client.post("/v1/responses", {"model": MODEL, "input": text}, headers=KEY)).json["id"]
        for text in ("Hi", "Hi", "Bye")
    ]
    assert made[0] == made[1] != made[2]


async def test_a_background_response_has_its_own_way_to_go_on() -> None:
    client = Client(ScriptedTokens(TEXT))
    body = {"model": MODEL, "input": "Hi", "background": True}
    reply = await client.post("/v1/responses", body, headers=KEY)
    assert (reply.status, reply.error["param"]) == (400, "Idempotency-Key")
    assert "`starting_after`" in reply.error["message"]
