"""Wrong settings of real processes: a sentence with the flag or variable, status 2, before anything loads."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

WORKER = ("workers", "--engine", "mocker")
EMBEDDED = ("workers", "--engine", "embedded")
FRONTEND = ("frontend", "--http-port", "0", "--response-store", ":memory:")
ETCD = "ETCD_ENDPOINTS=http://127.0.0.1:2379"
OVERRIDE = "--override-engine-args"
SMALL = '{"max_batch_size": -5}'

Environ = dict[str, str]


def start(folder: Path, program: tuple[str, ...], flags: list[str], environ: Environ) -> tuple[int, str]:
    """The exit status and the last error of a process that should not start."""
    module, *first = program
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ETCD_", "NATS_", "BATON_"))}
    command = [sys.executable, "-m", module, *first, *flags]
    environ = clean | {"BATON_FILE_REGISTRY": str(folder / "registry")} | environ
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environ
    )
    assert "Traceback" not in done.stderr
    assert "loading" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, errors[-1] if errors else done.stderr


CASES = [
    (WORKER, ["--etcd-endpoints", "h:2379"], "--etcd-endpoints (ETCD_ENDPOINTS) h:2379: must be http://"),
    (WORKER, [ETCD, "ETCD_AUTH_CA=/no"], "ETCD_AUTH_CA: /no has no certificates"),
    (FRONTEND, ["--nats-server", "http://h:1"], "--nats-server (NATS_SERVER) http://h:1: must be nats://"),
    (FRONTEND, ["BATON_LIVENESS_S=inf"], "BATON_LIVENESS_S=inf: must be a finite number"),
    (WORKER, ["--check", OVERRIDE, '{"max_batchsize": 4}'], "unknown key; did you mean max_batch_size?"),
    (WORKER, ["BATON_PEER_CERT=cert.pem", "--check"], "BATON_PEER_CA: set all three, or none"),
    (WORKER, ["BATON_FILE_REGISTRY=/proc/none", "--check"], "registry /proc/none cannot be created"),
    (EMBEDDED, [OVERRIDE, SMALL], "max_batch_size: -5: Expected `int` >= 1"),
]


@pytest.mark.parametrize(("program", "words", "says"), CASES)
def test_a_process_says_what_is_wrong_and_does_not_start(
    tmp_path: Path, program: tuple[str, ...], words: list[str], says: str
) -> None:
    """`words` are flags, after variables."""
    variables = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    environ = dict(word.split("=", 1) for word in variables)
    status, line = start(tmp_path, program, words[len(variables) :], environ)
    assert status == 2
    assert says in line


def test_a_check_shows_the_settings_and_starts_nothing(tmp_path: Path) -> None:
    status, text = start(tmp_path, WORKER, ["--check", OVERRIDE, '{"max_batch_size": 4}'], {})
    assert status == 0
    assert "engine settings max_batch_size=4" in text
    assert "ready worker=" not in text
