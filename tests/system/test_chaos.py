"""A short run of the chaos harness: faults at random moments of a running stack, over NATS and etcd."""

import subprocess
from pathlib import Path

import pytest

from tests.stack import PYTHON, ROOT

KINDS = ["drain", "freeze", "kill", "kill_broker", "kill_workers"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mocker", "embedded"])
def test_no_stream_is_lost_or_changed_by_seeded_faults(tmp_path: Path, engine: str) -> None:
    command = [PYTHON, "-m", "tests.chaos", "--planes", "nats+etcd", "--seed", "16", "--kinds", *KINDS]
    command += ["--engine", engine, "--faults", str(len(KINDS)), "--streams", "4"]
    command += ["--out", str(tmp_path / "chaos.json")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for kind in KINDS:
        assert f"\nnats+etcd {kind} " in ran.stdout
