"""Log probabilities as TensorRT-LLM and vLLM tell them, a mapping for each token, in Baton's words."""

from collections.abc import Sequence
from typing import Any

from baton.messages import TokenLogprob

# OpenAI's word for "very unlikely", here for "not told".
_NO_LOGPROB = -9999.0


def token_logprobs(
    token_ids: Sequence[int], told: Sequence[dict[int, Any]] | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry for each token, with its `num_top` likeliest; of the last ones nothing may have been told."""
    all_told = [*(told or ()), *[{}] * (len(token_ids) - len(told or ()))]
    return tuple(_entry(i, entries, num_top) for i, entries in zip(token_ids, all_told, strict=True))


def _entry(token_id: int, entries: dict[int, Any], num_top: int) -> TokenLogprob:
    best = sorted(((i, float(entry.logprob)) for i, entry in entries.items()), key=lambda pair: -pair[1])
    chosen = entries.get(token_id)
    return TokenLogprob(
        token_id, float(chosen.logprob) if chosen is not None else _NO_LOGPROB, tuple(best[:num_top])
    )
