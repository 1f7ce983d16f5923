"""Bodies of the Responses API: what becomes of them in the prompt, what is refused, what the worker gets."""

import json
from typing import Any

import pytest

from tests.scripted_frontend import TOKENIZER, Client, Reply, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
HI = [{"role": "user", "content": "Hi"}]
SUMMARY = {"type": "summary_text", "text": "Thinking"}
TOOL = {"type": "function", "name": "f", "description": "Does it.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
CUSTOM = {"type": "custom", "name": "c"}
SPACE = {"type": "namespace", "name": "space"}
GRAMMAR = {"type": "grammar"}
LINES = {"commands": ["ls"]}
ADDED: dict[str, Any] = {"type": "additional_tools"}
FOUND: dict[str, Any] = {"type": "tool_search_output", "call_id": "c"}
REFUSAL = {"type": "refusal", "text": "No."}
LONG = "x" * 100
NAMES = {token_id: token.value for token, token_id in TOKENIZER.special_ids.items()}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


async def ask(given: object = "Hi", **fields: Any) -> tuple[Reply, str]:
    """The reply, and the prompt after the system message, with the names of control tokens."""
    client = Client(ScriptedTokens(ANSWER))
    reply = await client.respond(given, **fields)
    if reply.status != 200:
        return reply, ""
    prompt = "".join(NAMES.get(i) or TOKENIZER.decode([i]) for i in client.tokens.requests[0].token_ids)
    return reply, prompt.partition("<|end|>")[2].removesuffix("<|start|>assistant")


async def prompt_of(given: object, **fields: Any) -> str:
    reply, prompt = await ask(given, **fields)
    assert reply.status == 200, reply.json
    return prompt


@pytest.mark.parametrize(
    "given",
    [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "Hi"]}],
    ],
)
async def test_input_text_has_several_forms(given: object) -> None:
    assert await prompt_of(given) == "<|start|>user<|message|>Hi<|end|>"


async def test_instructions_come_first_and_system_messages_are_developer_messages() -> None:
    items = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
    prompt = await prompt_of([*items, {"role": "user", "content": "Hi"}], instructions="You are Bo.")
    assert prompt.startswith(
        "<|start|>developer<|message|># Instructions\n\nYou are Bo.\n\nBe kind.\n\nBe brief.<|end|>"
    )


async def test_a_tool_conversation_is_rendered_message_by_message() -> None:
    history = [
        {"role": "user", "content": "Hi"},
        thought("A."),
        thought("B."),
        {
            "type": "message", "id": "msg_1", "role": "assistant", "phase": "commentary",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
        },
        CALL,
        RESULT | {"output": [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}]},
    ]  # fmt: skip
    prompt = await prompt_of(history, tools=[TOOL])
    assert prompt.partition("<|start|>user")[2] == (
        "<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>A.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"x":1}<|call|>'
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>done<|end|>"
    )


async def test_an_answer_that_ended_after_its_preamble_keeps_its_reasoning() -> None:
    said = {"type": "message", "role": "assistant", "phase": "commentary", "content": "One moment."}
    prompt = await prompt_of([{"role": "user", "content": "Hi"}, thought("A."), said])
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>A.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    )


async def test_a_schema_for_the_text_is_guided_rendered_and_echoed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    client = Client(ScriptedTokens(ANSWER))
    reply = await client.respond(text={"format": wanted})
    assert reply.json["text"]["format"].items() >= wanted.items()
    guided = client.tokens.requests[0].sampling.guided
    assert guided is not None
    assert json.loads(guided.last[-1].grammar or "") == schema
    assert guided.last[-1].param == "text.format.schema"
    assert "# Response Formats\n\n## thing" in TOKENIZER.decode(client.tokens.requests[0].token_ids)


async def test_request_fields_are_echoed() -> None:
    sent = {
        "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.5,
        "max_output_tokens": 9, "max_tool_calls": 3, "parallel_tool_calls": False, "user": "u",
        "top_logprobs": 2, "safety_identifier": "s", "prompt_cache_key": "k", "store": False,
    }  # fmt: skip
    reply, _ = await ask(**sent, tools=[TOOL], service_tier="auto", truncation="disabled")
    assert reply.json.items() >= sent.items()
    assert reply.json["tools"] == [TOOL | {"strict": None}]
    assert reply.json["reasoning"] == {"effort": "medium", "summary": None}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": [*HI, {"type": "web_search_call", "id": "x"}]}, "input[].web_search_call"),
        ({"input": [*HI, {"type": [LONG]}]}, f"input[].['{LONG}"[:80]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[].input_image"),
        ({"input": [CALL, RESULT | {"output": [{"type": "input_file"}]}]}, "input[].input_file"),
        ({"input": [*HI, {"type": "reasoning", "encrypted_content": "x"}]}, "input[].encrypted_content"),
        ({"input": [*HI, {"type": "reasoning", "summary": [SUMMARY]}]}, "input[].summary"),
        ({"input": [*HI, {"type": "reasoning", "summary": [{"type": "text"}]}]}, "input[].summary"),
        ({"input": [{"role": "user", "content": [{"type": LONG}]}]}, f"input[].{LONG}"[:80]),
        ({"tools": [{"type": "web_search"}, TOOL, {"type": "web_search"}]}, "tools[].web_search"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "none"}, "tools[].web_search"),
        ({"tools": [{"type": "computer", "environment": "browser"}]}, "tools[].computer"),
        ({"tools": [{"type": LONG}]}, f"tools[].{LONG}"[:80]),
        ({"tools": [{"type": LONG, "environment": {"type": "container_auto"}}]}, f"tools[].{LONG}"[:80]),
        ({"tools": [SPACE | {"tools": [TOOL, SPACE]}]}, "tools[].namespace"),
        ({"tools": [SPACE | {"tools": [TOOL, {"type": "shell"}]}]}, "tools[].shell"),
        ({"tools": [TOOL | {"format": {"type": "grammar"}}]}, None),
        ({"tools": [CUSTOM | {"format": {"type": "text"}}]}, None),
        ({"reasoning": {"effort": "minimal"}}, "reasoning.effort"),
        ({"tools": [TOOL | {"color": "red"}]}, "tools[].color"),
        ({"tools": [TOOL | {"eager_input_streaming": True}]}, None),
        ({"nvext": {"foo": 1}, "structured_outputs": {"bar": 2}}, "nvext.foo, structured_outputs.bar"),
        ({"n": 1, "stop": [], "logprobs": False, "context_management": [], "image": {}}, None),
        ({"background_options": {"completion_window": "soonest"}}, None),
        ({"reasoning": {"context": "current_turn", "mode": "standard"}}, None),
        ({"text": {"verbosity": "low"}}, None),
        ({"truncation": "auto", "service_tier": "flex", "prompt_cache_retention": "24h"}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        ({"stream": True, "stream_options": {"include_timings": True}}, "stream_options.include_timings"),
    ],
)
async def test_unsupported_content_is_left_out_and_named(fields: dict[str, Any], named: str | None) -> None:
    reply, _ = await ask(**fields)
    assert reply.status == 200, reply.body
    assert reply.headers.get("x-baton-ignored") == named


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CUSTOM | {"format": GRAMMAR | {"definition": "a"}}]}, "tools[0].format.syntax"),
        ({"tools": [CUSTOM | {"format": GRAMMAR | {"syntax": "lark"}}]}, "tools[0].format.definition"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "assistant", "content": [REFUSAL]}]}, "input[0].content[0].refusal"),
        ({"input": [{"type": "web_search_call"}, RESULT]}, "input[1].call_id"),
        ({"input": [{"type": "shell_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "local_shell_call_output", "id": "x", "output": ""}]}, "input[0].id"),
        ({"input": [CALL | {"call_id": 3}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        ({"input": [{"type": "shell_call", "action": LINES}]}, "input[0].call_id"),
        ({"input": [{"type": "shell_call", "call_id": "c", "action": None}]}, "input[0].action"),
        ({"input": [ADDED]}, "input[0].tools"),
        ({"input": [ADDED | {"tools": [{"type": "function"}]}]}, "input[0].tools[0].name"),
        ({"input": [ADDED | {"tools": [{"type": 1}]}]}, "input[0].tools[0].type"),
        ({"input": [FOUND | {"tools": [{"type": "function"}]}]}, "input[0].tools[0].name"),
        ({"input": []}, "input"),
        ({"input": "x" * 10_000}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "reasoning", "summary": [5]}]}, "input[0].summary[0]"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"async": True}]}, "tools[0].async"),
        ({"tools": [TOOL | {"allowed_callers": ["code_interpreter"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["reasoning.secrets"]}, "include[0]"),
        ({"reasoning": {"context": "no_turns"}}, "reasoning.context"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"background_options": {"completion_window": "24h"}}, "background_options"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {}}, "moderation"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
    ],
)  # fmt: skip
async def test_a_refused_field_is_named(fields: dict[str, Any], param: str) -> None:
    given = fields.pop("input", "Hi")
    reply, _ = await ask(given, **fields)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
    assert reply.error["message"].endswith(".")
