"""`python -m baton NAME`: every tool is found, and its exit status is the command's."""

import importlib.metadata
import subprocess
import sys

import pytest

from operations.commands import main

TOOLS = ["status", "doctor", "download", "key"]


@pytest.mark.parametrize("argv", [[], ["nope"], ["--help"], ["nope", "doctor"]])
def test_an_unknown_tool_gets_the_names_of_all(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert [tool for tool in TOOLS if tool not in printed] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_reads_its_own_flags(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([tool, "--no-such-flag"])
    assert ended.value.code == 2
    assert f"python -m baton {tool}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["baton", "frontend", "workers"])
def test_each_process_prints_the_version_of_its_package(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"baton {importlib.metadata.version('baton')}\n"
