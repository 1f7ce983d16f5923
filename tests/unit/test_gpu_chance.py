"""The GPU tests' significance test, and the recorded runs checked with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.chance import as_many

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("vllm_disagg_*.json"))


def test_a_few_that_differ_are_chance_and_many_are_not() -> None:
    for found in ((128, 128, 128), (127, 128, 128), (126, 128, 128), (123, 128, 128), (10, 0, 10)):
        assert as_many(*found)
    for found in ((112, 128, 128), (60, 94, 128), (0, 7, 10)):
        assert not as_many(*found)


def test_both_sizes_have_been_run() -> None:
    assert {"vllm_disagg_20b", "vllm_disagg_120b"} <= {file.stem for file in RESULTS}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_recorded_runs_have_as_many_equal_answers_with_a_handoff_as_without(file: Path) -> None:
    pairs = list(_pairs(json.loads(file.read_text())))
    assert len(pairs) == 10
    for found, control, num in pairs:
        assert as_many(found, control, num)


def _pairs(result: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Equal answers and equal first tokens of each comparison: found, control, all."""
    rounds = [
        (result[f"equal_answers_{n}_at_a_time"], f"aggregated_vs_aggregated_{m}_at_a_time")
        for n, m in ((1, 16), (16, 4), (64, 16))
    ]
    compared = [(kept["handed_over_vs_aggregated"], kept[name], kept["prompts"]) for kept, name in rounds]
    turns, killed = result["next_turn"], result["prefill_killed"]
    compared.append((turns["handed_over_vs_aggregated"], turns["aggregated_vs_aggregated_4_at_a_time"], 16))
    compared.append((killed["vs_calm"], killed["calm_vs_calm"], killed["answered"]))
    for found, control, num in compared:
        for what in ("answers", "first_tokens"):
            yield found[what], control[what], num
