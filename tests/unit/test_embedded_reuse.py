"""Block reuse: a prompt that begins as an earlier one computes only the rest, and answers the same."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import GenerateRequest
from tests.embedded import started
from tests.engine_calls import ask, chunks, handed_over
from tests.memory_wire import Wire
from tests.tiny_gpt_oss import prompt
from workers.engines.embedded.engine import EmbeddedEngine

TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, float32
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


@contextlib.asynccontextmanager
async def pair(
    checkpoint: Path, wire: Wire | None = None
) -> AsyncIterator[tuple[EmbeddedEngine, EmbeddedEngine]]:
    """A prefill and a decode engine."""
    wire = wire or Wire()
    async with started(checkpoint, wire) as prefill, started(checkpoint, wire) as decode:
        yield prefill, decode


async def answer(each: EmbeddedEngine, request: GenerateRequest) -> tuple[list[int], int]:
    """(the tokens, how many tokens of the prompt were cached)."""
    received = await chunks(each.decode(request))
    assert received[-1].usage is not None
    return [i for chunk in received for i in chunk.token_ids], received[-1].usage.num_cached_tokens


async def disaggregated(
    prefill: EmbeddedEngine, decode: EmbeddedEngine, request: GenerateRequest
) -> tuple[list[int], int]:
    """`answer` with the prompt's KV from `prefill`."""
    async with handed_over(prefill, request) as handoff:
        return await answer(decode, msgspec.structs.replace(request, handoff=handoff))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_conversation_computes_its_new_tokens_only_and_answers_the_same(
    checkpoint: Path, sampling: dict[str, Any]
) -> None:
    async with started(checkpoint) as reusing, started(checkpoint, enable_block_reuse=False) as other:
        history, num_known = prompt(50), 0
        for turn in range(5):
            before = reusing.stats()
            tokens, num_cached = await answer(reusing, ask(history, **sampling))
            assert (tokens, 0) == await answer(other, ask(history, **sampling))
            num_computed = reusing.stats().num_prompt_tokens - before.num_prompt_tokens
            assert num_cached + num_computed == len(history)
            assert num_cached == num_known
            assert reusing.stats().num_cached_tokens - before.num_cached_tokens == num_cached
            num_known = len(history) + len(tokens) - 1  # the last token was not computed
            history = history + tokens + prompt(7, seed=turn)


@pytest.mark.parametrize("num_first", [6, 50, 150], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_conversation_over_handoffs_moves_its_new_tokens_only(
    checkpoint: Path, sampling: dict[str, Any], num_first: int
) -> None:
    async with pair(checkpoint) as (prefill, decode), started(checkpoint, enable_block_reuse=False) as other:
        history, num_held, num_computed = prompt(num_first), 0, 0
        for turn in range(5):
            request, moved = ask(history, **sampling), decode.stats().kv_moved_bytes
            tokens, num_cached = await disaggregated(prefill, decode, request)
            assert tokens == (await answer(other, request))[0]
            assert num_cached == num_computed
            moved = decode.stats().kv_moved_bytes - moved
            assert moved == (len(history) - num_held) * TOKEN_BYTES
            num_computed, num_held = len(history), len(history) + len(tokens) - 1
            history = history + tokens + prompt(11, seed=turn)


async def test_a_pull_that_failed_leaves_nothing_to_be_found(checkpoint: Path) -> None:
    wire = Wire()
    async with pair(checkpoint, wire) as (prefill, decode):
        wire.fault = HandoffFailed("lost")
        with pytest.raises(HandoffFailed):
            await disaggregated(prefill, decode, ask(prompt(60)))
        wire.fault = None
        before = decode.stats().kv_moved_bytes
        await disaggregated(prefill, decode, ask(prompt(60)))
        assert decode.stats().kv_moved_bytes - before == 60 * TOKEN_BYTES


async def test_the_prompts_log_probabilities_are_computed_though_its_kv_is_known(checkpoint: Path) -> None:
    async with started(checkpoint) as each:
        await answer(each, ask(prompt(40)))
        request = ask(prompt(40), prompt_logprobs=0, max_tokens=1)
        [chunk] = await chunks(each.decode(request))
        assert len(chunk.prompt_logprobs or ()) == 39
