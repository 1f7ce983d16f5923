"""What `python -m baton bench` makes of what it sees: figures, commands."""

import shlex

import pytest

from baton.flags import parse
from operations.bench import BenchSettings, Sample, aiperf, figures_of


def settings(*flags: str) -> BenchSettings:
    """Of this command line."""
    return parse(BenchSettings, flags, prog="bench", description="", environ={}).settings


def test_percentiles_are_values_that_were_seen() -> None:
    samples = [Sample(began_s=0.0, duration_s=2.0, ttft_s=ms / 1000, num_tokens=11) for ms in range(1, 201)]
    samples += [Sample(began_s=0.0, duration_s=2.0), Sample(began_s=1.0, duration_s=1.0, failure="429 full")]
    figures = figures_of(samples)
    assert figures["ttft_ms"] == {"mean": 100.5, "p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}
    assert figures["itl_ms"] == {}
    assert (figures["answered"], figures["failed"], figures["failures"]) == (201, 1, {"429 full": 1})
    assert (figures["requests_per_s"], figures["tokens_per_s"]) == (100.5, 1100.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--isl", "7"], "--synthetic-input-tokens-mean 7"),
        ([], "--concurrency 8 --request-count 100"),
        (["--api-key", "secret"], '--api-key "$BATON_API_KEY"'),
    ],
)
def test_aiperf_gets_the_same_load(flags: list[str], words: str) -> None:
    command = aiperf("m; ls", "http://h:1/$(ls)", settings(*flags))
    assert words in command
    assert "secret" not in command
    assert {"m; ls", "http://h:1/$(ls)"} < set(shlex.split(command))
    assert "'http://h:1/$(ls)'" in command
