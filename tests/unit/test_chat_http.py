"""Chat completions through the whole app, with a scripted model: answers streamed and whole, failures."""

from typing import Any

import msgspec
import pytest

from tests.scripted_frontend import (
    CONTEXT_LENGTH,
    MODEL,
    TOKENIZER,
    AliasedFleet,
    Client,
    Reply,
    ScriptedFleet,
    ScriptedTokens,
)

Json = dict[str, Any]

ROUTE = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello wörld<|return|>"
SHORT = "<|channel|>final<|message|>Yes<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
PATCH_CALL = "<|channel|>commentary to=functions.patch code<|message|>{}<|call|>"
F: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PATCH: Json = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
HELD: Json = {"type": "custom", "custom": {"name": "patch", "format": GRAMMAR}}


class Message(msgspec.Struct):
    """A choice, whole or put together from its chunks."""

    content: str | None
    reasoning: str
    calls: list[Json]
    finish_reason: str | None


def message_of(reply: Reply, index: int = 0) -> Message:
    if not reply.headers["content-type"].startswith("text/event-stream"):
        choice = reply.json["choices"][index]
        message = choice["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        reasoning, calls = message.get("reasoning", ""), message.get("tool_calls", [])
        return Message(message["content"], reasoning, calls, choice["finish_reason"])
    gathered = Message("", "", [], None)
    chunks = (event for event in reply.events if event != "[DONE]")
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        assert gathered.finish_reason is None
        gathered.finish_reason, delta = choice["finish_reason"], choice["delta"]
        gathered.content = (gathered.content or "") + delta.get("content", "")
        gathered.reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece.pop("index") == len(gathered.calls)
                gathered.calls.append(piece)
            else:
                call = gathered.calls[piece["index"]]
                field, key = ("custom", "input") if "custom" in call else ("function", "arguments")
                assert set(piece) == {"index", field}
                call[field][key] += piece[field][key]
    return gathered


async def chat(*texts: str, script: Json | None = None, **fields: Any) -> Reply:
    return await Client(ScriptedTokens(*texts, **(script or {})), AliasedFleet()).chat(**fields)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_whole_answer_has_openais_shape_with_the_reasoning() -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = await client.chat()
    [choice] = reply.json["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "Hello wörld", "refusal": None,
        "reasoning": "Think.", "reasoning_content": "Think.",
    }  # fmt: skip
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert reply.json["model"] == MODEL
    num_prompt = len(client.tokens.requests[0].token_ids)
    num_completion = len(TOKENIZER.encode_text(ANSWER, allow_special=True))
    assert reply.json["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens_details": {"reasoning_tokens": 6},
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_a_stream_has_openais_chunks_in_order() -> None:
    reply = await chat(ANSWER, stream=True, stream_options={"include_usage": True})
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert message_of(reply) == Message("Hello wörld", "Think.", [], "stop")
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    without = await chat(ANSWER, stream=True, stream_options={"include_usage": False})
    assert not any("usage" in event for event in without.events)


async def test_a_model_called_by_an_alias_is_named_and_counted_as_itself(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER), AliasedFleet())
    reply = await client.chat(model="mine", stream=stream)
    assert (reply.events[0] if stream else reply.json)["model"] == MODEL
    assert client.metric("baton_requests_total", route=ROUTE, model=MODEL, status="200") == 1


async def test_calls_have_an_id_and_their_own_arguments(stream: bool) -> None:
    text = THINK + PREAMBLE + CALL + "<|start|>assistant" + PATCH_CALL.replace("{}", "*** B")
    message = message_of(await chat(text, tools=[F, PATCH], stream=stream))
    function, custom = message.calls
    assert (message.content, message.finish_reason) == ("One moment.", "tool_calls")
    assert function["id"] != custom["id"]
    assert function["id"].startswith("call_")
    called = {"name": "f", "arguments": '{"city":"Rome"}'}
    assert function == {"id": function["id"], "type": "function", "function": called}
    called = {"name": "patch", "input": "*** B"}
    assert custom == {"id": custom["id"], "type": "custom", "custom": called}


@pytest.mark.parametrize(
    ("tool", "written", "given"),
    [
        (PATCH, '{"input": "*** Begin"}', "*** Begin"),
        (PATCH, '{"other": 1}', '{"other": 1}'),
        (PATCH, '{"input": "a", "other": 1}', '{"input": "a", "other": 1}'),
        (PATCH, '{"input": 1}', '{"input": 1}'),
        (PATCH, '{"a":' * 900 + "1" + "}" * 900, '{"a":' * 900 + "1" + "}" * 900),
        (HELD, '{"input": "a"}', '{"input": "a"}'),
    ],
)
async def test_the_input_of_a_custom_call_is_unwrapped_without_a_grammar(
    tool: Json, written: str, given: str, stream: bool
) -> None:
    text = PATCH_CALL.replace("{}", written) + "<|start|>assistant" + SHORT
    client = Client(ScriptedTokens(text, tokens_per_chunk=2000), ScriptedFleet(context_length=99_999))
    reply = await client.chat(tools=[tool, F], stream=stream, max_tokens=20_000)
    message = message_of(reply)
    [call] = message.calls
    assert (call["custom"]["input"], message.content) == (given, "Yes")


@pytest.mark.parametrize(
    "call", [CALL, CALL.replace("<|message|>", ""), CALL.replace("commentary", "analysis")]
)
@pytest.mark.parametrize("fields", [{"tools": [F], "tool_choice": "none"}, {}])
async def test_a_call_that_is_not_allowed_is_dropped_and_counted(
    call: str, fields: Json, stream: bool
) -> None:
    client = Client(ScriptedTokens(THINK + PREAMBLE + call))
    message = message_of(await client.chat(**fields, stream=stream))
    assert (message.content, message.calls, message.finish_reason) == ("One moment.", [], "stop")
    assert "namespace functions" not in TOKENIZER.decode(client.tokens.requests[0].token_ids)
    assert client.metric("baton_harmony_repairs_total", kind="forbidden_call") == 1


@pytest.mark.parametrize(
    ("text", "fields", "content", "reason"),
    [
        ("<|channel|>final<|message|><|return|>", {}, "", "stop"),
        (PREAMBLE + SHORT, {}, "One moment.\n\nYes", "stop"),
        (ANSWER, {"stop": ["zzz", " wö"]}, "Hello", "stop"),
        (ANSWER, {"stop": "world?"}, "Hello wörld", "stop"),
        (ANSWER, {"stop": "ld!"}, "Hello wörld", "stop"),
        ("<|channel|>final<|message|>Stop!", {"stop_token_ids": TOKENIZER.encode_text("!")}, "Stop", "stop"),
        (SHORT, {"max_completion_tokens": 30, "max_tokens": 10}, "Yes", "stop"),
        (SHORT, {"max_tokens": 9}, "Ye", "length"),
    ],
)
async def test_the_text_ends_where_it_should(
    text: str, fields: Json, content: str, reason: str, stream: bool
) -> None:
    client = Client(ScriptedTokens(text, tokens_per_chunk=2))
    message = message_of(await client.chat(**fields, stream=stream))
    assert (message.content, message.finish_reason) == (content, reason)
    assert client.tokens.num_ended == 1


async def test_reasoning_is_given_in_paragraphs(stream: bool) -> None:
    message = message_of(await chat(THINK + ANSWER, stream=stream))
    assert (message.content, message.reasoning) == ("Hello wörld", "Think.\n\nThink.")


async def test_choices_run_side_by_side_and_share_the_prompt(stream: bool) -> None:
    num_short = len(TOKENIZER.encode_text(SHORT, allow_special=True))
    client = Client(ScriptedTokens(ANSWER, SHORT))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await client.chat(n=2, stream=stream, seed=5, max_tokens=num_short, **options)
    assert [message_of(reply, i).finish_reason for i in range(2)] == ["length", "stop"]
    usage = reply.events[-2]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == 2 * num_short
    assert usage["prompt_tokens"] == len(client.tokens.requests[0].token_ids)
    assert [r.sampling.choice for r in client.tokens.requests] == [0, 1]
    assert len({r.request_id for r in client.tokens.requests}) == 2
    assert {r.sampling.seed for r in client.tokens.requests} == {5}


async def test_logprobs_are_those_of_the_visible_text(stream: bool) -> None:
    reply = await chat(PREAMBLE + ANSWER, logprobs=True, top_logprobs=2, stream=stream, stop="~")
    choices = [e["choices"][0] for e in reply.events[:-1]] if stream else reply.json["choices"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "One moment.Hello wörld".encode()
    assert {name: entries[0][name] for name in ("token", "logprob", "bytes")} == {
        "token": "O", "logprob": -0.5, "bytes": [79],
    }  # fmt: skip
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 50, "max_tokens": 40}, "min_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT_LENGTH}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT_LENGTH}] * 3}, "messages"),
        ({"tools": [F, F]}, "tools[1].function.name"),
        ({"n": 17}, "n"),
    ],
)
async def test_a_bad_value_is_a_400_that_names_it(fields: Json, param: str) -> None:
    reply = await chat(ANSWER, **fields)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")


async def test_ignored_fields_are_named_in_a_header_and_counted() -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = await client.chat(foo=1, nvext={"annotations": []}, reasoning_effort="xhigh")
    assert reply.headers["x-baton-ignored"] == "foo, nvext.annotations, reasoning_effort"
    assert client.metric("baton_ignored_fields_total", field="nvext.annotations") == 1


async def test_the_request_id_goes_from_header_to_worker_and_back() -> None:
    client = Client(ScriptedTokens(ANSWER))
    for given, is_kept in (("run-7/a", True), ("not sane\r\n", False)):
        reply = await client.post(ROUTE, {"model": MODEL, "messages": [HI]}, {"x-request-id": given})
        assert client.tokens.requests[-1].request_id == reply.headers["x-request-id"]
        assert (reply.headers["x-request-id"] == given) is is_kept
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        assert int(reply.headers["content-length"]) == len(reply.body)
