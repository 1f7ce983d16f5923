"""A conversation's prompt grows at its end only: earlier answers are in it as the model wrote them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.messages import GenerateRequest, Sampling, TokenChunk
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Delta,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.harmony.parse import HarmonyParser
from frontend.turn.choice import Choice
from frontend.turn.thoughts import Thoughts
from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, ScriptedTokens, prompt_ids

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
F: Json = {"type": "function", "function": {"name": "f"}}
START = "<|start|>assistant"
THINK = f"<|channel|>analysis<|message|>Think.<|end|>{START}"
NOW = f"<|channel|>commentary<|message|>Now.<|end|>{START}"
# As the model writes calls, none of them as a prompt would be rendered.
CALLS = [
    ' to=functions.f<|channel|>commentary json<|message|>{"a":  1}<|call|>',
    '<|channel|>analysis to=functions.f code<|message|>{ "a": 1 }<|call|>',
    NOW + " to=functions.f<|channel|>analysis<|message|>{}<|call|>",
    NOW + NOW + " to=functions.f<|channel|>analysis<|message|>{}<|call|>",
    NOW + THINK + NOW + " to=functions.f<|channel|>commentary<|message|>{}<|call|>",
]


def grown(client: Client) -> bool:
    """Whether the second prompt begins with the first and its answer, after the same opening."""
    first, second = (request.token_ids for request in client.tokens.requests)
    opening = TOKENIZER.encode_text(START, allow_special=True)
    for request in client.tokens.requests:
        assert request.num_opening_tokens == len(first) - len(opening)
    answer = TOKENIZER.encode_text(client.tokens.texts[0], allow_special=True)
    return second[: len(first) + len(answer)] == first + answer


async def post(client: Client, path: str, body: Json) -> Reply:
    reply = await client.post(path, {"model": MODEL, **body})
    assert reply.status == 200, reply.body
    return reply


async def chat_round(client: Client, change: Callable[[Json], object], tools: list[Json]) -> Json:
    """The message that was sent back, changed, with the result of its call."""
    reply = await post(client, CHAT, {"messages": [HI], "tools": tools})
    message: Json = reply.json["choices"][0]["message"]
    change(message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    await post(client, CHAT, {"messages": [HI, message, result], "tools": tools})
    return message


def unchanged(message: Json) -> None:
    pass


def without_reasoning(message: Json) -> None:
    del message["reasoning"], message["reasoning_content"]


@pytest.mark.parametrize(
    ("answer", "sent_back"),
    [
        *((THINK + call, without_reasoning) for call in CALLS),
        (THINK + THINK + CALLS[0], unchanged),
        (THINK + '<|channel|>commentary to=functions.patch code<|message|>{"input": "a"}<|call|>', unchanged),
    ],
)
async def test_a_chat_goes_on_from_the_very_tokens(answer: str, sent_back: Callable[[Json], None]) -> None:
    client = Client(ScriptedTokens(answer))
    await chat_round(client, sent_back, [F, {"type": "custom", "custom": {"name": "patch"}}])
    assert grown(client)


@pytest.mark.parametrize("has_phase", [True, False])
@pytest.mark.parametrize("call", CALLS)
async def test_a_response_goes_on_from_the_very_tokens(call: str, has_phase: bool) -> None:
    client = Client(ScriptedTokens(THINK + call))
    tools = [{"type": "function", "name": "f"}]
    output = (await post(client, "/v1/responses", {"input": [HI], "tools": tools})).json["output"]
    if not has_phase:  # as older clients send it back
        output = [{key: item[key] for key in item if key != "phase"} for item in output]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "ok"}
    await post(client, "/v1/responses", {"input": [HI, *output, result], "tools": tools})
    assert grown(client)


@pytest.mark.parametrize("shown", [{}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}])
@pytest.mark.parametrize("call", CALLS)
async def test_a_message_goes_on_from_the_very_tokens_though_its_json_is_written_anew(
    call: str, shown: Json
) -> None:
    client = Client(ScriptedTokens(THINK + call))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"max_tokens": 1000, "tools": tools, **shown}
    content = (await post(client, "/v1/messages", {"messages": [HI], **body})).json["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "ok"}
    said = [HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    await post(client, "/v1/messages", {"messages": said, **body})
    assert grown(client)


@pytest.mark.parametrize("sent_back", [{}, {"reasoning_content": "Think."}])
async def test_a_final_answer_goes_on_without_its_thoughts(sent_back: Json) -> None:
    final = "<|channel|>final <|constrain|>json<|message|>{}"
    client = Client(ScriptedTokens(f"{THINK}{final}<|return|>"))
    await post(client, CHAT, {"messages": [HI]})
    said = [HI, {"role": "assistant", "content": "{}", **sent_back}, HI]
    await post(client, CHAT, {"messages": said})
    first, second = (
        TOKENIZER.decode(request.token_ids, shows_special=True) for request in client.tokens.requests
    )
    assert second.startswith(f"{first}{final}<|end|><|start|>user")
    assert len({request.num_opening_tokens for request in client.tokens.requests}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["tool_calls"][0]["function"].update(arguments='{"a":2}'),
        lambda told: told["tool_calls"][0]["function"].update(arguments='{"a":true}'),
        lambda told: told["tool_calls"][0]["function"].update(name="g"),
        lambda told: told.update(content="Other words."),
        lambda told: told.update(reasoning_content="Other thoughts."),
    ],
)
async def test_what_the_client_changed_is_rendered(change: Any) -> None:
    client = Client(ScriptedTokens(THINK + CALLS[0]))
    message = await chat_round(client, change, [F])
    assert not grown(client)
    call = message["tool_calls"][0]["function"]
    said = TOKENIZER.decode(client.tokens.requests[1].token_ids, shows_special=True)
    name, arguments = call["name"], call["arguments"]
    assert f"to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}<|call|>" in said


@pytest.mark.parametrize("tokens_per_chunk", [1, 1000])
async def test_an_answer_that_was_repaired_is_rendered_with_its_thoughts(tokens_per_chunk: int) -> None:
    answer = f"{THINK}<|channel|>commentary functions.f<|message|>{{}}<|call|>"  # no `to=`
    client = Client(ScriptedTokens(answer, tokens_per_chunk=tokens_per_chunk))
    await chat_round(client, without_reasoning, [F])
    assert not grown(client)
    assert THINK in TOKENIZER.decode(client.tokens.requests[1].token_ids, shows_special=True)


TEXTS = st.text(min_size=1, max_size=12).filter(lambda text: text.encode(errors="replace").decode() == text)
HEADERS = st.sampled_from(
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    thoughts=st.lists(TEXTS, max_size=2),
    preamble=st.none() | TEXTS,
    header=HEADERS,
    arguments=st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2),
    indent=st.none() | st.integers(0, 2),
    size=st.integers(1, 7),
)
def test_any_answer_comes_back_in_its_own_tokens(  # noqa: PLR0917  drawn by name
    thoughts: list[str],
    preamble: str | None,
    header: str,
    arguments: dict[str, Any],
    indent: int | None,
    size: int,
) -> None:
    parts = [f"<|channel|>analysis<|message|>{text}<|end|>" for text in thoughts]
    parts += [] if preamble is None else [f"<|channel|>commentary<|message|>{preamble}<|end|>"]
    ids: list[int] = []
    for i, part in enumerate([*parts, f"{header}{json.dumps(arguments, indent=indent)}<|call|>"]):
        start = TOKENIZER.encode_text(START, allow_special=True) if i else []
        head, control, body = part.partition("<|message|>")
        text, end = body[: body.rindex("<|")], body[body.rindex("<|") :]
        ids += start + TOKENIZER.encode_text(head + control, allow_special=True) + TOKENIZER.encode_text(text)
        ids += TOKENIZER.encode_text(end, allow_special=True)
    choice, turn = answered(ids, size)
    written = choice.written(TOKENIZER)
    assert written is not None
    store = Thoughts()
    store.keep_turn("", choice.call_ids, written)

    tools = (Tool(name="f"),)
    asked: tuple[Turn, ...] = (UserTurn("Hi"),)
    before = prompt_ids(Conversation(turns=asked, tools=tools), TOKENIZER)
    later = store.completed("", (*asked, turn, ToolResult(call_id=choice.call_ids[0], text="ok")))
    after = prompt_ids(Conversation(turns=later, tools=tools), TOKENIZER)
    assert after[: len(before) + len(ids)] == before + ids


def request_of(ids: list[int]) -> GenerateRequest:
    sampling = Sampling(max_tokens=len(ids), seed=0, stop_token_ids=TOKENIZER.stop_token_ids)
    return GenerateRequest(request_id="r", model=MODEL, token_ids=[1], sampling=sampling, deadline_s=1.0)


def answered(ids: list[int], size: int) -> tuple[Choice, AssistantTurn]:
    """An answer that came in chunks of that size, and the turn that a client makes of it."""
    choice = Choice(request_of(ids), HarmonyParser(TOKENIZER.vocabulary, frozenset({"f"})))
    deltas: list[Delta] = []
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        chunk = TokenChunk(tuple(ids[start : start + size]), "stop" if last else None)
        deltas += choice.feed(chunk)
    deltas += choice.finish()
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments))
    turn = AssistantTurn(
        text="".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) or None,
        tool_calls=(ToolCall(call_id=choice.call_ids[0], name="f", arguments=arguments),),
    )
    return choice, turn
