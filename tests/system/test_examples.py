"""Each example runs unchanged against a running stack."""

import os
import subprocess
import sys

import pytest

from tests.stack import ROOT, Stack
from tests.waiting import PATIENCE_S

# What a run prints, apart from the model's own text.
EXAMPLES = {
    "tool_calling.py": ["reasoning:", "tool: get_system_health({})", "assistant:"],
    "agents_tools.py chat": ["tool_call_item", "tool_call_output_item", "assistant:"],
    "agents_tools.py responses": ["tool_call_item", "tool_call_output_item", "assistant:"],
    "responses_state.py": ["tool: get_system_health({})", "kept: ['message', 'reasoning', 'function_call',"],
    "structured_output.py": ["chat: Report(", "response: Report(", "call: Report("],
}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each.startswith("agents_tools.py") else [])
        for each in EXAMPLES
    ],
)
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


def test_every_example_is_run_and_documented() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == NAMES
    assert all(name in (ROOT / "examples/README.md").read_text() for name in NAMES)
