"""Accepts a guess if it is the token that its place draws, in place of rejection sampling.

Rejection sampling accepts a guess with the probability of its token. The draw of a place gives the token with
just that probability, so that as many guesses count; and an answer depends on its seed, not on guesses."""

import importlib
from typing import Any

import torch


def pass_draws() -> None:
    """Make vLLM's second runner check guesses so."""
    sampler = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    vars(sampler)["rejection_sample"] = _sample


def _sample(*given: Any, use_fp64: bool = False, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `rejection_sample`, which is called by position up to the number of guesses."""
    logits, _, guesses, ends, positions, _, expanded, _, temperature, seeds, num_guesses, *_ = given
    gumbel = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
    drawn = gumbel.gumbel_sample(
        logits, expanded, temperature, seeds, positions, apply_temperature=False, use_fp64=use_fp64
    )
    return accept(drawn, guesses, ends, num_guesses)


def accept(
    drawn: torch.Tensor, guesses: torch.Tensor, ends: torch.Tensor, num_guesses: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of each request, a row of `num_guesses` + 1, and how many of them count: guesses that were
    drawn, and the first draw after them.

    `drawn` and `guesses` are the draws and the input tokens of all places; those of request i are
    `ends[i]:ends[i + 1]`, each guess the input after the draw that it is compared with."""
    begin, end = ends[:-1, None].long(), ends[1:, None].long()
    places = begin + torch.arange(num_guesses + 1, device=drawn.device)
    found = drawn[places.clamp(max=len(drawn) - 1)]
    following = guesses[(places + 1).clamp(max=len(drawn) - 1)]
    is_right = (places + 1 < end) & (found == following)
    return found, 1 + is_right.int().cumprod(1).sum(1, dtype=torch.int32)
