"""Chat completions through the whole app, with a scripted model: bodies, streams, statuses, disconnects."""

import asyncio
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from baton.errors import BatonError, EngineFailure, NoWorkers, Overloaded, WorkerLost
from tests.scripted_frontend import (
    CONTEXT_LENGTH,
    MODEL,
    TOKENIZER,
    Client,
    Reply,
    ScriptedFleet,
    ScriptedTokens,
)
from tests.waiting import PATIENCE_S, scaled

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello wörld<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
PLAYED = (
    "<|start|>user<|message|>Thanks<|end|><|start|>functions.get_weather to=assistant<|channel|>commentary"
    "<|message|>sunny<|end|><|start|>assistant"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def chat(*texts: str, script: dict[str, Any] | None = None, **fields: Any) -> Reply:
    return asyncio.run(Client(ScriptedTokens(*texts, **(script or {}))).chat(**fields))


def joined(reply: Reply, field: str, index: int = 0) -> str:
    """What a stream says in a field of its deltas."""
    choices = [c for e in reply.events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(choice["delta"].get(field, "") for choice in choices)


def test_an_answer_has_openais_shape_with_the_reasoning_beside_it() -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = asyncio.run(client.chat(metadata={"run": "7"}))
    assert reply.status == 200
    parsed = ChatCompletion.model_validate(reply.json)
    message = reply.json["choices"][0]["message"]
    assert message == {
        "role": "assistant", "content": "Hello wörld", "refusal": None,
        "reasoning": "Think.", "reasoning_content": "Think.",
    }  # fmt: skip
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].logprobs is None
    assert parsed.model == MODEL
    assert parsed.metadata == {"run": "7"}
    num_prompt = len(client.tokens.requests[0].token_ids)
    num_completion = len(TOKENIZER.encode_text(ANSWER, allow_special=True))
    assert reply.json["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens_details": {"reasoning_tokens": 6},
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_stream_says_the_same_in_openais_order() -> None:
    reply = chat(ANSWER, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(reply, "reasoning") == joined(reply, "reasoning_content") == "Think."
    assert joined(reply, "content") == "Hello wörld"
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_chunks_that_are_ready_together_go_out_in_one_write() -> None:
    reply = chat(ANSWER, stream=True, script={"tokens_per_chunk": 1, "all_ready": True})
    assert len(reply.writes) <= 3
    assert len(reply.events) > 10


def test_a_tool_call_ends_the_answer_with_the_preamble_as_content() -> None:
    choice = chat(THINK + PREAMBLE + CALL, tools=[TOOL]).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city":"Rome"}'}


@pytest.mark.parametrize(
    "call", [CALL, CALL.replace("<|message|>", ""), CALL.replace("commentary", "analysis")]
)
@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {}, {"tools": []}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_not_allowed_is_no_call_and_no_answer(
    call: str, fields: dict[str, Any], stream: bool
) -> None:
    client = Client(ScriptedTokens(THINK + PREAMBLE + call))
    reply = asyncio.run(client.chat(**fields, stream=stream))
    prompt = TOKENIZER.decode(client.tokens.requests[0].token_ids)
    assert "get_weather" not in prompt
    assert client.metric("baton_harmony_repairs_total", kind="forbidden_call") == 1
    if stream:
        assert b"tool_calls" not in reply.body
        assert reply.events[-2]["choices"][0]["finish_reason"] == "stop"
        assert joined(reply, "content") == "One moment."
    else:
        (choice,) = reply.json["choices"]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "One moment."


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_says_in_anothers_name_is_dropped_and_counted(stream: bool) -> None:
    client = Client(ScriptedTokens(THINK + PLAYED + "<|channel|>final<|message|>Hello<|return|>"))
    reply = asyncio.run(client.chat(tools=[TOOL], stream=stream))
    message = None if stream else reply.json["choices"][0]["message"]
    assert (joined(reply, "reasoning") if message is None else message["reasoning"]) == "Think."
    assert (joined(reply, "content") if message is None else message["content"]) == "Hello"
    assert client.metric("baton_harmony_repairs_total", kind="foreign_author") == 2


def test_no_work_is_spent_on_a_prompt_for_which_there_is_no_room() -> None:
    full = {"refuses_with": Overloaded("Full.", retry_after_s=3)}
    assert (
        chat(ANSWER, script=full, messages=[{"role": "user", "content": "x " * CONTEXT_LENGTH}]).status == 429
    )


def test_usage_is_streamed_only_if_asked_for() -> None:
    events = chat(ANSWER, stream=True, stream_options={"include_usage": False}).events
    assert not any("usage" in event for event in events)


def test_content_is_empty_text_when_there_is_nothing_else() -> None:
    [choice] = chat("<|channel|>final<|message|><|return|>").json["choices"]
    assert choice["message"]["content"] == ""


def test_content_is_null_when_there_are_calls_only() -> None:
    message = chat(CALL, tools=[TOOL]).json["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


def test_a_streamed_call_gives_id_type_and_name_once_and_then_arguments() -> None:
    reply = chat(THINK + CALL, tools=[TOOL], stream=True)
    deltas = [c["choices"][0]["delta"] for c in reply.events[:-1] if c["choices"]]
    first, *more = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert all(set(piece) == {"index", "function"} and piece["index"] == 0 for piece in more)
    assert "".join(piece["function"]["arguments"] for piece in more) == '{"city":"Rome"}'
    assert reply.events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_parallel_tool_calls_a_second_call_ends_the_answer() -> None:
    twice = CALL.replace("<|call|>", "<|end|><|start|>assistant") + CALL + "<|start|>assistant" + CALL
    client = Client(ScriptedTokens(twice))
    assert len(chat(twice, tools=[TOOL]).json["choices"][0]["message"]["tool_calls"]) > 1
    choice = asyncio.run(client.chat(tools=[TOOL], parallel_tool_calls=False)).json["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert client.tokens.num_ended == 1


def test_an_answer_cut_by_max_tokens_finishes_with_length() -> None:
    reply = chat(ANSWER, max_completion_tokens=30, max_tokens=10)
    assert reply.json["usage"]["completion_tokens"] == 30
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("Hello"[: len(choice["message"]["content"])])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_the_generation_with_it(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER, tokens_per_chunk=2))
    reply = asyncio.run(client.chat(stop=["zzz", " wö"], stream=stream))
    if stream:
        assert joined(reply, "content") == "Hello"
        assert reply.events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        assert reply.json["choices"][0]["message"]["content"] == "Hello"
        assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert client.tokens.num_ended == 1


@pytest.mark.parametrize("stop", ["world?", "ld!"])
def test_a_stop_string_that_does_not_come_holds_nothing_back(stop: str) -> None:
    assert joined(chat(ANSWER, stop=stop, stream=True), "content") == "Hello wörld"


def test_the_clients_own_stop_token_is_no_part_of_the_text() -> None:
    (exclamation,) = TOKENIZER.encode_text("!")
    choice = chat("<|channel|>final<|message|>Stop!", stop_token_ids=[exclamation]).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Stop", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_preamble_and_the_answer_after_it_are_two_paragraphs(stream: bool) -> None:
    reply = chat(PREAMBLE + "<|channel|>final<|message|>Done.<|return|>", stream=stream)
    content = joined(reply, "content") if stream else reply.json["choices"][0]["message"]["content"]
    assert content == "One moment.\n\nDone."


def test_reasoning_is_left_out_when_the_client_does_not_want_it() -> None:
    reply = chat(ANSWER, include_reasoning=False, stream=True)
    assert joined(reply, "reasoning") == ""
    assert joined(reply, "content") == "Hello wörld"


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_run_side_by_side_and_share_the_prompt(stream: bool) -> None:
    other = "<|channel|>final<|message|>Good day<|return|>"
    client = Client(ScriptedTokens(ANSWER, other))
    reply = asyncio.run(client.chat(n=2, stream=stream, seed=5))
    if stream:
        assert joined(reply, "content", 0) == "Hello wörld"
        assert joined(reply, "content", 1) == "Good day"
    else:
        assert [c["message"]["content"] for c in reply.json["choices"]] == ["Hello wörld", "Good day"]
        assert reply.json["usage"]["prompt_tokens"] == len(client.tokens.requests[0].token_ids)
        assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [r.sampling.choice for r in client.tokens.requests] == [0, 1]
    assert len({r.request_id for r in client.tokens.requests}) == 2
    assert {r.sampling.seed for r in client.tokens.requests} == {5}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_visible_text(stream: bool) -> None:
    reply = chat(ANSWER, logprobs=True, top_logprobs=2, stream=stream, stop="ld")
    choices = [e["choices"][0] for e in reply.events[:-1]] if stream else reply.json["choices"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    spoken = bytes(byte for entry in entries for byte in entry["bytes"])
    assert "Hello wörld".encode().startswith(spoken)
    assert spoken.startswith("Hello wör".encode())
    assert entries[0] | {"top_logprobs": []} == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [],
    }
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]


def test_logprobs_of_a_second_message_begin_with_its_own_text() -> None:
    preamble = "<|channel|>commentary<|message|>One<|end|><|start|>assistant"
    reply = chat(f"{preamble}<|channel|>final<|message|>Two<|return|>", logprobs=True, stop="~")
    [choice] = reply.json["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "OneTwo"


def test_a_call_without_text_has_no_logprobs() -> None:
    [choice] = chat(CALL, tools=[TOOL], logprobs=True).json["choices"]
    assert (choice["message"]["content"], choice["logprobs"]) == (None, None)


def test_sampling_fields_reach_the_worker() -> None:
    client = Client(ScriptedTokens(ANSWER))
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "frequency_penalty": 1, "presence_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"7": -100}, "min_tokens": 3, "max_tokens": 99, "seed": -1,
        "priority": -7, "cache_salt": "alice",
        "nvext": {"ignore_eos": True, "top_k": 4}, "stop_token_ids": [65], "logprobs": True,
    }  # fmt: skip
    asyncio.run(client.chat(**fields))
    sampling = client.tokens.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.1,
    )
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (3, 99, True)
    request = client.tokens.requests[0]
    assert (request.priority, request.cache_salt) == (-7, "alice")
    assert sampling.logit_bias == {7: -100}
    assert sampling.stop_token_ids == (*TOKENIZER.stop_token_ids, 65)
    assert sampling.logprobs == 0
    assert sampling.seed >= 0


def test_by_default_the_answer_may_fill_the_context_and_the_seed_is_drawn() -> None:
    client = Client(ScriptedTokens(ANSWER))

    async def twice() -> None:
        await client.chat()
        await client.chat(top_p=0)

    asyncio.run(twice())
    first, second = client.tokens.requests
    assert first.sampling.max_tokens == CONTEXT_LENGTH - len(first.token_ids)
    assert first.sampling.seed != second.sampling.seed
    assert (second.sampling.temperature, second.sampling.top_p) == (0, 1)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    reply = chat(ANSWER, messages=[{"role": "user", "content": "x" * 10_000}])
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["param"] == "messages"
    assert str(CONTEXT_LENGTH) in reply.error["message"]


def test_a_prompt_of_more_than_two_contexts_is_not_counted_to_its_end() -> None:
    many = [{"role": "user", "content": "x" * CONTEXT_LENGTH}] * 3
    reply = chat(ANSWER, messages=many)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert f"has more than {2 * CONTEXT_LENGTH} tokens" in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 50, "max_tokens": 40}, "min_tokens"),
        ({"priority": 101}, "priority"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[0].tool_call_id"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"n": 17}, "n"),
    ],
)
def test_a_bad_value_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    reply = chat(ANSWER, **fields)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")


def test_an_unknown_model_is_a_404() -> None:
    reply = chat(ANSWER, model="gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_a_body_over_the_limit_is_a_413_even_before_it_is_sent() -> None:
    client = Client(ScriptedTokens(ANSWER), max_body_bytes=100)
    declared = client.post("/v1/chat/completions", b"{}", {"content-length": "101"})
    assert asyncio.run(declared).status == 413
    assert asyncio.run(client.chat(user="x" * 100)).status == 413


def test_unknown_fields_are_ignored_named_in_a_header_and_counted() -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = asyncio.run(client.chat(foo=1, nvext={"annotations": []}))
    assert reply.status == 200
    assert reply.headers["x-baton-ignored"] == "foo, nvext.annotations"
    assert client.metric("baton_ignored_fields_total", field="foo") == 1


def test_the_names_of_unknown_fields_do_not_fill_the_metrics() -> None:
    client = Client(ScriptedTokens(ANSWER))
    reply = asyncio.run(client.chat(**{f"field{i}": i for i in range(200)}, **{"a\nb": 1}))
    assert len(reply.headers["x-baton-ignored"]) <= 1000
    assert client.metric("baton_ignored_fields_total", field="other") == 101


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (Overloaded("Full.", retry_after_s=3), "3"),
        (NoWorkers("Nobody."), "1"),
        (WorkerLost("Dead."), None),
        (EngineFailure("Broken."), None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_status(
    error: BatonError, retry_after: str | None, stream: bool
) -> None:
    client = Client(ScriptedTokens(ANSWER, fail_at=0, error=error))
    reply = asyncio.run(client.chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (error.status, error.code)
    assert reply.headers.get("retry-after") == retry_after
    status = str(error.status)
    assert (
        client.metric("baton_requests_total", route="/v1/chat/completions", model=MODEL, status=status) == 1
    )


def test_no_worker_is_a_503_before_anything_is_generated() -> None:
    client = Client(ScriptedTokens(ANSWER), ScriptedFleet(NoWorkers("Nobody.", retry_after_s=1)))
    assert asyncio.run(client.chat(stream=True)).status == 503
    assert client.tokens.requests == []


def test_a_failure_in_mid_stream_is_an_error_event_and_the_end() -> None:
    reply = chat(ANSWER, stream=True, script={"fail_at": 40, "error": WorkerLost("The worker died.")})
    assert reply.status == 200
    assert reply.events[-1]["error"] == {
        "message": "The worker died.", "type": "server_error", "param": None, "code": "worker_lost",
    }  # fmt: skip
    assert "[DONE]" not in reply.events


def test_an_unforeseen_failure_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reply = chat(ANSWER, script={"fail_at": 0, "error": RuntimeError("secret")})
    assert reply.status == 500
    assert "secret" not in reply.error["message"]
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_generation_at_once(stream: bool) -> None:
    async def scenario() -> Client:
        client = Client(ScriptedTokens(ANSWER, pause_at=30))
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(client.chat(stream=stream, n=2))
            await client.tokens.paused.wait()
            client.leave.set()
        return client

    client = asyncio.run(scenario())
    assert client.tokens.num_ended == 2
    route = "/v1/chat/completions"
    assert client.metric("baton_disconnects_total", route=route) == 1
    assert client.metric("baton_requests_total", route=route, model=MODEL, status="499") == 1
    assert client.metric("baton_running_requests", route=route) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_must_stop_says_so(stream: bool) -> None:
    async def scenario() -> bytes:
        client = Client(ScriptedTokens(ANSWER, pause_at=30))
        said: list[bytes] = []
        client.on_write = said.append
        answering = asyncio.create_task(client.chat(stream=stream))
        await asyncio.wait_for(client.tokens.paused.wait(), PATIENCE_S)
        await asyncio.sleep(0)  # what came before the pause is written
        answering.cancel()
        await asyncio.wait([answering], timeout=PATIENCE_S)
        assert answering.cancelled()
        assert client.tokens.num_ended == 1
        return b"".join(said)

    assert b'"code":"not_ready"' in asyncio.run(scenario())


def test_a_deadline_that_is_over_is_a_504_or_an_error_event() -> None:
    late = Client(ScriptedTokens(ANSWER, pause_at=0), request_timeout_s=0.01)
    assert asyncio.run(late.chat()).status == 504
    later = Client(ScriptedTokens(ANSWER, pause_at=30), request_timeout_s=scaled(0.1))
    assert asyncio.run(later.chat(stream=True)).events[-1]["error"]["code"] == "deadline_exceeded"


def test_the_request_id_goes_from_header_to_worker_and_back() -> None:
    async def ids(given: str) -> tuple[str, str]:
        client = Client(ScriptedTokens(ANSWER))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        reply = await client.post("/v1/chat/completions", body, {"x-request-id": given})
        return client.tokens.requests[0].request_id, reply.headers["x-request-id"]

    assert asyncio.run(ids("run-7/a")) == ("run-7/a", "run-7/a")
    inner, outer = asyncio.run(ids("not sane\r\n"))
    assert inner == outer != "not sane\r\n"
