"""The cost of guided decoding per sampled token: `python benchmarks/guided_mask.py [MODEL_FOLDER]`; CPU, no
model."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from baton.messages import Sampling
from frontend.harmony.conversation import AnswerFormat
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.request import guided
from workers.engines.embedded.grammar import Grammars, Matcher
from workers.engines.embedded.sampling import Draw, sample
from workers.engines.embedded.scheduler import Sequence

NUM_ROUNDS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "object", "properties": {"note": {"type": "string"}}}},
        "num": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "unit", "days", "num"],
    "additionalProperties": False,
}
THOUGHT = "The user wants the weather in a structured form, so I will think about what to say. Let's go."
VALUE = {
    "city": "San Francisco",
    "unit": "celsius",
    "days": [{"note": "cloudy with some sun"}, {"note": "rain"}],
    "num": 42,
}


async def main() -> None:
    """Print the milliseconds to compile a form, and the microseconds to sample with and without it."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/demo")
    tokenizer = ModelTokenizer.load(folder)
    answer = tokenizer.encode_text(
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
        f"{json.dumps(VALUE)}<|return|>",
        allow_special=True,
    )
    grammars = Grammars(folder, tokenizer.vocab_size)
    form = guided([], answer=AnswerFormat(schema=SCHEMA))
    assert form is not None

    print(f"{tokenizer.vocab_size} tokens in the vocabulary, {len(answer)} in the answer")
    for what in ("first", "next"):
        start = time.perf_counter()
        await grammars.matcher(form)
        print(f"{what} matcher: {1e3 * (time.perf_counter() - start):.2f} ms")
    for temperature in (0.0, 1.0):
        free = await _sample_us(answer, tokenizer.vocab_size, temperature, None)
        held = await _sample_us(answer, tokenizer.vocab_size, temperature, lambda: grammars.matcher(form))
        print(f"temperature {temperature}: {free:.0f} us per token, {held:.0f} us with a form")
    grammars.close()


async def _sample_us(
    answer: list[int],
    vocab_size: int,
    temperature: float,
    new_matcher: Callable[[], Awaitable[Matcher]] | None,
) -> float:
    """The median time to sample one token of `answer`."""
    sampling = Sampling(max_tokens=len(answer), seed=0, temperature=temperature)
    logits = torch.randn(1, vocab_size)
    taken = []
    for _ in range(NUM_ROUNDS):
        matcher = await new_matcher() if new_matcher is not None else None
        for i in range(len(answer)):
            row, sequence = logits.clone(), Sequence(answer[:i], 0, sampling, len(answer), matcher=matcher)
            start = time.perf_counter()
            if matcher is not None:
                await matcher.follow(answer[:i], 0)
            sample(row, [Draw(sequence)])
            taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken)


if __name__ == "__main__":
    asyncio.run(main())
