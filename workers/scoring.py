"""Scores the prompts of the number check after the engine has started."""

import logging
import math
from contextlib import aclosing

from baton.errors import BatonError
from baton.messages import GenerateRequest, Role, Sampling, Scores, TokenChunk
from baton.number_check import DIGEST, MAX_TOKENS, NUM_LIKELIEST, PROMPTS
from workers.engine import Engine, EngineInfo

log = logging.getLogger(__name__)

_LIMIT_S = 60.0  # for one prompt
_NO_LOGPROB = -9999.0


async def score(engine: Engine, role: Role, info: EngineInfo) -> Scores | None:
    """None if the engine cannot: it is simulated, its context is short, or it fails on a prompt. Raises
    ValueError if what it computes is not a number."""
    if info.is_simulated or info.context_length < MAX_TOKENS + 2:
        return None
    try:
        likeliest = [await _likeliest(engine, role, ids) for ids in PROMPTS]
    except BatonError as error:
        log.warning("numbers not checked: %s", error)
        return None
    if not all(likeliest):
        log.warning("numbers not checked: the engine returns no log probabilities")
        return None
    if any(math.isnan(logprob) for top in likeliest for _, logprob in top):
        raise ValueError("the log probabilities that the model computes are not numbers")
    return Scores(DIGEST, tuple(likeliest))


async def _likeliest(engine: Engine, role: Role, token_ids: list[int]) -> tuple[tuple[int, float], ...]:
    request = GenerateRequest(
        request_id=f"numbers-{len(token_ids)}",
        model="",
        token_ids=list(token_ids),
        sampling=Sampling(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True, logprobs=NUM_LIKELIEST),
        deadline_s=_LIMIT_S,
    )
    replies = engine.prefill(request) if role is Role.PREFILL else engine.decode(request)
    async with aclosing(replies):
        async for reply in replies:
            if isinstance(reply, TokenChunk) and reply.logprobs:
                top = reply.logprobs[0].top[:NUM_LIKELIEST]
                return tuple((token, round(max(logprob, _NO_LOGPROB), 4)) for token, logprob in top)
    return ()
