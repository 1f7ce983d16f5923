"""The cost of the Harmony parser per token: `python benchmarks/harmony_parse.py`; no model, no network."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from frontend.harmony.parse import HarmonyParser
from frontend.text.tokenizer import SpecialToken, Vocabulary

NUM_WORDS = 200_000
NUM_ROUNDS = 15
HEADERS: dict[str, list[SpecialToken | bytes]] = {
    "analysis": [SpecialToken.CHANNEL, b"analysis", SpecialToken.MESSAGE],
    "final": [SpecialToken.START, b"assistant", SpecialToken.CHANNEL, b"final", SpecialToken.MESSAGE],
    "call": [
        *(
            SpecialToken.START,
            b"assistant",
            SpecialToken.CHANNEL,
            b"comment",
            b"ary",
            b" to",
            b"=",
            b"functions",
        ),
        *(b".get", b"_weather", b" ", SpecialToken.CONSTRAIN, b"json", SpecialToken.MESSAGE),
    ],
}


def main() -> None:
    """Print microseconds per token, best of several rounds, for several answers and chunk sizes."""
    draw = random.Random(0)
    words = [bytes(draw.choices(b"abcdefghij {}\"'", k=draw.randint(1, 8))) for _ in range(NUM_WORDS)]
    texts = sorted({part for header in HEADERS.values() for part in header if isinstance(part, bytes)})
    table = [*words, *texts, *[b""] * len(SpecialToken)]
    special_ids = {token: NUM_WORDS + len(texts) + i for i, token in enumerate(SpecialToken)}
    vocabulary = Vocabulary(special_ids=special_ids, token_bytes=table)

    def header(name: str) -> list[int]:
        return [
            NUM_WORDS + texts.index(part) if isinstance(part, bytes) else special_ids[part]
            for part in HEADERS[name]
        ]

    def text(num_tokens: int) -> list[int]:
        return draw.choices(range(NUM_WORDS), k=num_tokens)

    end = [special_ids[SpecialToken.END]]
    answers = {
        "reasoning and answer": header("analysis") + text(6000) + end + header("final") + text(4000) + end,
        "calls of 30 tokens": [i for _ in range(220) for i in header("call") + text(30) + end],
        "no message token": [special_ids[SpecialToken.CHANNEL], *text(10_000)],
        "channel tokens only": [special_ids[SpecialToken.CHANNEL]] * 10_000,
    }
    print(
        f"{'us per token':<24}{'tokens':>8}{'1 a feed':>10}{'4 a feed':>10}{'16 a feed':>10}{'at once':>10}"
    )
    for name, ids in answers.items():
        costs = [best_us(partial(parse, vocabulary, ids, size)) for size in (1, 4, 16, len(ids))]
        print(f"{name:<24}{len(ids):>8}" + "".join(f"{cost / len(ids):>10.3f}" for cost in costs))


def parse(vocabulary: Vocabulary, ids: Sequence[int], size: int) -> None:
    """Parse one answer, fed `size` tokens at a time."""
    parser = HarmonyParser(vocabulary, frozenset({"get_weather"}))
    for start in range(0, len(ids), size):
        parser.feed(ids[start : start + size])
    parser.finish()


def best_us(run: Callable[[], None]) -> float:
    """CPU time of the fastest round: other load on the machine can only add to it."""
    costs = []
    for _ in range(NUM_ROUNDS):
        start = time.thread_time()
        run()
        costs.append(time.thread_time() - start)
    return min(costs) * 1e6


if __name__ == "__main__":
    main()
