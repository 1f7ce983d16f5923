"""Each example runs unchanged against a running stack."""

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


def test_every_example_is_run_and_documented() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}

    assert {example.split()[0] for example in EXAMPLES} == names
    assert all(name in (ROOT / "examples/README.md").read_text() for name in names)
