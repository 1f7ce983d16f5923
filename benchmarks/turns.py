"""What each turn of a tool conversation costs on this CPU, with Baton's caches and routes on and off.

`python benchmarks/turns.py` runs the demo model with 2 prefill and 2 decode workers and one frontend for each
way, and writes benchmarks/results/turns.json: tokens computed, bytes of KV moved, time to first token. The
answers of all ways must be equal."""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from benchmarks.tool_conversation import Turn, answers_of, converse
from tests.stack import Stack

NUM_TURNS = 10
# Flags of the frontend, and whether requests may find KV.
WAYS: dict[str, tuple[list[str], bool]] = {
    "no cache": ([], False),
    "caches, round robin": ([], True),
    "caches, routed by prefix": (["--router-mode", "prefix"], True),
    "caches, routed by prefix, local prefill": (
        ["--router-mode", "prefix", "--local-prefill-tokens", "150"],
        True,
    ),
}


def figures(turns: list[Turn]) -> dict[str, Any]:
    """Totals, and each turn's figures in order."""
    num_new = sum(turn.num_new_tokens for turn in turns)
    num_computed = sum(turn.num_computed_tokens for turn in turns)
    return {
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
        "new_tokens": num_new,
        "computed_tokens": num_computed,
        "computed_per_new_token": round(num_computed / num_new, 3),
        "moved_bytes": sum(turn.moved_bytes for turn in turns),
        "handoffs": sum(turn.num_handoffs for turn in turns),
        "later_turns_ttft_ms": round(1e3 * statistics.median(turn.ttft_s for turn in turns[1:]), 1),
        "turns": {
            "computed_tokens": [turn.num_computed_tokens for turn in turns],
            "moved_bytes": [turn.moved_bytes for turn in turns],
            "ttft_ms": [round(1e3 * turn.ttft_s, 1) for turn in turns],
        },
    }


def main() -> None:
    """Measure the ways in turn, over the same workers."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results: dict[str, Any] = {"command": "python benchmarks/turns.py", "model": "models/demo, 2 + 2 workers"}
    answers = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        workers = Stack(_folder(scratch, "workers"))
        running.callback(workers.stop)
        for mode in ("prefill", "prefill", "decode", "decode"):
            workers.worker(mode, engine="embedded")
        for name, (flags, cached) in WAYS.items():
            registry = {"BATON_FILE_REGISTRY": workers.environ["BATON_FILE_REGISTRY"]}
            stack = Stack(_folder(scratch, name), registry)
            running.callback(stack.stop)
            stack.frontend(*flags)
            stack.wait_ready(2, 2)
            # KV of the ways before is another tenant's.
            turns = converse(stack, NUM_TURNS, salt=name if cached else None)
            answers.append(answers_of(turns))
            results[name] = figures(turns)
            print(name, json.dumps({k: v for k, v in results[name].items() if k != "turns"}))
    results["answers_are_equal"] = all(answer == answers[0] for answer in answers)
    file = Path(__file__).parent / "results/turns.json"
    file.write_text(json.dumps(results, indent=1) + "\n")


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch) / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
