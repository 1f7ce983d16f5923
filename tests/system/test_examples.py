"""Each example runs unchanged against a running stack."""

import functools
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.stack import ROOT, Stack
from tests.waiting import PATIENCE_S

AGENTS_ITEMS = ["  reasoning_item\n  tool_call_item\n  tool_call_output_item\n  reasoning_item\n", "372045"]
# What a run prints, apart from the model's own text.
EXAMPLES = {
    "tool_calling.py": ["reasoning:", "tool: get_system_health({})", "assistant:"],
    "agents_tools.py chat": AGENTS_ITEMS,
    "agents_tools.py responses": AGENTS_ITEMS,
    "responses_state.py": ["tool: get_system_health({})", "kept: ['message', 'reasoning', 'function_call',"],
    "structured_output.py": ["chat: Report(", "response: Report(", "call: Report("],
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_it_stands(stack: Stack, example: str) -> None:
    name, *arguments = example.split()
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]

    environ = stack.environ | {"BATON_URL": stack.url}
    run = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    for line in EXAMPLES[example]:
        assert line in run.stdout


NAMES = sorted({example.split()[0] for example in EXAMPLES})


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        *[(name, ["-I", "-S"], "package") for name in NAMES],
        *[
            pytest.param(name, [], "no Baton answers at http://127.0.0.1:9:", marks=marks)
            for name, marks in zip(NAMES, [pytest.mark.slow] * 3 + [()], strict=True)
        ],
    ],
)
def test_what_is_missing_is_one_sentence(name: str, flags: list[str], expected: str) -> None:
    command = [sys.executable, *flags, str(ROOT / "examples" / name)]
    environ = os.environ | {"BATON_URL": "http://127.0.0.1:9"}

    run = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert expected in run.stderr
    assert run.stderr.count("\n") == 1


def kill_a_worker(url: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "examples/kill_a_worker.sh")]
    environ = os.environ | {"BATON_URL": url}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_worker_is_killed_under_a_stream_whose_text_is_whole(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.serve("prefill", "decode", "decode")

        run = kill_a_worker(stack.url)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "-- killed decode-" in run.stdout
        assert "equal the undisturbed answer. Attempts: decode-" in run.stdout
        assert ": worker_lost, decode-" in run.stdout

        again = kill_a_worker(stack.url)  # one decode worker is left
        assert (again.returncode, again.stdout) == (1, "")
        assert again.stderr.startswith("error: 1 of the two decode workers that this takes is ready")


def test_a_worker_is_not_killed_without_a_stack_or_on_another_host(tmp_path: Path) -> None:
    run = kill_a_worker("http://127.0.0.1:9")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: no Baton shows its workers at http://127.0.0.1:9/fleet (")

    elsewhere = {"role": "decode", "state": "ready", "name": "", "host": "elsewhere", "pid": 0}
    workers = [elsewhere | {"worker_id": f"decode-{i}"} for i in range(2)]
    (tmp_path / "fleet").write_text(json.dumps({"workers": workers}))
    files = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever).start()
        run = kill_a_worker(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: decode-0 runs on elsewhere, and its process ")


def test_every_example_is_run_and_documented() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == NAMES
    readme = (ROOT / "examples/README.md").read_text()
    assert all(name in readme for name in (*NAMES, "kill_a_worker.sh"))
