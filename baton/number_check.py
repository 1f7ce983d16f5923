"""Whether workers of one model compute the same: the next token's probabilities after fixed prompts."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec

from baton.messages import UNDECODABLE, Scores, WorkerInfo

TOLERANCE = 0.05
"""Demo model: 0.012 between bfloat16 and float32, 0.034 with weights of 6 bits, 0.08 with 5, 0.14 with an
expert of each layer zero, 0.2 with two layers exchanged."""
NUM_LIKELIEST = 5
MAX_TOKENS = 240
_TEXT = (
    "The committee met on Tuesday to decide where the new bridge should stand. An engineer from the city had "
    "measured the river at four places, and the widest was only 212 metres across. It will cost less than we "
    "feared, she said, but the ground on the northern bank is soft, so the piers must go down to the rock."
)
_WORDS_EACH = 6


# The first ids of a byte-level vocabulary are the bytes from "!" to "~"; the space's is 220.
_IDS = [220 if letter == " " else ord(letter) - ord("!") for letter in _TEXT]
_ENDS = list(accumulate(len(word) + 1 for word in _TEXT.split(" ")))
PROMPTS = tuple(_IDS[max(0, end - MAX_TOKENS) : end] for end in _ENDS[_WORDS_EACH - 1 : -1 : _WORDS_EACH])
"""The text up to some of its words and a space, where many tokens may follow."""
DIGEST = blake2b(msgspec.msgpack.encode(PROMPTS), digest_size=4).hexdigest()
"""Scores of other prompts are not compared."""

Trusted = Mapping[str, Scores]
"""Recorded scores by model."""
_Record = Annotated[dict[str, Scores], msgspec.Meta(min_length=1)]
_MAX_BYTES = 1 << 20


def difference(left: Scores, right: Scores) -> float:
    """From 0, equal, to 1: the mean share of probability that is on other tokens."""
    return fmean(map(_share, left.likeliest, right.likeliest))


def _share(left: tuple[tuple[int, float], ...], right: tuple[tuple[int, float], ...]) -> float:
    ours, theirs = ({token: math.exp(min(0.0, p)) for token, p in side} for side in (left, right))
    # What a token that is not listed may have.
    most = [max(0.0, min(1 - sum(side.values()), *side.values(), 1.0)) for side in (ours, theirs)]
    total = 0.0
    for token in ours.keys() | theirs.keys():
        our = ours.get(token, min(most[0], theirs.get(token, 0.0)))
        their = theirs.get(token, min(most[1], ours.get(token, 0.0)))
        total += abs(our - their)
    return min(1.0, total / 2)


def check_numbers(workers: Iterable[WorkerInfo], trusted: Trusted) -> tuple[dict[str, str], list[str]]:
    """Compare the workers of each model with what was recorded or, without that, with each other: the
    majority is right. Returns why workers are refused, by address, and who differs without a majority."""
    refused: dict[str, str] = {}
    doubts: list[str] = []
    by_model = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: worker.label):
        if worker.scores is not None and worker.scores.prompts == DIGEST:
            by_model[worker.model].append((worker, worker.scores))
    for model, scored in by_model.items():
        references, source = [trusted[model]] if model in trusted else [], "the trusted build's"
        if not references:
            if trusted:
                doubts.append(f"{model}: --trusted-numbers is of {', '.join(trusted)}, so it is not used")
            groups = sorted(_groups(scored), key=len, reverse=True)
            references = [each for _, each in groups[0]]
            source = f"those of {len(references)} of {len(scored)} workers"
            if 2 * len(groups[0]) <= len(scored):
                sides = [", ".join(worker.label for worker, _ in group) for group in groups]
                share = difference(groups[0][0][1], groups[1][0][1])
                doubts.append(
                    f"{model}: the probabilities of {' | '.join(sides)} differ by {share:.2f}; which are "
                    "right cannot be known without the frontend's --trusted-numbers"
                )
                continue
        for worker, scores in scored:
            if all(difference(scores, each) > TOLERANCE for each in references):
                share = difference(scores, references[0])
                refused[worker.address] = (
                    f"its probabilities differ by {share:.2f} from {source}, {TOLERANCE} is allowed; compare "
                    "weights, quantization, library and devices, then restart it"
                )
    return refused, doubts


_Scored = list[tuple[WorkerInfo, Scores]]


def _groups(scored: _Scored) -> list[_Scored]:
    """Workers that agree with the first of their group."""
    groups: list[_Scored] = []
    for each in scored:
        group = next((group for group in groups if difference(group[0][1], each[1]) <= TOLERANCE), None)
        if group is None:
            groups.append(group := [])
        group.append(each)
    return groups


def read_trusted(path: Path | None) -> Trusted:
    """What `python -m baton doctor --record` wrote; nothing without a file. Raises ValueError."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            trusted = msgspec.json.decode(file.read(_MAX_BYTES), type=_Record)
    except (OSError, *UNDECODABLE) as error:
        raise ValueError(f"--trusted-numbers {path}: {error}") from error
    if any(scores.prompts != DIGEST for scores in trusted.values()):
        raise ValueError(f"--trusted-numbers {path}: it has other prompts, of another Baton; record it again")
    return trusted
