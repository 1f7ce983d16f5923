"""A request's cache salt reaches the engine library, on both sides of a handoff."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.messages import after_handoff
from tests import trtllm_engine, vllm_engine
from tests.engine_calls import next_handoff, tokens
from tests.tiny_gpt_oss import write_checkpoint
from workers.engines.library.engine import LibraryEngine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


async def salts(prefill: LibraryEngine, decode: LibraryEngine, salt: str) -> list[Any]:
    """The salts that the library got for a prefill, a decode with its handoff, and one without."""
    got: list[Any] = []
    library(prefill).salts = library(decode).salts = got  # after the warm-up requests
    asked = replace(vllm_engine.ask(), cache_salt=salt)
    async with aclosing(prefill.prefill(asked)) as replies:
        handoff = await next_handoff(replies)
        assert await tokens(decode.decode(after_handoff(asked, handoff)))
    assert await tokens(decode.decode(asked))
    return got


def library(engine: LibraryEngine) -> Any:
    adapter: Any = engine.adapter
    return adapter.llm


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", None)])
async def test_vllm_gets_the_salt_with_every_prompt(checkpoint: Path, salt: str, sent: str | None) -> None:
    async def main() -> list[Any]:
        started = vllm_engine.started
        async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
            return await salts(prefill, decode, salt)

    assert await main() == [sent] * 3


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", "baton")])
async def test_tensorrt_llm_gets_the_salt_with_every_prompt(checkpoint: Path, salt: str, sent: str) -> None:
    """Without one, the salt is Baton's own, which keeps prompts apart from attention DP's dummy requests."""

    async def main() -> list[Any]:
        async with trtllm_engine.started(checkpoint) as engine:
            return await salts(engine, engine, salt)

    assert await main() == [sent] * 3
