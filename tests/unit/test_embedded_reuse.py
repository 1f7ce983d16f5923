"""Block reuse: a prompt that begins as an earlier one computes only the rest, and answers the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.messages import GenerateRequest, KvHandoff, Role, Sampling, TokenChunk
from tests.memory_wire import Wire
from tests.tiny_gpt_oss import prompt, write_checkpoint
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings

BLOCK = 8
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@contextlib.asynccontextmanager
async def engine(
    checkpoint: Path, role: Role = Role.DECODE, wire: Wire | None = None, *, reuse: bool = True
) -> AsyncIterator[EmbeddedEngine]:
    pool = KvCacheSettings(tokens_per_block=BLOCK, max_tokens=1024, enable_block_reuse=reuse)
    each = EmbeddedEngine(
        EmbeddedSettings(kv_cache_config=pool),
        model_path=checkpoint,
        role=role,
        worker_id=role.value,
        incarnation="1",
        transceiver=wire,
    )
    await each.start()
    try:
        yield each
        await until(lambda: (each.stats().kv_used_blocks, each.stats().kv_pinned_blocks) == (0, 0))
    finally:
        await each.stop()


def ask(token_ids: list[int], salt: str = "", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids,
        sampling=Sampling(**({"max_tokens": 12, "seed": 0} | sampling)),
        deadline_s=PATIENCE_S,
        cache_salt=salt,
    )


async def answer(each: EmbeddedEngine, request: GenerateRequest) -> tuple[list[int], int]:
    """(the tokens, how many tokens of the prompt were cached)."""
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(each.decode(request)) as stream:
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    return [i for chunk in chunks for i in chunk.token_ids], chunks[-1].usage.num_cached_tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_conversation_computes_its_new_tokens_only_and_answers_the_same(
    checkpoint: Path, sampling: dict[str, Any]
) -> None:
    async def main() -> None:
        async with engine(checkpoint) as reusing, engine(checkpoint, reuse=False) as other:
            history, num_known = prompt(50), 0
            for turn in range(5):
                before = reusing.stats().num_prompt_tokens
                tokens, num_cached = await answer(reusing, ask(history, **sampling))
                assert (tokens, 0) == await answer(other, ask(history, **sampling))
                num_computed = reusing.stats().num_prompt_tokens - before
                assert num_cached + num_computed == len(history)
                assert num_cached % BLOCK == 0
                # All that was computed before but the block that was not full.
                assert num_cached == num_known // BLOCK * BLOCK
                num_known = len(history) + len(tokens) - 1  # the last token was not computed
                history = history + tokens + prompt(7, seed=turn)

    asyncio.run(main())


def test_different_salts_share_nothing(checkpoint: Path) -> None:
    async def main() -> None:
        async with engine(checkpoint) as each:
            assert (await answer(each, ask(prompt(40), salt="a")))[1] == 0
            assert (await answer(each, ask(prompt(40), salt="b")))[1] == 0
            assert (await answer(each, ask(prompt(40))))[1] == 0
            assert (await answer(each, ask(prompt(40), salt="a")))[1] == 32

    asyncio.run(main())


def test_a_changed_history_is_computed_from_the_change_on(checkpoint: Path) -> None:
    async def main() -> None:
        async with engine(checkpoint) as each, engine(checkpoint, reuse=False) as other:
            history = prompt(60)
            await answer(each, ask(history))
            changed = [*history[:30], (history[30] + 1) % 100, *history[31:]]
            tokens, num_cached = await answer(each, ask(changed))
            assert num_cached == 24
            assert tokens == (await answer(other, ask(changed)))[0]

    asyncio.run(main())


def test_a_crowd_shares_its_beginning_and_each_gets_what_it_gets_alone(checkpoint: Path) -> None:
    async def main() -> None:
        async with engine(checkpoint) as each, engine(checkpoint, reuse=False) as other:
            shared = prompt(33)
            asked = [ask([*shared, *prompt(5 + i, seed=i)], **SEEDED) for i in range(6)]
            await answer(each, ask(shared))
            told = await asyncio.gather(*[answer(each, request) for request in asked])
            assert [num_cached for _, num_cached in told] == [32] * 6
            assert [tokens for tokens, _ in told] == [(await answer(other, r))[0] for r in asked]

    asyncio.run(main())


def test_prefill_reuses_blocks_and_decode_says_so(checkpoint: Path) -> None:
    async def main() -> None:
        wire = Wire()
        async with (
            engine(checkpoint, Role.PREFILL, wire) as prefill,
            engine(checkpoint, Role.DECODE, wire) as decode,
            engine(checkpoint, reuse=False) as other,
        ):
            for num_cached in (0, 40, 40):
                request = ask(prompt(41))
                async with contextlib.aclosing(prefill.prefill(request)) as replies:
                    handoff = await anext(replies)
                    assert isinstance(handoff, KvHandoff)
                    handed = msgspec.structs.replace(request, handoff=handoff)
                    assert await answer(decode, handed) == ((await answer(other, request))[0], num_cached)
            assert prefill.stats().num_prompt_tokens == 41 + 1 + 1

    asyncio.run(main())


def test_the_prompts_log_probabilities_are_computed_though_its_kv_is_known(checkpoint: Path) -> None:
    async def main() -> None:
        async with engine(checkpoint) as each:
            await answer(each, ask(prompt(40)))
            request = ask(prompt(40), prompt_logprobs=0, max_tokens=1)
            async with contextlib.aclosing(each.decode(request)) as stream:
                [chunk] = [chunk async for chunk in stream]
            assert isinstance(chunk, TokenChunk)
            assert len(chunk.prompt_logprobs or ()) == 39

    asyncio.run(main())
