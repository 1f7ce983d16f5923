"""Long bodies are read in a thread, and refused before they cost much."""

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.errors import Overloaded
from frontend.http.respond import read
from frontend.responses import body, routes
from frontend.text.tokenizer import COUNTED_CONTEXTS, ServedModel
from frontend.turn.request import LONG_BYTES
from tests.scripted_frontend import (
    BODIES,
    CONTEXT_LENGTH,
    MODEL,
    TOKENIZER,
    Client,
    ScriptedFleet,
    ScriptedTokens,
)


class Empty(msgspec.Struct):
    pass


def test_only_long_bodies_are_read_in_a_thread() -> None:
    async def where(num_bytes: int) -> int:
        raw = b"{" + b" " * (num_bytes - 2) + b"}"
        _, _, found = await read(raw, Empty, lambda _, num: threading.get_ident() if num == num_bytes else 0)
        return found

    own = threading.get_ident()
    assert asyncio.run(where(LONG_BYTES)) == own
    assert asyncio.run(where(LONG_BYTES + 1)) not in {0, own}


class NotingFleet(ScriptedFleet):
    """Notes the threads in which prompts are tokenised."""

    def __init__(self) -> None:
        super().__init__(context_length=10 * LONG_BYTES)
        self.threads: set[int] = set()

    def served(self, model: str) -> ServedModel:
        tokenizer = copy.copy(TOKENIZER)
        for name in ("encode_text", "encode_text_segment"):
            setattr(tokenizer, name, self._noting(getattr(tokenizer, name)))
        return msgspec.structs.replace(super().served(model), tokenizer=tokenizer)

    def _noting(self, encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def noting(*given: Any, **options: Any) -> list[int]:
            self.threads.add(threading.get_ident())
            return encode(*given, **options)

        return noting


@pytest.mark.parametrize("path", BODIES)
async def test_only_long_prompts_are_tokenised_in_a_thread(path: str) -> None:
    own = threading.get_ident()
    for num_chars in (10, LONG_BYTES):
        fleet = NotingFleet()
        asked = json.dumps({"model": MODEL, **BODIES[path]}).replace('"Hi"', f'"{"x" * num_chars}"')
        reply = await Client(ScriptedTokens("<|return|>"), fleet).post(path, asked.encode())
        assert reply.status == 200, reply.json
        assert (own in fleet.threads) is (num_chars == 10)
        assert fleet.threads


@pytest.mark.parametrize(
    "recall",
    [
        lambda made: {"previous_response_id": made["id"], "input": "Hi"},
        lambda made: {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
    ],
)
async def test_short_bodies_that_recall_stored_text_are_handled_in_a_thread(
    recall: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    real = body.turn_request

    def noting(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return real(*given)

    fleet = NotingFleet()
    client = Client(ScriptedTokens("<|channel|>final<|message|>Long<|return|>"), fleet)
    made = (await client.post("/v1/responses", {"model": MODEL, "input": "Hello"})).json
    fleet.threads.clear()
    monkeypatch.setattr(routes, "turn_request", noting)
    reply = await client.post("/v1/responses", {"model": MODEL, **recall(made)})
    assert reply.status == 200, reply.json
    assert fleet.threads
    assert threads
    assert threading.get_ident() not in threads | fleet.threads


async def test_a_prompt_longer_than_the_context_is_counted_and_one_longer_than_two_is_refused() -> None:
    client, path = Client(ScriptedTokens("")), "/v1/responses/input_tokens"
    reply = await client.post(path, {"model": MODEL, "input": "x" * CONTEXT_LENGTH})
    assert reply.json["input_tokens"] > CONTEXT_LENGTH
    most = COUNTED_CONTEXTS * CONTEXT_LENGTH
    reply = await client.post(path, {"model": MODEL, "input": "x" * most})
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "input")
    assert f"`input` has more than {most} tokens" in reply.error["message"]


class SlowFleet(NotingFleet):
    """Tokenises no prompt until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def _noting(self, encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
        return lambda *given, **options: encode(*given, **options) if self.go_on.wait() else []


async def test_full_workers_let_one_long_prompt_be_counted_at_a_time() -> None:
    fleet = SlowFleet()
    client = Client(ScriptedTokens(refuses_with=Overloaded("full")), fleet)
    long = [{"role": "user", "content": "x" * 11 * LONG_BYTES}]
    asked = [asyncio.create_task(client.chat(messages=long)) for _ in range(3)]
    while sum(each.done() for each in asked) < 2:
        await asyncio.sleep(0)  # poll: no event says that two are refused
    fleet.go_on.set()
    assert sorted([(await each).status for each in asked]) == [400, 429, 429]
