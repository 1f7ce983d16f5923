"""What a Messages client gets: blocks, errors, the model's name, counts. Over HTTP, with a scripted model."""

import asyncio
from typing import Any

import pytest

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
)
from frontend.http.exchange import BodyTooLarge
from frontend.messages.answer import PING, MessagesError
from tests.scripted_frontend import MODEL, AliasedFleet, Client, Reply, ScriptedFleet, ScriptedTokens

Json = dict[str, Any]

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
COUNT = "/v1/messages/count_tokens"


def ask(client: Client, path: str = "/v1/messages", **fields: Any) -> Reply:
    limit = {} if path == COUNT else {"max_tokens": 500}
    body = {"model": MODEL, "messages": HI, **limit, **fields}
    return asyncio.run(client.post(path, body))


def requests(client: Client, route: str) -> float:
    return client.metric("baton_requests_total", route=route, model=MODEL, status="200")


def test_a_model_asked_for_by_another_name_is_called_so_and_counted_as_itself() -> None:
    client = Client(ScriptedTokens(ANSWER), AliasedFleet())
    assert ask(client, model="mine").json["model"] == "mine"
    assert requests(client, "/v1/messages") == 1
    assert ask(client, COUNT, model="mine").status == 200
    assert requests(client, COUNT) == 1


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("", {}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a":', {"arguments": '{"a":'}),
        ("[" * 600 + "]" * 600, {"arguments": "[" * 600 + "]" * 600}),
    ],
)
def test_the_input_of_a_call_is_always_an_object(written: str, given: Json) -> None:
    (call,) = ask(Client(ScriptedTokens(CALL % written)), tools=[TOOL], max_tokens=3000).json["content"]
    assert call["input"] == given


def test_input_nested_deeper_than_can_be_read_is_text_in_an_object() -> None:
    deep = '{"a":' * 1500 + "1" + "}" * 1500
    tokens = ScriptedTokens(CALL % deep, tokens_per_chunk=2000)
    reply = ask(Client(tokens, ScriptedFleet(context_length=99_999)), tools=[TOOL], max_tokens=20_000)
    assert reply.json["content"][0]["input"] == {"arguments": deep}


def test_each_message_of_the_model_is_a_block_of_its_own() -> None:
    said = PREAMBLE + CALL % '{"a":1}' + "<|start|>assistant" + CALL % '{"b":2}'
    blocks = ask(Client(ScriptedTokens(said)), tools=[TOOL]).json["content"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert [blocks[0]["text"], blocks[1]["input"], blocks[2]["input"]] == ["One moment.", {"a": 1}, {"b": 2}]
    assert len({block["id"] for block in blocks[1:]}) == 2


def test_text_that_the_limit_cuts_is_given_and_a_stop_string_before_it_not_named() -> None:
    client = Client(ScriptedTokens("<|channel|>final<|message|>Hello"))
    reply = ask(client, max_tokens=10, stop_sequences=["zzz"]).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [
        (None, ["text"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
        ({"type": "enabled", "display": "summarized"}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, ["text"]),
    ],
)
def test_thoughts_are_shown_to_those_who_ask(thinking: Json | None, kinds: list[str]) -> None:
    blocks = ask(Client(ScriptedTokens(ANSWER)), thinking=thinking).json["content"]
    assert [block["type"] for block in blocks] == kinds


def test_a_stream_names_each_event_and_ends_its_blocks() -> None:
    events = ask(Client(ScriptedTokens(ANSWER)), stream=True).body.decode().split("\n\n")
    names = [event.split("\n")[0] for event in events if event]
    assert names[:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    assert names[-3:] == ["event: content_block_stop", "event: message_delta", "event: message_stop"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    tokens = ScriptedTokens(ANSWER, fail_at=36, error=EngineFailure("The engine broke."))
    reply = ask(Client(tokens), stream=True)
    assert reply.status == 200
    last = reply.body.decode().split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    assert reply.events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "The engine broke."},
    }


def test_no_work_is_spent_on_a_prompt_for_which_there_is_no_room() -> None:
    tokens = ScriptedTokens(ANSWER, refuses_with=Overloaded("Full.", retry_after_s=3))
    reply = ask(Client(tokens), system="x" * 100_000)
    assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "rate_limit_error", "3")
    assert tokens.requests == []


async def test_an_idle_stream_is_pinged() -> None:
    async def scenario() -> Reply:
        tokens = ScriptedTokens(ANSWER, pause_at=0)
        client = Client(tokens, first_event_wait_s=0.001, keep_alive_s=0.001)
        written = bytearray()

        def read(data: bytes) -> None:
            written.extend(data)
            if written.count(PING) == 3:
                tokens.go_on.set()

        client.on_write = read
        body = {"model": MODEL, "max_tokens": 500, "messages": HI, "stream": True}
        return await client.post("/v1/messages", body)

    assert (await scenario()).events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (ModelNotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (Overloaded("x", retry_after_s=1), "rate_limit_error"),
        (NoWorkers("x"), "overloaded_error"),
        (DeadlineExceeded(), "timeout_error"),
        (EngineFailure("x"), "api_error"),
    ],
)
def test_an_error_has_anthropics_type(error: BatonError, kind: str) -> None:
    assert MessagesError.of(error).error.type == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (409, "invalid_request_error"),
        (500, "api_error"),
    ],
)
def test_a_status_has_anthropics_type(status: int, kind: str) -> None:
    class Refused(BatonError):
        """An error of that status."""

    Refused.status = status
    assert MessagesError.of(Refused("x")).error.type == kind


@pytest.mark.parametrize("num_bytes", [4096, 10_000])
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_told_in_the_words_that_claude_code_looks_for(
    num_bytes: int, stream: bool
) -> None:
    said = [{"role": "user", "content": "x" * num_bytes}]
    reply = ask(Client(ScriptedTokens(ANSWER)), messages=said, stream=stream)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["message"].startswith(
        "prompt is too long: This model's maximum context length is 4096"
    )


def test_a_conversation_that_ends_with_the_assistant_is_counted() -> None:
    client = Client(ScriptedTokens(ANSWER))
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    counts = [ask(client, COUNT, tools=[TOOL]).json["input_tokens"]]
    for content in ("Hello", [{"type": "text", "text": "Hello"}, call]):
        reply = ask(client, COUNT, tools=[TOOL], messages=[*HI, {"role": "assistant", "content": content}])
        assert reply.status == 200, reply.body
        counts.append(reply.json["input_tokens"])
    assert counts == sorted(set(counts))
    assert ask(client, messages=[*HI, {"role": "assistant", "content": "Hello"}]).status == 400


@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
def test_what_is_ignored_is_named_and_counted(path: str) -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = ask(client, path, messages=IMAGE, odd=1)
    assert reply.headers["x-baton-ignored"] == "odd, messages[].content[].image"
    for field in ("odd", "messages[].content[].image"):
        assert client.metric("baton_ignored_fields_total", field=field) == 1


@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
def test_a_long_body_is_refused(path: str) -> None:
    client = Client(ScriptedTokens(ANSWER), max_body_bytes=200)
    reply = ask(client, path, system="x" * 200)
    assert (reply.status, reply.error["type"]) == (413, "request_too_large")


async def test_tokens_are_counted_with_the_thoughts_that_are_remembered_for_the_key() -> None:
    client = Client(ScriptedTokens(THINK + CALL % "{}"))
    mine, theirs = ({"x-api-key": key} for key in ("mine", "theirs"))
    asked: Json = {"model": MODEL, "messages": HI, "tools": [TOOL]}
    reply = await client.post("/v1/messages", asked | {"max_tokens": 500}, mine)
    (call,) = reply.json["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"]}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    counted = [await client.post(COUNT, asked | {"messages": turns}, key) for key in (mine, theirs)]
    with_thought, without = [reply.json["input_tokens"] for reply in counted]
    assert with_thought > without
