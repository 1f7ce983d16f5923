"""Positional sampling: token i of choice c uses the random numbers of (seed, c, i)."""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from baton.messages import Sampling, TokenLogprob
from workers.engines.embedded.scheduler import Sequence

_UINT64 = (1 << 64) - 1
# SplitMix64's constants, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token and, if requested, its log-probability."""

    token_id: int
    logprob: TokenLogprob | None = None


def key(seed: int, choice: int, index: int) -> int:
    """64 bits, signed, that depend only on the arguments: Philox is counter-based and stateless."""
    bits = np.random.Philox(key=(choice << 64) | (seed & _UINT64), counter=index).random_raw()
    return int(np.uint64(bits).view(np.int64))


@dataclass(frozen=True, slots=True)
class Draw:
    """The choice of the token that follows a sequence and, if they are right, these guesses."""

    sequence: Sequence
    guesses: Rows[int] = ()

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def index(self) -> int:
        """The token's place in the answer."""
        return self.sequence.num_generated + len(self.guesses)

    def token_ids(self, start: int) -> list[int]:
        """What precedes the token, from `start` on."""
        return [*self.sequence.token_ids[start:], *self.guesses]


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
    """Choose one token per row of `logits` [B, vocab], float32; modifies `logits`.

    Log-probabilities are the model's own, before any sampling setting. Settings apply in vLLM's order: logit
    bias, penalties, `min_tokens` and the form, temperature, then min_p, top_k and top_p."""
    tops = {
        row: torch.log_softmax(logits[row], dim=-1)
        for row, draw in enumerate(draws)
        if draw.sampling.logprobs is not None
    }
    for row, draw in enumerate(draws):
        _adjust(logits[row], draw)
    chosen = logits.argmax(dim=-1)
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        chosen[rows] = _draw(logits[rows], [draws[row] for row in random])
    return [
        Sampled(token_id, _entry(tops[row], token_id, draws[row].sampling.logprobs) if row in tops else None)
        for row, token_id in enumerate(chosen.tolist())
    ]


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """The log probability of one token in each row of `logits` [T, vocab]."""
    rows = torch.log_softmax(logits, dim=-1)
    return [_entry(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True)]


def _entry(logprobs: torch.Tensor, token_id: int, num_top: int | None) -> TokenLogprob:
    values, ids = logprobs.topk(min(num_top or 0, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


def _adjust(row: torch.Tensor, draw: Draw) -> None:
    """Apply bias, penalties and banned tokens in place; most requests have none."""
    sampling, sequence = draw.sampling, draw.sequence
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(draw.token_ids(0))), device=row.device)
        scores = row[seen]
        row[seen] = torch.where(
            scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
        )
    if sampling.frequency_penalty or sampling.presence_penalty:
        answer = torch.tensor(draw.token_ids(sequence.num_prompt), dtype=torch.int64, device=row.device)
        counts = torch.bincount(answer, minlength=len(row))
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    stops: list[int] = []
    if draw.index < sampling.min_tokens and not sampling.ignore_eos:
        stops = [stop for stop in sampling.stop_token_ids if 0 <= stop < len(row)]
    if sequence.matcher is not None:
        stops = _hold_to_form(row, sequence, stops)
    if stops:
        row[stops] = -torch.inf


def _hold_to_form(row: torch.Tensor, sequence: Sequence, stops: list[int]) -> list[int]:
    """Ban what the form does not allow, and `stops` unless the form allows nothing else."""
    assert sequence.matcher is not None
    allowed = sequence.matcher.allowed
    if allowed is None:
        return stops
    row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)
    allowed[stops] = False
    return stops if allowed.any() else []


def _draw(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """The Gumbel-max trick in float64: `logits` [B, vocab] -> [B]. Another token is drawn only where the two
    best are as close as the rounding errors of `logits`; inverse transform sampling has such a place between
    any two tokens."""
    temperatures = [each.sampling.temperature for each in draws]
    scores = logits.double().div_(_column(temperatures, logits))
    if any(each.sampling.top_k or each.sampling.top_p < 1 or each.sampling.min_p for each in draws):
        kept = _truncate(torch.softmax(scores, dim=-1), draws)
        scores.masked_fill_(kept == 0, -torch.inf)
    keys = [key(each.sampling.seed, each.sampling.choice, each.index) for each in draws]
    return scores.add_(_gumbel(keys, logits)).argmax(dim=-1)


def _gumbel(keys: list[int], like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 [B, vocab]: a row has the numbers of SplitMix64 (Steele, Lea, Flood, 2014) from
    its key on, one for each token id."""
    rows = torch.tensor(keys, dtype=torch.int64, device=like.device)[:, None]
    numbers = rows + torch.arange(1, like.shape[1] + 1, device=like.device) * _GAMMA
    for bits, factor in _MIX:
        numbers = numbers.bitwise_xor_(_shifted(numbers, bits)).mul_(factor)
    numbers.bitwise_xor_(_shifted(numbers, 31))
    uniform = _shifted(numbers, 12).double().add_(0.5).mul_(2.0**-52)  # in (0, 1)
    return uniform.log_().neg_().log_().neg_()


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, as if unsigned."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _truncate(probs: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Zero what min_p, top_k and top_p exclude, each from the distribution that the previous one left."""
    vocab = probs.shape[1]
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    floors = _column([each.sampling.min_p for each in draws], probs) * ordered[:, :1]
    ranks = torch.arange(vocab, device=probs.device)
    kept = (ordered >= floors) & (ranks < _column([each.sampling.top_k or vocab for each in draws], probs))
    ordered = ordered * kept
    # Keep a token if more likely ones do not reach top_p; the likeliest is always kept.
    before = ordered.cumsum(dim=-1) - ordered
    shares = [each.sampling.top_p if each.sampling.top_p < 1 else math.inf for each in draws]
    limits = _column(shares, probs) * ordered.sum(dim=-1, keepdim=True)
    ordered = ordered * ((before < limits) | (ranks == 0))
    return torch.zeros_like(probs).scatter_(1, ids, ordered)


def _column(values: list[float] | list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
