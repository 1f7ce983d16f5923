"""Fuzzes the Harmony parser with millions of random streams: `python -m tests.fuzz_harmony --help`."""

import argparse
import itertools
import multiprocessing
import random
import sys
import time
from functools import partial

from tests.harmony_streams import (
    ANY_TOKEN,
    BROKEN,
    MARK,
    VOCABULARY,
    check,
    check_answer,
    check_without_calls,
    ids_of,
    numbered,
)

CHUNK = 10_000
MAX_FRAGMENTS = 400
_START = ("<|start|>", "assistant")
_JSON = ("<|constrain|>", " json")
_HEADERS = (
    ("<|channel|>", "analysis"),
    ("<|channel|>", "final"),
    ("<|channel|>", "commentary"),
    ("<|channel|>", "commentary", " to=functions.bash", " ", *_JSON),
    ("<|channel|>", "analysis", " to=functions.bash", " code"),
    (" to=get_weather", "<|channel|>", "commentary", " json"),
    ("<|channel|>", "commentary", " to=python", " code"),
    ("<|channel|>", "commentary", "<|channel|>", "commentary", " to=functions.bash", *_JSON),
    ("<|channel|>", "commentary", " to=", "functions.", "bashcommentary", *_JSON),
    ("<|channel|>", "commentary", " to=functions.bash", "\\<|channel|>", "commentary", " json"),
    ("functions.", "bash", " to=", "assistant", "<|channel|>", "commentary"),
    ("<|channel|>", "thoughts"),
    ("<|channel|>", "commentary", " to=assistant", "<|channel|>", "commentary", "?", "commentary", "?"),
    ("<|channel|>", "commentary", "?"),
    ("<|channel|>", "analysis", " ––", "commentary", " to=functions.bash", " json"),
    ("user",),
    ("tool", " to=assistant", "<|channel|>", "commentary"),
    ("<|channel|>", "commentary", *_JSON),
    ("assistantfinal",),
    ("~",),
    (),
)
_BODIES = (
    *(("~",), ("Hello",), ("Hello", " there", "~"), ("é日", "👍"), ("{", '"', ' {"a": 1}'), ("\ufeff",), ()),
    *(("\\<|end|>", "~"), ("\\<|", "3", "\\|>"), ("~", "\n", "~")),
)
_ENDS = (("<|end|>",), ("<|end|>",), ("<|call|>",), ("<|return|>",), ("<|endoftext|>",), ())


def _tokens(pieces: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(ids_of(*pieces))


_MESSAGES = [
    _tokens((*start, *header, *message, *body, *end))
    for start in (_START, _START, _START, ("<|start|>",), ())
    for header in _HEADERS
    for message in (("<|message|>",), ("<|message|>",), ("<|message|>",), ())
    for body in _BODIES
    for end in _ENDS
]
_PARTS = [_tokens(part) for part in (*_HEADERS, *_BODIES, *_ENDS, _START, ("<|message|>",))]
_CONTROLS = [(token_id,) for token_id in VOCABULARY.special_ids.values()]
_BROKEN = [(MARK - 1 - i,) for i in range(len(BROKEN))]
_ANY = [(token_id,) for token_id in ANY_TOKEN]
_FRAGMENTS = (_MESSAGES, _PARTS, _CONTROLS, _BROKEN, _ANY)
_MIXTURES = ((8, 9, 10, 11, 12), (2, 8, 10, 11, 13), (1, 2, 6, 7, 10), (0, 4, 7, 8, 10))


def stream(draw: random.Random) -> list[int]:
    """Most streams have a few messages, one in five hundred has hundreds; half of them are mutated."""
    most = MAX_FRAGMENTS if draw.random() < 0.002 else 6
    groups = draw.choices(_FRAGMENTS, cum_weights=draw.choice(_MIXTURES), k=int(draw.random() * most) + 1)
    fragments = [group[int(draw.random() * len(group))] for group in groups]
    ids = list(itertools.chain.from_iterable(fragments))
    if draw.random() < 0.5:
        for _ in range(int(draw.random() * 3) + 1):
            _mutate(ids, draw)
    return numbered(ids)


def _mutate(ids: list[int], draw: random.Random) -> None:
    """Delete, duplicate, replace, insert or move a token, or cut the stream."""
    at = int(draw.random() * (len(ids) + 1))
    match int(draw.random() * 6):
        case 0:
            del ids[at : at + 1]
        case 1:
            ids[at:at] = ids[at : at + 1]
        case 2:
            ids[at : at + 1] = draw.choice(_ANY)
        case 3:
            ids[at:at] = draw.choice(_CONTROLS)
        case 4:
            ids += ids[at : at + 1]
            del ids[at : at + 1]
        case _:
            del ids[at:]


def violation(seed: int, i: int) -> str | None:
    """The violation in stream `i` of this seed, with what is needed to reproduce it; None if there is
    none."""
    draw = random.Random(seed << 64 | i)
    ids = stream(draw)
    sizes = [int(draw.random() * 8) for _ in range(len(ids) // 3)]
    try:
        check(ids, sizes)
        if i % 16 == 0:
            check_answer(ids, sizes, "length" if i % 32 else "stop")
        if i % 16 == 1:
            check_without_calls(ids)
    except Exception as error:  # noqa: BLE001 any error is a violation
        table = VOCABULARY.token_bytes
        names = {token_id: token.name.encode() for token, token_id in VOCABULARY.special_ids.items()}
        spelled = [names.get(n) or (table[n] if 0 <= n < len(table) else n) for n in ids]
        return f"--seed {seed} --first {i} --streams 1: {type(error).__name__}: {error}\n{ids}\n{spelled}"
    return None


def main() -> int:
    """Prints progress every 1,000,000 streams; exits with 1 and the stream at the first violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--first", type=int, default=0, help="number of the first stream of the seed")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    began_s = time.monotonic()
    with multiprocessing.Pool(args.processes) as pool:
        indexes = range(args.first, args.first + args.streams)
        found_in_each = pool.imap_unordered(partial(violation, args.seed), indexes, CHUNK)
        for num_done, found in enumerate(found_in_each, 1):
            if found is not None:
                sys.stdout.write(f"violation: {found}\n")
                return 1
            if num_done % 1_000_000 == 0 or num_done == args.streams:
                seconds = time.monotonic() - began_s
                sys.stdout.write(f"{num_done} streams, {seconds:.0f} s, no violation\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
