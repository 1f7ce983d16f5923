"""A request's cache salt reaches the engine library, on both sides of a handoff."""

from pathlib import Path
from typing import Any

import pytest

from baton.messages import after_handoff
from tests import trtllm_engine, vllm_engine
from tests.engine_calls import ask, handed_over, tokens
from workers.engines.library.engine import LibraryEngine


async def salts(prefill: LibraryEngine, decode: LibraryEngine, salt: str) -> list[Any]:
    """The salts that the library got for a prefill, a decode with its handoff, and one without."""
    got: list[Any] = []
    library(prefill).salts = library(decode).salts = got  # after the warm-up requests
    request = ask(cache_salt=salt)
    async with handed_over(prefill, request) as handoff:
        assert await tokens(decode.decode(after_handoff(request, handoff)))
    assert await tokens(decode.decode(request))
    return got


def library(engine: LibraryEngine) -> Any:
    adapter: Any = engine.adapter
    return adapter.llm


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", None)])
async def test_vllm_gets_the_salt_with_every_prompt(checkpoint: Path, salt: str, sent: str | None) -> None:
    started = vllm_engine.started
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        assert await salts(prefill, decode, salt) == [sent] * 3


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", "baton")])
async def test_tensorrt_llm_gets_the_salt_with_every_prompt(checkpoint: Path, salt: str, sent: str) -> None:
    """Without one, the salt is Baton's own, which keeps prompts apart from attention DP's dummy requests."""
    async with trtllm_engine.started(checkpoint) as engine:
        assert await salts(engine, engine, salt) == [sent] * 3
