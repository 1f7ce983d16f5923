"""A response as it begins: what the body said, and the defaults of what it left out."""

from typing import Any

import msgspec
import pytest

from baton.errors import BatonError, EngineFailure, InvalidRequest, NoWorkers, Overloaded
from frontend.responses.body import ResponseBody, ResponseError, begun
from frontend.text.served import ContextTooLong

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": None,
    "parameters": {},
    "strict": None,
}


def shown(body: dict[str, Any]) -> dict[str, Any]:
    """The beginning of the response, without its id and time."""
    response: dict[str, Any] = msgspec.to_builtins(begun(msgspec.convert(body, ResponseBody), "high"))
    assert response.pop("id").startswith("resp_")
    assert response.pop("created_at") > 1_700_000_000
    return response


DEFAULTS: dict[str, Any] = {
    "object": "response",
    "status": "in_progress",
    "background": False,
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": "high", "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
}


def test_what_the_body_leaves_out_has_openais_defaults() -> None:
    assert shown({"model": "m"}) == DEFAULTS


def test_what_the_body_says_is_shown() -> None:
    same = {
        "background": True,
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.0,
        "tool_choice": "required",
        "tools": [FUNCTION, {"type": "custom", "name": "c", "description": "Write."}],
        "top_logprobs": 3,
        "top_p": 0.0,
        "user": "u",
    }
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body = same | {"model": "m", "reasoning": {"summary": "auto"}, "text": {"format": schema}}
    response = shown(body)
    assert response["text"].pop("format").items() >= schema.items()
    changed = {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "medium"}}
    assert response == DEFAULTS | same | changed


def test_the_older_name_of_the_summary_counts_too() -> None:
    body = {"model": "m", "reasoning": {"generate_summary": "detailed"}, "text": {}}
    assert shown(body) == DEFAULTS | {"reasoning": {"effort": "high", "summary": "detailed"}}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", retry_after_s=1.0), "rate_limit_exceeded"),
        (InvalidRequest("wrong"), "invalid_prompt"),
        (ContextTooLong("long"), "context_length_exceeded"),
        (NoWorkers("none"), "server_error"),
        (EngineFailure("broken"), "server_error"),
    ],
)
def test_an_error_has_the_code_that_openai_has_for_it(error: BatonError, code: str) -> None:
    assert msgspec.to_builtins(ResponseError.of(error)) == {"code": code, "message": error.message}
