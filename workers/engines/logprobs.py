"""Converts the log probabilities of TensorRT-LLM and vLLM, one mapping per token."""

from collections.abc import Sequence
from typing import Any

from baton.messages import TokenLogprob

# OpenAI's value for "very unlikely", here for unreported ones.
_NO_LOGPROB = -9999.0


def token_logprobs(
    token_ids: Sequence[int], told: Sequence[dict[int, Any]] | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry per token, with its `num_top` likeliest; the last tokens may be unreported."""
    all_told = [*(told or ()), *[{}] * (len(token_ids) - len(told or ()))]
    return tuple(_entry(i, entries, num_top) for i, entries in zip(token_ids, all_told, strict=True))


def _entry(token_id: int, entries: dict[int, Any], num_top: int) -> TokenLogprob:
    best = sorted(((i, float(entry.logprob)) for i, entry in entries.items()), key=lambda pair: -pair[1])
    chosen = entries.get(token_id)
    return TokenLogprob(
        token_id, float(chosen.logprob) if chosen is not None else _NO_LOGPROB, tuple(best[:num_top])
    )
