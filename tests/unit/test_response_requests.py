"""Requests of the Responses API: what reaches prompt and sampling, what runs in a thread, what is told."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_frontend import TOKENIZER, Client, ScriptedTokens, frontend
from tests.waiting import until

ANSWER = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
)


def prompt_of(client: Client) -> str:
    return TOKENIZER.decode(client.tokens.requests[-1].token_ids)


async def test_template_arguments_reach_the_prompt() -> None:
    client = Client(ScriptedTokens(ANSWER))
    given = {"model_identity": "You are Bo.", "reasoning_effort": "low"}
    assert (await client.respond(chat_template_args=given)).json["reasoning"]["effort"] == "low"
    assert "You are Bo." in prompt_of(client)
    assert "Reasoning: low" in prompt_of(client)
    await client.respond(chat_template_kwargs={"reasoning_effort": "high"})
    assert "Reasoning: high" in prompt_of(client)


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [({}, None), ({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0)],
)
async def test_log_probabilities_are_asked_for_by_either_field(
    fields: dict[str, Any], num_top: int | None
) -> None:
    client = Client(ScriptedTokens(ANSWER))
    (_, message) = (await client.respond(**fields)).json["output"]
    assert client.tokens.requests[0].sampling.logprobs == num_top
    assert bool(message["content"][0]["logprobs"]) is (num_top is not None)


async def test_a_fault_after_the_history_names_its_place_in_the_body() -> None:
    async with frontend(ANSWER) as client:
        made = (await client.respond()).json["id"]
        result = {"type": "function_call_output", "call_id": "c", "output": "x"}
        reply = await client.respond([result], previous_response_id=made)
        assert (reply.status, reply.error["param"]) == (400, "input[0].call_id")


async def test_a_response_that_is_in_memory_only_says_that_it_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    async with frontend(ANSWER, path=path) as client:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert "x-baton-ignored" not in (await client.respond()).headers
            await until(lambda: client.responses.store.is_failing)
            assert (await client.respond()).headers["x-baton-ignored"] == "store"
            assert "x-baton-ignored" not in (await client.respond(store=False)).headers
            other.execute("COMMIT")
