"""What a chat client gets: several choices and calls, logprobs, names. Over HTTP, with a scripted model."""

import asyncio
from typing import Any

import pytest

from frontend.text.served import ServedModel
from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, ScriptedFleet, ScriptedTokens

Json = dict[str, Any]

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello<|return|>"
SHORT = "<|channel|>final<|message|>Yes<|return|>"
CALL = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>"
CALLS = (CALL % ("f", '{"a":1}')) + "<|start|>assistant" + (CALL % ("patch", "*** B"))
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "custom", "custom": {"name": "patch"}},
]


class AliasedFleet(ScriptedFleet):
    """Serves its model under every name."""

    def served(self, model: str) -> ServedModel:
        return super().served(MODEL)


def chat(*texts: str, script: Json | None = None, **fields: Any) -> Reply:
    return asyncio.run(Client(ScriptedTokens(*texts, **(script or {})), AliasedFleet()).chat(**fields))


def deltas(reply: Reply, index: int = 0) -> list[Json]:
    chunks = [event for event in reply.events if event != "[DONE]"]
    return [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_asked_for_by_another_name_is_named_and_counted_as_itself(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER), AliasedFleet())
    reply = asyncio.run(client.chat(model="mine", stream=stream))
    assert (reply.events[0] if stream else reply.json)["model"] == MODEL
    labels = {"route": "/v1/chat/completions", "model": MODEL, "status": "200"}
    assert client.metric("baton_requests_total", **labels) == 1


def test_every_choice_begins_with_its_role_and_all_their_tokens_are_counted() -> None:
    fields: Json = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    reply = chat(ANSWER, SHORT, **fields)
    for index in range(2):
        first, *more = deltas(reply, index)
        assert first == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in more)
    num_tokens = sum(len(TOKENIZER.encode_text(text, allow_special=True)) for text in (ANSWER, SHORT))
    assert reply.events[-2]["usage"]["completion_tokens"] == num_tokens
    whole = chat(ANSWER, SHORT, n=2).json
    assert whole["usage"]["completion_tokens"] == num_tokens
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]


def test_each_streamed_choice_ends_for_its_own_reason() -> None:
    num_short = len(TOKENIZER.encode_text(SHORT, allow_special=True))
    reply = chat(ANSWER, SHORT, n=2, stream=True, max_tokens=num_short)
    ends = {
        choice["index"]: choice["finish_reason"]
        for event in reply.events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"]
    }
    assert ends == {0: "length", 1: "stop"}


def test_two_calls_of_two_kinds_keep_their_own_arguments() -> None:
    message = chat(CALLS, tools=TOOLS).json["choices"][0]["message"]
    function, custom = message["tool_calls"]
    assert function["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert custom["custom"] == {"name": "patch", "input": "*** B"}
    assert function["id"] != custom["id"]

    pieces = [
        call
        for delta in deltas(chat(CALLS, tools=TOOLS, stream=True))
        for call in delta.get("tool_calls", ())
    ]
    first = [piece["function"] for piece in pieces if piece["index"] == 0]
    second = [piece["custom"] for piece in pieces if piece["index"] == 1]
    assert "".join(piece["arguments"] for piece in first) == '{"a":1}'
    assert "".join(piece["input"] for piece in second) == "*** B"


@pytest.mark.parametrize("stream", [False, True])
def test_two_thoughts_are_two_paragraphs(stream: bool) -> None:
    again = THINK.replace("Think.", "Again.")
    reply = chat(THINK + again + SHORT, stream=stream)
    if stream:
        said = "".join(delta.get("reasoning", "") for delta in deltas(reply))
    else:
        said = reply.json["choices"][0]["message"]["reasoning"]
    assert said == "Think.\n\nAgain."


@pytest.mark.parametrize(
    ("fields", "is_included"),
    [
        ({}, True),
        ({"include_reasoning": True, "reasoning": {"exclude": False}}, True),
        ({"include_reasoning": False}, False),
        ({"reasoning": {"exclude": True}}, False),
    ],
)
def test_reasoning_is_part_of_a_whole_answer_unless_it_is_unwanted(
    fields: dict[str, Any], is_included: bool
) -> None:
    message = chat(ANSWER, **fields).json["choices"][0]["message"]
    text = "Think." if is_included else None
    assert message.get("reasoning") == message.get("reasoning_content") == text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_null_unless_asked_for(stream: bool) -> None:
    reply = chat(ANSWER, logprobs=False, stream=stream)
    choices = [e["choices"][0] for e in reply.events[:-1]] if stream else reply.json["choices"]
    assert {choice["logprobs"] is None for choice in choices} == {True}


def test_streamed_logprobs_are_those_of_each_piece() -> None:
    reply = chat(ANSWER, logprobs=True, stream=True, script={"tokens_per_chunk": 1})
    pieces = [event["choices"][0] for event in reply.events[:-1]]
    spoken = [
        (piece["delta"]["content"], piece["logprobs"]) for piece in pieces if piece["delta"].get("content")
    ]
    assert len(spoken) == len("Hello")
    for text, logprobs in spoken:
        assert [entry["token"] for entry in logprobs["content"]] == [text]


def test_wishes_that_are_not_met_are_named_next_to_unknown_fields() -> None:
    reply = chat(SHORT, odd=1, reasoning_effort="xhigh")
    assert reply.headers["x-baton-ignored"] == "odd, reasoning_effort"
