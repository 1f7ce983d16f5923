"""Workers of one model that compute something else: named in /health, and without requests."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import MODEL, ROOT, Stack, damaged_model
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


def record(stack: Stack, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "doctor", "--record", str(path)]
    return subprocess.run(
        command, cwd=ROOT, env=stack.environ, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_damaged_worker_is_refused_once_others_are_in_the_majority(stack: Stack, tmp_path: Path) -> None:
    damaged = damaged_model(tmp_path / "damaged")
    path = tmp_path / "numbers.json"
    assert f"is in the registry {stack.environ['BATON_FILE_REGISTRY']}; " in record(stack, path).stderr
    stack.frontend()
    bad = stack.worker("agg", engine="embedded", name="bad", model_path=damaged)
    stack.wait_ready(0, 1)
    stack.worker("agg", engine="embedded", name="good-0")
    stack.wait_ready(0, 2)
    (doubt,) = stack.health()["doubts"]
    assert "the probabilities of bad | good-0 differ by" in str(doubt)
    refused = record(stack, path)
    assert refused.returncode == 2
    assert "cannot be known" in refused.stderr

    stack.worker("agg", engine="embedded", name="good-1")
    wait_for(lambda: stack.health().get("refused"))
    stack.wait_ready(0, 2)
    (reason,) = stack.health()["refused"]
    assert "differ by" in str(reason)
    assert stack.health()["doubts"] == []
    for _ in range(4):
        assert stack.post("/v1/completions", prompt="The bridge", max_tokens=4).status_code == 200

    bad.kill()
    wait_for(lambda: record(stack, path).returncode == 0)
    assert MODEL in path.read_text()


def test_a_lone_worker_is_compared_with_what_was_recorded(stack: Stack, tmp_path: Path) -> None:
    damaged = damaged_model(tmp_path / "damaged")
    path = tmp_path / "numbers.json"
    good = stack.worker("agg", engine="embedded", name="good")
    wait_for(lambda: record(stack, path).returncode == 0)
    good.kill()
    stack.frontend("--trusted-numbers", str(path))
    stack.worker("agg", engine="embedded", name="bad", model_path=damaged)
    wait_for(lambda: stack.health().get("refused"))
    (reason,) = stack.health()["refused"]
    assert "from the trusted build's" in str(reason)
    assert stack.post("/v1/completions", prompt="The bridge", max_tokens=4).status_code == 503
    stack.worker("agg", engine="embedded", name="good-again")
    stack.wait_ready(0, 1)
