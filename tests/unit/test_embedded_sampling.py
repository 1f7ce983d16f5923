"""Positional sampling: each setting works as OpenAI or Hugging Face define it, independent of the batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from baton.messages import Sampling
from tests.guided import ScriptedMatcher
from workers.engines.embedded.sampling import Draw, Sampled, key
from workers.engines.embedded.sampling import sample as sample_draws
from workers.engines.embedded.scheduler import Sequence

VOCAB = 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])


def draw(token_ids: tuple[int, ...] = (0,), num_prompt: int = 1, **sampling: Any) -> Sequence:
    settings = {"max_tokens": 100, "seed": 0, "temperature": 0.0} | sampling
    return Sequence(list(token_ids), num_prompt, Sampling(**settings), num_reserved=100)


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    return sample_draws(logits, [Draw(each) for each in sequences])


def chosen(*draws: Sequence) -> list[int]:
    return [sampled.token_id for sampled in sample(LOGITS.repeat(len(draws), 1), list(draws))]


def shares(num: int = 20_000, **sampling: Any) -> np.ndarray:
    """How often each token is drawn over `num` seeds."""
    draws = [draw(seed=seed, **({"temperature": 1.0} | sampling)) for seed in range(num)]
    return np.bincount(chosen(*draws), minlength=VOCAB) / num


def probabilities(logits: torch.Tensor = LOGITS) -> np.ndarray:
    return torch.softmax(logits.double(), -1).numpy()


def assert_follows(drawn: np.ndarray, expected: np.ndarray, num: int = 20_000) -> None:
    """Within six standard deviations, which one run in a million would miss at most."""
    assert (np.abs(drawn - expected) <= 6 * np.sqrt(expected * (1 - expected) / num) + 1e-9).all()


def test_temperature_0_takes_the_likeliest_after_logit_bias() -> None:
    assert chosen(draw(), draw(seed=5)) == [0, 0]
    assert chosen(draw(logit_bias={5: 3.5}), draw(logit_bias={0: -100.0})) == [5, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    expected = probabilities(LOGITS / temperature)
    assert_follows(shares(temperature=temperature), expected)


def test_a_token_depends_on_seed_choice_and_place_only() -> None:
    keys = {key(seed, choice, index) for seed in range(5) for choice in range(5) for index in range(40)}
    assert len(keys) == 5 * 5 * 40
    assert all(-(2**63) <= number < 2**63 for number in keys)
    assert key(-1, 0, 3) == key(-1, 0, 3) != key(1, 0, 3)


def test_rounding_errors_draw_the_same_tokens() -> None:
    num, vocab, rng = 2_000, 1_000, torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num, vocab, generator=rng)
    draws = [draw(seed=seed, temperature=1.0) for seed in range(num)]
    noisy = logits + 1e-5 * torch.randn(num, vocab, generator=rng)
    assert [s.token_id for s in sample(logits, draws)] == [s.token_id for s in sample(noisy, draws)]


def test_the_rest_of_the_batch_changes_nothing() -> None:
    mixed = [
        draw(seed=seed, token_ids=tuple(range(1 + seed % 5)), **settings)
        for seed in range(30)
        for settings in (
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.8},
            {"temperature": 1.3, "top_k": 3, "min_p": 0.05},
            {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {3: 2.0}},
            {},
        )
    ]
    assert chosen(*mixed) == [chosen(each)[0] for each in mixed]


def test_top_k_keeps_the_k_likeliest_top_p_the_fewest_and_min_p_is_relative_to_the_likeliest() -> None:
    expected = probabilities(LOGITS[:3])
    assert_follows(shares(top_k=3)[:3], expected)
    first, second = probabilities()[:2]
    assert np.count_nonzero(shares(500, top_p=first - 0.01)) == 1
    assert np.count_nonzero(shares(500, top_p=first + 0.01)) == 2
    assert np.count_nonzero(shares(500, top_p=first + second + 0.01)) == 3
    limit = math.exp(LOGITS[2] - LOGITS[0])
    assert np.count_nonzero(shares(500, min_p=limit * 0.99)) == 3
    assert np.count_nonzero(shares(500, min_p=limit * 1.01)) == 2


def test_frequency_and_presence_penalties_count_the_answer_not_the_prompt() -> None:
    prompt_only = draw((0, 0, 0), 3, frequency_penalty=2.0, presence_penalty=2.0)
    once = draw((0, 0), 1, frequency_penalty=0.6)
    twice = draw((0, 0, 0), 1, frequency_penalty=0.6)
    present = draw((0, 0, 0, 1), 1, presence_penalty=1.2)
    assert chosen(prompt_only, once, twice, present) == [0, 0, 1, 0]
    assert chosen(draw((0, 0, 0), 1, presence_penalty=1.2)) == [1]


def test_repetition_penalty_counts_the_prompt_too_and_pushes_negative_logits_down() -> None:
    assert chosen(draw((0,), 1, repetition_penalty=2.5)) == [1]
    expected = LOGITS.clone()
    expected[[0, 5]] = torch.tensor([1.0, -2.0])
    assert_follows(shares(token_ids=(0, 5), num_prompt=2, repetition_penalty=2.0), probabilities(expected))


def test_stop_tokens_cannot_come_before_min_tokens() -> None:
    early = draw((3, 3), 1, min_tokens=2, stop_token_ids=(0, 1, 7, VOCAB))
    late = draw((3, 3, 3), 1, min_tokens=2, stop_token_ids=(0, 1, 7))
    ignored = draw((3,), 1, min_tokens=2, stop_token_ids=(0,), ignore_eos=True)
    unknown = draw((3,), min_tokens=2, stop_token_ids=(-1, VOCAB), logit_bias={VOCAB - 1: 9.0})
    formed = draw((3,), min_tokens=2, stop_token_ids=(0,))
    formed.matcher = ScriptedMatcher()
    formed.matcher.allowed = np.isin(np.arange(VOCAB), [0, 6])
    assert chosen(early, late, ignored, unknown, formed) == [2, 0, 0, VOCAB - 1, 6]


def test_logprobs_are_the_models_own_before_any_setting() -> None:
    expected = torch.log_softmax(LOGITS, -1).tolist()
    plain, changed, none, every = sample(
        LOGITS.repeat(4, 1),
        [draw(logprobs=2), draw(logprobs=0, logit_bias={4: 9.0}), draw(), draw(logprobs=VOCAB + 1)],
    )
    assert every.logprob is not None
    assert [token_id for token_id, _ in every.logprob.top] == list(range(VOCAB))
    assert plain.logprob is not None
    assert plain.logprob.token_id == 0
    assert plain.logprob.logprob == pytest.approx(expected[0])
    assert [token_id for token_id, _ in plain.logprob.top] == [0, 1]
    assert [value for _, value in plain.logprob.top] == pytest.approx(expected[:2])
    assert changed.logprob is not None
    assert (changed.token_id, changed.logprob.top) == (4, ())
    assert changed.logprob.logprob == pytest.approx(expected[4])
    assert none.logprob is None
