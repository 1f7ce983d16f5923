"""Ids of what is answered: who knows one can use it, so none can be guessed."""

import asyncio
import re
from typing import Any

import msgspec

from tests.scripted_frontend import Client, ScriptedTokens

ANSWER = (
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    "<|constrain|>json<|message|>{}<|call|>"
)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
NUM_HEX_DIGITS = 32  # 128 bits


def ids_in(value: Any) -> set[str]:
    """All values of fields called `id` or `call_id`."""
    if isinstance(value, dict):
        own = {value[name] for name in ("id", "call_id") if value.get(name)}
        return own.union(*(ids_in(part) for part in value.values()))
    return set().union(*(ids_in(part) for part in value)) if isinstance(value, list) else set()


def answers() -> tuple[set[str], str]:
    """The ids of one answer of each API, and the id of a request."""

    async def main() -> tuple[set[str], str]:
        client = Client(ScriptedTokens(ANSWER))
        chat = await client.chat(tools=[{"type": "function", "function": TOOL}])
        completion = await client.complete("Hi")
        response = await client.respond("Hi", tools=[{"type": "function", **TOOL}])
        replies = [reply.json for reply in (chat, completion, response)]
        return ids_in(msgspec.to_builtins(replies)), chat.headers["x-request-id"]

    return asyncio.run(main())


def test_every_id_has_128_random_bits() -> None:
    ids, request_id = answers()
    kinds = {one.rpartition("_")[0] or one.rpartition("-")[0] for one in ids}
    assert kinds == {"chatcmpl", "cmpl", "resp", "rs", "fc", "call"}
    for one in (*ids, request_id):
        assert re.fullmatch(rf"([a-z]+[_-])?[0-9a-f]{{{NUM_HEX_DIGITS},}}", one), one


def test_no_id_comes_again() -> None:
    first, second = answers(), answers()
    assert not first[0] & second[0]
    assert first[1] != second[1]
