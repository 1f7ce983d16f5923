"""Guessed tokens in real processes: a stream outlives its worker, token for token."""

from pathlib import Path

import pytest

from tests.answers import Stream, read_all, whole_answer
from tests.stack import Stack

NUM_TOKENS = 400


@pytest.mark.slow
def test_streams_with_guesses_outlive_a_killed_worker_without_losing_a_token(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        (plain,) = stack.serve("decode", engine="embedded")
        expected = whole_answer(stack, NUM_TOKENS)
        plain.kill()
        killed, _ = [stack.worker("decode", "--speculate", "lookup", engine="embedded") for _ in range(2)]
        stack.wait_ready(0, 2)
        streams = [Stream(stack, NUM_TOKENS).read(3) for _ in range(2)]  # round-robin: one on each

        killed.kill()

        read_all(streams, expected)
        assert 'baton_attempts_total{reason="worker_lost"}' in stack.get("/metrics").text
        assert stack.gauge("baton_worker_accepted_guesses_total") > 0
        assert stack.health()["instances"][0]["tokens_per_step"] > 1
