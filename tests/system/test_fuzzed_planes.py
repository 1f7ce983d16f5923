"""A short run of the planes' fuzzer; `make fuzz` sends a million messages."""

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz_planes import run

NUM_MESSAGES = 10_000


@pytest.mark.parametrize("engine", ["mocker", pytest.param("embedded", marks=pytest.mark.slow)])
def test_changed_messages_end_no_process_and_change_no_stream(engine: str, tmp_path: Path) -> None:
    sent, outcomes, num_strange = run(tmp_path, engine, NUM_MESSAGES, seed=1)

    assert sent.total() >= NUM_MESSAGES
    assert set(sent) == {"frames", "tickets", "registrations"}
    assert set(Counter(outcome.end for outcome in outcomes)) == {"exact"}
    assert num_strange > NUM_MESSAGES / 100
