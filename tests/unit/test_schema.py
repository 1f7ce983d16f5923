"""What the bodies accept, refuse by name, and report as unknown."""

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from baton.errors import InvalidRequest
from frontend.chat import ChatBody
from frontend.completions import CompletionBody
from frontend.http.body import decode
from frontend.responses.body import ResponseBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def chat(**fields: Any) -> tuple[ChatBody, tuple[str, ...]]:
    return decode(json.dumps({**CHAT, **fields}).encode(), ChatBody)


def refusal(raw: bytes, body_type: type[ChatBody] | type[CompletionBody] = ChatBody) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(raw, body_type)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, "messages[0].content[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"reasoning_effort": "more"}, "reasoning_effort"),
        ({"chat_template_args": {"reasoning_effort": "more"}}, "chat_template_args.reasoning_effort"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"nvext": [1]}, "nvext"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_the_path_of_its_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(json.dumps({**CHAT, **fields}).encode())
    assert error.param == param
    assert f"`{param}`" in error.message


def tools(name: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}}]


def named_format(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name}}


@pytest.mark.parametrize(
    ("body_type", "field", "allowed", "refused"),
    [
        (ChatBody, "n", (1, 2**31 - 1), (0, 2**31)),
        (ChatBody, "max_tokens", (1, 2**31 - 1), (0, 2**31)),
        (ChatBody, "min_tokens", (0, 2**31 - 1), (-1, 2**31)),
        (ChatBody, "temperature", (0, 2), (-0.01, 2.01)),
        (ChatBody, "top_p", (0, 1), (-0.01, 1.01)),
        (ChatBody, "top_k", (-1, 2**31 - 1), (-2, 2**31)),
        (ChatBody, "frequency_penalty", (-2, 2), (-2.01, 2.01)),
        (ChatBody, "repetition_penalty", (0.01, 10), (0, 10.01)),
        (ChatBody, "logit_bias", ({"5": -100}, {"999999999": 100}), ({"5": -101}, {"1234567890": 1})),
        (ChatBody, "messages", (), ([],)),
        (ChatBody, "seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
        (ChatBody, "priority", (-100, 100), (-101, 101)),
        (ChatBody, "cache_salt", ("x", "x" * 256), ("", "x" * 257)),
        (ChatBody, "stop", ("x", ["x"] * 32), ("", [""], ["x"] * 33)),
        (ChatBody, "stop_token_ids", ([0] * 64, [2**31 - 1]), ([-1], [2**31], [0] * 65)),
        (ChatBody, "model", ("m",), ("",)),
        (ChatBody, "guided_choice", (["x"],), ([], [""])),
        (ChatBody, "metadata", ({"k" * 64: "v" * 512}, dict.fromkeys("abcdefghijklmnop", "v")),
         ({"k" * 65: ""}, {"k": "v" * 513}, dict.fromkeys("abcdefghijklmnopq", "v"))),
        (ChatBody, "response_format", (named_format("n" * 64),), (named_format("n" * 65),)),
        (ChatBody, "tools", (tools("a.b_C-9" + "x" * 121),), (tools("x" * 129), tools(""))),
        (CompletionBody, "logprobs", (0, 5), (-1, 6)),
        (CompletionBody, "max_tokens", (1, 2**31 - 1), (-1, 2**31)),
        (CompletionBody, "stop", (["x"] * 32,), (["x"] * 33,)),
        (CompletionBody, "suffix", (None,), ("x",)),
        (CompletionBody, "best_of", (None, 1), (2,)),
        (CompletionBody, "prompt", ([0, 2**31 - 1], [[0]]), ([-1], [[2**31]])),
    ],
)  # fmt: skip
def test_values_are_allowed_up_to_their_bounds(
    body_type: type[ChatBody | CompletionBody], field: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    body = CHAT if body_type is ChatBody else COMPLETION
    for value in allowed:
        decode(json.dumps({**body, field: value}).encode(), body_type)
    for value in refused:
        assert (refusal(json.dumps({**body, field: value}).encode(), body_type).param or "").startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("web_search_options", {}),
        ("moderation", {"model": "omni"}),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name_unless_it_is_null(field: str, value: object) -> None:
    assert refusal(json.dumps({**CHAT, field: value}).encode()).param == field
    assert chat(**{field: None})[1] == ()


@pytest.mark.parametrize(
    ("params", "body_type", "body"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, ChatBody, CHAT),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionBody, COMPLETION),
        (
            response_create_params.ResponseCreateParamsNonStreaming,
            ResponseBody,
            {"model": "m", "input": "Hi"},
        ),
    ],
)
def test_every_field_of_the_openai_sdk_is_served_or_refused_by_name(
    params: Any, body_type: type[ChatBody | CompletionBody | ResponseBody], body: dict[str, Any]
) -> None:
    for field in typing.get_type_hints(params):
        try:
            _, unknown = decode(json.dumps({**body, field: body.get(field, "?")}).encode(), body_type)
        except InvalidRequest as error:
            assert error.param == field  # noqa: PT017 either way is right
        else:
            assert field not in unknown
