"""`python -m baton NAME`: every tool is found, and its exit status is the command's."""

import importlib.metadata
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from operations.commands import main

TOOLS = ["status", "top", "bench", "doctor", "key", "why"]


@pytest.mark.parametrize(
    ("argv", "status"), [([], 2), (["nope"], 2), (["nope", "doctor"], 2), (["--help"], 0), (["-h"], 0)]
)
def test_the_help_and_an_error_name_all_tools(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    printed = capsys.readouterr()
    assert printed[status == 0] == ""
    assert [tool for tool in TOOLS if tool not in printed[status != 0]] == []
    assert ("error: 'nope'" in printed.err) == ("nope" in argv)


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["a b"], ["", "--admin"], ["a", "--no-such-flag"]])
def test_a_wrong_key_name_is_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(["key", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", printed.err)


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
