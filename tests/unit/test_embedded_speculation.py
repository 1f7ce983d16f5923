"""`speculate: lookup`: fewer steps, and the same answers as without."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.messages import GenerateRequest, Sampling, TokenChunk
from tests.embedded import started
from tests.engine_calls import ask
from tests.guided import ScriptedMatcher
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt
from tests.waiting import PATIENCE_S
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.scheduler import Scheduler, Sequence, Step

STOP = 99


async def answer(each: EmbeddedEngine, request: GenerateRequest) -> list[TokenChunk]:
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(each.decode(request)) as stream:
        return [chunk async for chunk in stream]


def outcome(chunks: list[TokenChunk]) -> tuple[list[int], str | None, int]:
    """The tokens, the reason, and the usage of an answer."""
    last = chunks[-1]
    assert last.usage is not None
    tokens = [token_id for chunk in chunks for token_id in chunk.token_ids]
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
]


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
async def test_an_answer_is_the_same_in_fewer_steps(checkpoint: Path, number: int) -> None:
    sampling = {"logprobs": 2, "max_tokens": 80} | SAMPLINGS[number]
    async with started(checkpoint) as off, started(checkpoint, speculate="lookup") as on:
        expected, found = [await answer(each, ask(REPEATED, **sampling)) for each in (off, on)]
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


async def test_a_crowd_gets_what_it_gets_without_guesses_from_cached_beginnings_too(
    checkpoint: Path,
) -> None:
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
        expected = [outcome(await answer(off, request)) for request in requests]
        for _ in range(2):
            crowd = await asyncio.gather(*(answer(on, request) for request in requests))
            assert [outcome(each) for each in crowd] == expected
        assert on.stats().num_accepted_guesses > 0
        assert on.stats().num_rejected_guesses > 0
        history = [*requests[-1].token_ids, *expected[-1][0], *prompt(9, seed=50)]
        follow_ups = [outcome(await answer(each, ask(history, max_tokens=40))) for each in (off, on)]
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
            whole = outcome(await answer(off, request))
            assert outcome(await answer(on, request)) == whole
            so_far = whole[0][: len(whole[0]) // 2]
            resumed = msgspec.structs.replace(
                request, token_ids=request.token_ids + so_far, num_generated=len(so_far)
            )
            assert so_far + outcome(await answer(on, resumed))[0] == whole[0]


async def test_nothing_is_guessed_beyond_the_context(checkpoint: Path) -> None:
    long = (REPEATED * 8)[: CONTEXT_LENGTH - 20]
    async with started(checkpoint) as off, started(checkpoint, speculate="lookup") as on:
        expected, found = [outcome(await answer(each, ask(long, max_tokens=100))) for each in (off, on)]
        assert found == expected
        assert found[1:] == ("length", 20)


def scheduler(**limits: int) -> Scheduler:
    sizes = {"num_blocks": 200, "tokens_per_block": 4, "context_length": 200}
    sizes |= {"max_batch_size": 40, "max_num_tokens": 320}
    return Scheduler(**sizes | limits, speculates=True)  # type: ignore[arg-type]  # the numbers


def repeating(num_tokens: int = 12, max_tokens: int = 20, *, hands_off: bool = False) -> Sequence:
    token_ids = [1, 2, 3, 4] * num_tokens
    return Sequence(
        token_ids=token_ids[:num_tokens],
        num_prompt=num_tokens,
        sampling=Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(STOP,)),
        num_reserved=num_tokens + max_tokens,
        hands_off=hands_off,
    )


def after_prompts(target: Scheduler, *sequences: Sequence) -> Step:
    """The first step of these answers, whose first tokens continue their prompts."""
    for each in sequences:
        target.add(each)
    for work in target.plan().work:
        target.advance(work, [1])
    return target.plan()


def guessed(step: Step) -> list[list[int]]:
    return [work.guesses for work in step.work]


def test_right_guesses_count_and_wrong_ones_leave_nothing() -> None:
    target, sequence = scheduler(), repeating(12, 5)
    (work,) = after_prompts(target, sequence).work
    assert (work.token_ids, work.guesses, work.start) == ([1, 2, 3, 4], [2, 3, 4], 12)
    target.advance(work, [2, 9])
    assert sequence.token_ids[12:] == [1, 2, 9]
    assert sequence.num_computed == 14
    assert (target.num_accepted_guesses, target.num_rejected_guesses) == (1, 2)
    (work,) = target.plan().work
    assert (work.start, work.token_ids[0]) == (14, 9)


@pytest.mark.parametrize(("max_tokens", "num_guessed"), [(2, 0), (3, 1), (4, 2), (5, 3), (9, 7)])
def test_nothing_is_guessed_beyond_the_end_of_the_answer(max_tokens: int, num_guessed: int) -> None:
    assert len(guessed(after_prompts(scheduler(), repeating(12, max_tokens)))[0]) == num_guessed


def test_a_stop_token_is_not_guessed() -> None:
    sequence = repeating()
    sequence.token_ids[6] = STOP  # 1 2 3 4 1 2 STOP 4 1 2 3 4, and 1
    sequence.token_ids[2] = STOP
    sequence.token_ids[10] = STOP
    assert guessed(after_prompts(scheduler(), sequence)) == [[2]]


def test_nothing_is_guessed_for_a_form_or_for_prefill() -> None:
    held = repeating()
    held.matcher = ScriptedMatcher()
    held.matcher.is_ready = True
    assert guessed(after_prompts(scheduler(), held)) == [[]]
    target, handed = scheduler(), repeating(hands_off=True)
    handed.num_computed = 0
    target.add(handed)
    assert guessed(target.plan()) == [[]]


@pytest.mark.parametrize(("num_answers", "num_each"), [(1, 15), (13, 3), (16, 2), (17, 0)])
def test_many_answers_share_an_eighth_of_a_step_until_there_are_too_many(
    num_answers: int, num_each: int
) -> None:
    step = after_prompts(scheduler(), *(repeating() for _ in range(num_answers)))
    assert [len(each) for each in guessed(step)] == [num_each] * num_answers


def test_a_step_has_no_more_tokens_than_it_may() -> None:
    limits = {"max_batch_size": 8, "max_num_tokens": 8}
    target = scheduler(**limits)
    for _ in range(8):
        target.add(repeating(2))
    for _ in range(40):
        step = target.plan()
        assert sum(len(work.token_ids) for work in step.work) <= 8
        for work in step.work:
            target.advance(work, [*work.guesses, 1] if work.samples else [])
