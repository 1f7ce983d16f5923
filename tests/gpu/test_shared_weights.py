"""Weights in memory that outlives the process that loaded them: each peer computes with the same ones."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


class Peer:
    """A process of `shared_weights_peer`; `ready` is its first line."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.gpu.shared_weights_peer", str(path)]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.ready = self.popen.stdout.readline()
        sys.stdout.write(f"{self.ready}\n")

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, word: str = "sum") -> str:
        """Its answer; empty if it has ended."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(f"{word}\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a holder."""
    path = tmp_path / "weights"
    command = [sys.executable, "-m", "workers.engines.vllm.weights_holder", str(path)]
    with subprocess.Popen(command, cwd=ROOT) as holder:
        wait_for(path.exists)
        yield path
        holder.kill()


def test_weights_outlive_the_process_that_loaded_them(path: Path) -> None:
    with ExitStack() as peers:
        first = peers.enter_context(Peer(path))
        second = peers.enter_context(Peer(path))
        assert (first.ready.split()[0], second.ready.split()[0]) == ("loaded", "mapped")
        expected = first.ask()
        assert float(expected)
        assert second.ask() == expected
        first.kill()
        assert second.ask() == expected
        third = peers.enter_context(Peer(path))
        second.kill()
        assert third.ask() == expected


@pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="its end would be the end of all clients")
def test_no_process_can_change_them(path: Path) -> None:
    with Peer(path) as first, Peer(path) as second:
        expected = first.ask()
        assert second.ask("write") == ""
        assert first.ask() == expected
