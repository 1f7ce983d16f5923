"""Ids of answers: whoever has one can use it, so none can be guessed; drawn again only under a key."""

import re
from typing import Any

import msgspec
import pytest

from frontend.turn.ids import new_id, new_seed, repeatable
from tests.scripted_frontend import Client, ScriptedTokens

ANSWER = (
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    "<|constrain|>json<|message|>{}<|call|>"
)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def ids_in(value: Any) -> set[str]:
    """All values of fields called `id` or `call_id`."""
    if isinstance(value, dict):
        own = {value[name] for name in ("id", "call_id") if value.get(name)}
        return own.union(*(ids_in(part) for part in value.values()))
    return set().union(*(ids_in(part) for part in value)) if isinstance(value, list) else set()


async def answered_ids() -> set[str]:
    """The ids of one answer of each API and of a request."""
    client = Client(ScriptedTokens(ANSWER))
    chat = await client.chat(tools=[{"type": "function", "function": TOOL}])
    completion = await client.complete("Hi")
    response = await client.respond("Hi", tools=[{"type": "function", **TOOL}])
    replies = [reply.json for reply in (chat, completion, response)]
    return ids_in(msgspec.to_builtins(replies)) | {chat.headers["x-request-id"]}


async def test_every_id_has_128_random_bits() -> None:
    ids, others = await answered_ids(), await answered_ids()
    kinds = {one.rpartition("_")[0] or one.rpartition("-")[0] for one in ids}
    assert kinds == {"chatcmpl", "cmpl", "resp", "rs", "fc", "call", ""}
    assert [one for one in ids if not re.fullmatch(r"([a-z]+[_-])?[0-9a-f]{32,}", one)] == []
    assert not ids & others


def drawn() -> tuple[str, str, int]:
    return new_id("resp"), new_id("call"), new_seed()


def test_the_same_is_drawn_for_the_same_key_and_only_until_its_end() -> None:
    with repeatable("a"):
        first = drawn()
    with repeatable("b"):
        other = drawn()
    assert not set(first) & set(other)
    with pytest.raises(ConnectionError), repeatable("a"):
        raise ConnectionError
    assert not set(drawn()) & set(first)
    with repeatable("a"):
        with repeatable("b"):
            assert drawn() == other
        assert drawn() == first
    assert 2**62 <= max(new_seed() for _ in range(100)) < 2**63
