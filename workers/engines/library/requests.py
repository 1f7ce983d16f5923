"""What libraries report, in Baton's form."""

import itertools
from collections.abc import Sequence
from typing import Any

from baton.messages import TokenLogprob

_NO_LOGPROB = -9999.0  # OpenAI's value for "very unlikely", here for unreported ones


def token_logprobs(
    token_ids: Sequence[int], reported: Sequence[dict[int, Any]] | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry per token, with its `num_top` likeliest; the last tokens may be unreported."""
    found = []
    for token_id, entries in zip(token_ids, itertools.chain(reported or (), itertools.repeat({}))):  # noqa: B905
        logprobs = {i: float(entry.logprob) for i, entry in entries.items()}
        best = sorted(logprobs.items(), key=lambda pair: -pair[1])
        found.append(TokenLogprob(token_id, logprobs.get(token_id, _NO_LOGPROB), tuple(best[:num_top])))
    return tuple(found)
