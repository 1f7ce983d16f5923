"""Custom tools in chat: text in, text out, held to a grammar where one is given."""

import asyncio
from typing import Any

import pytest

from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, ScriptedTokens

Json = dict[str, Any]

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
PATCH: Json = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
HELD: Json = {"type": "custom", "custom": {"name": "patch", "format": GRAMMAR}}
F: Json = {"type": "function", "function": {"name": "f"}}
CALL = "<|channel|>commentary to=functions.patch code<|message|>{}<|call|>"
HI = {"role": "user", "content": "Hi"}


def chat(
    text: str = "<|channel|>final<|message|>Ok<|return|>", **fields: Any
) -> tuple[Reply, ScriptedTokens]:
    tokens = ScriptedTokens(text)
    return asyncio.run(Client(tokens).chat(**fields)), tokens


@pytest.mark.parametrize(
    ("tool", "written", "given"),
    [
        (PATCH, "*** Begin", "*** Begin"),
        (PATCH, '{"input": "*** Begin"}', "*** Begin"),
        (PATCH, '{"other": 1}', '{"other": 1}'),
        (PATCH, '{"input": "a", "other": 1}', '{"input": "a", "other": 1}'),
        (HELD, '{"input": "a"}', '{"input": "a"}'),
    ],
)
def test_a_call_of_a_custom_tool_has_its_input(tool: Json, written: str, given: str) -> None:
    reply, _ = chat(CALL.replace("{}", written), tools=[tool, F])
    [called] = reply.json["choices"][0]["message"]["tool_calls"]
    assert called == {"id": called["id"], "type": "custom", "custom": {"name": "patch", "input": given}}
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"

    streamed, _ = chat(CALL.replace("{}", written), tools=[tool, F], stream=True)
    deltas = [e["choices"][0]["delta"] for e in streamed.events[:-1] if e["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["type"] == "custom"
    assert calls[0]["custom"] == {"name": "patch", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls) == given


def test_the_arguments_of_a_function_next_to_a_custom_tool_stay_json() -> None:
    call = '<|channel|>commentary to=functions.f code<|message|>{"input": "a"}<|call|>'
    reply, _ = chat(call, tools=[PATCH, F])
    [called] = reply.json["choices"][0]["message"]["tool_calls"]
    assert called["function"]["arguments"] == '{"input": "a"}'


def test_the_input_that_a_limit_cuts_is_given_as_far_as_it_went() -> None:
    reply, _ = chat(CALL.replace("{}", "x" * 100), tools=[PATCH], max_tokens=60)
    [called] = reply.json["choices"][0]["message"]["tool_calls"]
    assert set(called["custom"]["input"]) == {"x"}
    assert reply.json["choices"][0]["finish_reason"] == "length"


def test_a_grammar_is_enforced_and_shown() -> None:
    _, tokens = chat(tools=[HELD])
    form = tokens.requests[0].sampling.guided
    assert form is not None
    [call, _] = form.last
    assert (call.grammar, call.syntax) == ('start: "a"+', "lark")
    assert call.param == "tools[0].custom.format.grammar.definition"
    prompt = TOKENIZER.decode(tokens.requests[0].token_ids)
    assert '// The input follows this grammar (lark):\n// start: "a"+\ntype patch = (input: string)' in prompt


def test_a_custom_tool_can_be_demanded() -> None:
    for choice in (
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ):
        _, tokens = chat(tools=[PATCH, F], tool_choice=choice)
        form = tokens.requests[0].sampling.guided
        assert form is not None
        assert all("functions.patch" in message.headers[0] for message in form.last)


def test_a_custom_call_comes_back_as_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    messages = [
        HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    _, tokens = chat(messages=messages, tools=[PATCH])
    prompt = TOKENIZER.decode(tokens.requests[0].token_ids)
    assert "assistant to=functions.patchcommentary code*** Begin" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"custom": {"name": "x"}}]}, "tools[0].function"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
        ),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "y"}}}, "tool_choice"),
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
        ),
    ],
)
def test_what_is_missing_is_named(fields: Json, param: str) -> None:
    reply, tokens = chat(**fields)
    assert (reply.status, reply.error["param"], tokens.requests) == (400, param, [])


async def test_the_key_separates_whose_thoughts_are_remembered() -> None:
    think = "<|channel|>analysis<|message|>Secret.<|end|><|start|>assistant"
    tokens = ScriptedTokens(think + "<|channel|>commentary to=functions.f<|message|>{}<|call|>")
    client = Client(tokens)
    body = {"model": MODEL, "messages": [HI], "tools": [F]}
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
    reply = await client.post("/v1/chat/completions", body, mine)
    [called] = reply.json["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": called["id"], "content": "ok"}
    later = body | {"messages": [HI, {"role": "assistant", "tool_calls": [called]}, result]}
    for headers in (mine, theirs):
        await client.post("/v1/chat/completions", later, headers)
    prompts = [TOKENIZER.decode(request.token_ids) for request in tokens.requests[1:]]
    assert ["Secret." in prompt for prompt in prompts] == [True, False]
