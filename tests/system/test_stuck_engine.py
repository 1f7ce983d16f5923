"""An engine that hangs while its worker goes on sending heartbeats."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.answers import Stream, read_all, whole_answer
from tests.stack import Stack
from tests.waiting import FAILOVER_S, scaled

NO_PROGRESS_S = scaled(1.0)


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The engine of one worker of each role hangs while its file exists."""
    folder = tmp_path_factory.mktemp("hangs")
    return {mode: folder / mode for mode in ("prefill", "decode")}


@pytest.fixture(scope="module")
def stack(hangs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder) as stack:
        stack.frontend("--no-progress-s", f"{NO_PROGRESS_S:.2f}")
        for mode, hang in hangs.items():
            yaml = folder / f"{mode}.yaml"
            yaml.write_text(f"hang_while: {hang}\n")
            stack.worker(mode, yaml=yaml)
            stack.worker(mode)
        stack.wait_ready(2, 2)
        yield stack


@pytest.mark.parametrize("mode", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_worker_that_only_beats_loses_its_requests_to_another(
    stack: Stack, hangs: dict[str, Path], mode: str
) -> None:
    expected = whole_answer(stack)
    streams = [Stream(stack).read(1) for _ in range(4)]  # round-robin: two on each

    hangs[mode].touch()
    streams += [Stream(stack) for _ in range(4)]

    assert read_all(streams, expected) < 2 * NO_PROGRESS_S + FAILOVER_S
    (stuck,) = stack.health()["stuck"]
    assert stuck.startswith(mode)
    assert stuck not in [instance["worker_id"] for instance in stack.health()["instances"]]

    hangs[mode].unlink()
    stack.wait_ready(2, 2)
    assert stack.health()["stuck"] == []
    assert whole_answer(stack) == whole_answer(stack) == expected
    stack.wait_idle()
