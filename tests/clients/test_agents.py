"""Codex and Claude Code from a fresh home, with only their base URL set: each fixes a bug, runs its test."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stack import MODEL, Stack

BIN = Path(__file__).parent / "agents/node_modules/.bin"
SESSION_S = 300
TASK = "Fix the bug in calc.py and run its test."
BUGGY = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nprint('calc is right')\n"
MOCKER = {"prefill_tokens_per_s": 1_000_000, "decode_step_ms": 0.1, "kv_transfer_ms": 0}
THINK = "<|channel|>analysis<|message|>The sign is wrong.<|end|><|start|>assistant"
DONE = "<|channel|>final<|message|>The bug is fixed.<|return|>"
FIX = "sed -i 's/a - b/a + b/' calc.py"
RUN_TEST = f"{sys.executable} check.py"

pytestmark = pytest.mark.skipif(not BIN.is_dir(), reason="npm has installed no agents")


def call(tool: str, **arguments: Any) -> str:
    """A call as gpt-oss writes it, after a thought."""
    header = f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
    return f"{THINK}{header}{json.dumps(arguments)}<|call|>"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BUGGY)
    (folder / "check.py").write_text(CHECK)
    return folder


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.stop()


def play(stack: Stack, folder: Path, *answers: str) -> None:
    """Start the stack with a model that says these answers, one after the other."""
    script, settings = folder / "script.yaml", folder / "mocker.yaml"
    script.write_text(yaml.safe_dump([{"answers": list(answers)}]))
    settings.write_text(yaml.safe_dump(MOCKER | {"script": str(script)}))
    stack.frontend("--model-alias", f"claude-*={MODEL}")
    for mode in ("prefill", "decode"):
        stack.worker(mode, yaml=settings)
    stack.wait_ready(1, 1)


def run(project: Path, environ: Mapping[str, str], *command: str) -> str:
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=project,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environ},
        capture_output=True,
        text=True,
        timeout=SESSION_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def is_fixed(project: Path) -> bool:
    return "a + b" in (project / "calc.py").read_text()


def test_codex_fixes_a_bug_and_runs_its_test(stack: Stack, project: Path) -> None:
    play(stack, project.parent, call("exec_command", cmd=FIX), call("exec_command", cmd=RUN_TEST), DONE)
    config = project.parent / "home/.codex/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        f'model = "{MODEL}"\nmodel_provider = "baton"\n'
        f'[model_providers.baton]\nname = "Baton"\nbase_url = "{stack.url}/v1"\nwire_api = "responses"\n'
    )
    skip_checks = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    said = run(project, {}, "codex", "exec", *skip_checks, TASK)
    assert is_fixed(project)
    assert "calc is right" in said
    assert "The bug is fixed." in said


def test_claude_code_fixes_a_bug_and_runs_its_test(stack: Stack, project: Path) -> None:
    edit = call("Edit", file_path=str(project / "calc.py"), old_string="a - b", new_string="a + b")
    read = call("Read", file_path=str(project / "calc.py"))
    test = call("Bash", command=f"{RUN_TEST} | tee result.txt", description="Run the test")
    play(stack, project.parent, read, edit, test, DONE)
    environ = {
        "ANTHROPIC_BASE_URL": stack.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    allowed = ("--permission-mode", "acceptEdits", "--allowedTools", "Bash")
    said = run(project, environ, "claude", "-p", TASK, *allowed)
    assert is_fixed(project)
    assert (project / "result.txt").read_text() == "calc is right\n"
    assert "The bug is fixed." in said
