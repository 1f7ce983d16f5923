"""`speculate: lookup`: fewer steps, and the same answers as without."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.messages import TokenChunk
from tests.embedded import started
from tests.engine_calls import ask, chunks
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt


def outcome(answer: list[TokenChunk]) -> tuple[list[int], str | None, int]:
    """The tokens, the reason, and the usage of an answer."""
    last = answer[-1]
    assert last.usage is not None
    tokens = [token_id for chunk in answer for token_id in chunk.token_ids]
    return tokens, last.finish_reason, last.usage.num_completion_tokens


REPEATED = prompt(24) * 3
# A random model repeats nothing, unless its choice is small.
FEW: list[dict[int, float]] = [{}, {5: 40.0}, {5: 40.0, 6: 40.0}, {5: 40.0, 6: 39.0, 7: 38.0, 8: 37.0}]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logit_bias": FEW[1]},
    {"temperature": 0.7, "seed": 3, "logit_bias": FEW[2]},
    {"temperature": 0.3, "seed": 4, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logit_bias": FEW[3]},
    {"temperature": 0.2, "seed": 5, "frequency_penalty": 0.4, "presence_penalty": 0.1, "logit_bias": FEW[3]},
    {"temperature": 0.2, "seed": 6, "repetition_penalty": 1.05, "logit_bias": FEW[2]},
    {"temperature": 0.5, "seed": 7, "min_tokens": 30, "stop_token_ids": (6, 9), "logit_bias": FEW[2]},
    {"temperature": 0.0, "logit_bias": FEW[1], "tokens": (REPEATED * 8)[: CONTEXT_LENGTH - 20]},
]


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
async def test_an_answer_is_the_same_in_fewer_steps(checkpoint: Path, number: int) -> None:
    asked: dict[str, Any] = {"tokens": REPEATED, "logprobs": 2, "max_tokens": 80} | SAMPLINGS[number]
    async with started(checkpoint) as off, started(checkpoint, speculate="lookup") as on:
        expected, found = [await chunks(each.decode(ask(**asked))) for each in (off, on)]
        assert outcome(found) == outcome(expected)
        wanted = [entry for chunk in expected for entry in chunk.logprobs or ()]
        for entry in (entry for chunk in found for entry in chunk.logprobs or ()):
            other = wanted.pop(0)
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]
        assert not wanted
        stats = on.stats()
        assert stats.num_generated_tokens == off.stats().num_generated_tokens
        assert stats.num_accepted_guesses >= (50 if number == 0 else 1)
        assert off.stats().num_accepted_guesses == 0


async def test_a_crowd_gets_what_it_gets_without_guesses_from_cached_beginnings_too(checkpoint: Path) -> None:
    requests = [
        ask(
            [*REPEATED[: 20 + 9 * i], *prompt(5 + i, seed=i)],
            max_tokens=40,
            temperature=0.5 * (i % 3),
            seed=i,
            logit_bias=FEW[i % 4],
        )
        for i in range(8)
    ]
    async with started(checkpoint) as off, started(checkpoint, speculate="lookup", max_tokens=8192) as on:
        expected = [outcome(await chunks(off.decode(request))) for request in requests]
        for _ in range(2):
            crowd = await asyncio.gather(*(chunks(on.decode(request)) for request in requests))
            assert [outcome(each) for each in crowd] == expected
        assert on.stats().num_accepted_guesses > 0
        assert on.stats().num_rejected_guesses > 0
        history = [*requests[-1].token_ids, *expected[-1][0], *prompt(9, seed=50)]
        follow_ups = [outcome(await chunks(each.decode(ask(history, max_tokens=40)))) for each in (off, on)]
        assert follow_ups[0] == follow_ups[1]
        assert on.stats().num_cached_tokens > 0


async def test_any_prompt_seed_and_length_gives_the_same_answer_resumed_too(checkpoint: Path) -> None:
    rng = random.Random(1)
    async with started(checkpoint) as off, started(checkpoint, speculate="lookup") as on:
        for _ in range(16):
            request = ask(
                [rng.randrange(128) for _ in range(rng.randint(1, 9))] * rng.randint(1, 9),
                temperature=rng.choice([0.0, 0.1, 0.4, 1.0]),
                seed=rng.getrandbits(32),
                max_tokens=rng.randint(2, 50),
                logit_bias=rng.choice(FEW),
            )
            whole = outcome(await chunks(off.decode(request)))
            assert outcome(await chunks(on.decode(request))) == whole
            so_far = whole[0][: len(whole[0]) // 2]
            resumed = msgspec.structs.replace(
                request, token_ids=request.token_ids + so_far, num_generated=len(so_far)
            )
            assert so_far + outcome(await chunks(on.decode(resumed)))[0] == whole[0]
