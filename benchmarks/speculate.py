"""What guessed tokens bring on this CPU: `--speculate lookup` on and off, in turn, on the demo model.

`python benchmarks/speculate.py` writes benchmarks/results/speculate.json: tokens per step, the time of a
token on the clock and of the CPU (for a busy machine), and whether all answers are equal. `copies`: a tool's
result has a note of 8 to 14 words, which the model repeats in its reasoning and in its answer. `dialogues`:
what the demo model is scored with. `noise`: the same at temperature 3, where nothing repeats."""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tokenizers import Tokenizer

import benchmarks  # noqa: F401  checks the packages
from baton.messages import GenerateRequest, Sampling
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Tool,
    ToolCall,
    ToolResult,
    UserTurn,
    render,
)
from tools.demo_tokenizer import encode
from tools.score_demo_model import held_back_examples
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings

MODEL = Path("models/demo")
WORDS = [
    "piano",
    "Prague",
    "Omar",
    "silver",
    "garden",
    "bridge",
    "window",
    "Madrid",
    "lemon",
    "forest",
    "paper",
]
WORDS += ["engine", "river", "cloud", "market", "stone", "yellow"]
STOPS = (3071, 3070, 3064)
NUM_AT_A_TIME = (1, 8)
TOOL = Tool(
    name="read_note",
    description="Reads a note",
    parameters={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)


def copies(number: int) -> list[Conversation]:
    """After a call and its result, which the answer repeats."""
    found = []
    for seed in range(number):
        rng = random.Random(seed)
        note = " ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 14)))
        name = rng.choice(WORDS)
        call = ToolCall(call_id="c1", name="read_note", arguments=json.dumps({"name": name}))
        thought = f"Need to read the note {name}. Call read_note."
        turns = (
            UserTurn(text=f"Please read the note {name}."),
            AssistantTurn(reasoning=thought, tool_calls=(call,)),
            ToolResult(call_id="c1", text=json.dumps({"content": note})),
        )
        found.append(
            Conversation(turns=turns, tools=(TOOL,), reasoning_effort="low", current_date="2026-03-26")
        )
    return found


def requests(conversations: list[Conversation], temperature: float) -> list[GenerateRequest]:
    """One for each conversation, with its own seed."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return [
        GenerateRequest(
            request_id=str(number),
            model="demo",
            token_ids=encode(tokenizer, render(conversation)),
            sampling=Sampling(max_tokens=120, seed=number, temperature=temperature, stop_token_ids=STOPS),
            deadline_s=600.0,
        )
        for number, conversation in enumerate(conversations)
    ]


class Way:
    """An engine, and what it has done: tokens, and seconds per token of each batch."""

    def __init__(self, speculate: Any) -> None:
        pool = KvCacheSettings(max_tokens=32_768, enable_block_reuse=False)
        settings = EmbeddedSettings(kv_cache_config=pool, speculate=speculate)
        self.engine = EmbeddedEngine(settings, model_path=MODEL, transceiver=None)
        self.token_s: list[float] = []
        self.cpu_s: list[float] = []
        self.num_tokens = self.num_accepted = 0

    async def answer(self, batch: list[GenerateRequest]) -> list[list[int]]:
        """The answers to requests that run at the same time."""
        before, began_s = self.engine.stats(), time.process_time()
        timed = await asyncio.gather(*map(self._one, batch))
        now, spent_s = self.engine.stats(), time.process_time() - began_s
        self.num_tokens += now.num_generated_tokens - before.num_generated_tokens
        self.num_accepted += now.num_accepted_guesses - before.num_accepted_guesses
        self.token_s.append(sum(spent_s for _, spent_s in timed) / sum(len(ids) - 1 for ids, _ in timed))
        self.cpu_s.append(spent_s / sum(len(ids) for ids, _ in timed))
        return [ids for ids, _ in timed]

    async def _one(self, request: GenerateRequest) -> tuple[list[int], float]:
        """(the tokens, the seconds after the first)."""
        token_ids: list[int] = []
        first_s = 0.0
        async with aclosing(self.engine.decode(request)) as chunks:
            async for chunk in chunks:
                first_s = first_s or time.perf_counter()
                token_ids += chunk.token_ids
        return token_ids, time.perf_counter() - first_s


async def measure(asked: list[GenerateRequest], num_at_a_time: int) -> dict[str, Any]:
    """Both ways in turn, batch by batch; the first batch warms up."""
    ways = {name: Way(name) for name in (None, "lookup")}
    for way in ways.values():
        await way.engine.start()
    num_different = 0
    batches = [asked[i : i + num_at_a_time] for i in range(0, len(asked), num_at_a_time)]
    for number, batch in enumerate([batches[0], *batches]):
        order = list(ways.values())[:: 1 if number % 2 else -1]
        answers = [await way.answer(batch) for way in order]
        num_different += sum(one != other for one, other in zip(*answers, strict=True))
        if not number:
            for way in ways.values():
                way.token_s, way.cpu_s, way.num_tokens, way.num_accepted = [], [], 0, 0
    off, on = ways.values()
    for way in ways.values():
        await way.engine.stop()
    return {
        "answers": len(asked),
        "different_answers": num_different,
        "tokens": on.num_tokens,
        "tokens_per_step": round(on.num_tokens / (on.num_tokens - on.num_accepted), 2),
        "token_ms": {
            "off": round(1e3 * statistics.median(off.token_s), 2),
            "on": round(1e3 * statistics.median(on.token_s), 2),
        },
        "token_ms_on_by_off": _ratio(off.token_s, on.token_s),
        "cpu_on_by_off": _ratio(off.cpu_s, on.cpu_s),
    }


def _ratio(off: list[float], on: list[float]) -> float:
    """The median over the batches."""
    return round(statistics.median(b / a for a, b in zip(off, on, strict=True)), 3)


async def main() -> None:
    """Measure each load with each number at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/speculate.json")
    given = parser.parse_args()
    dialogues = [example.conversation for example in held_back_examples(given.answers)]
    loads = {
        "copies": requests(copies(given.answers), 0.0),
        "copies, temperature 1": requests(copies(given.answers), 1.0),
        "dialogues": requests(dialogues, 0.0),
        "noise": requests(dialogues, 3.0),
    }
    results: dict[str, Any] = {"command": "python benchmarks/speculate.py", "model": str(MODEL)}
    for name, asked in loads.items():
        for num_at_a_time in NUM_AT_A_TIME:
            results[f"{name}, {num_at_a_time} at a time"] = found = await measure(asked, num_at_a_time)
            print(name, num_at_a_time, json.dumps(found), flush=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
