"""`python -m baton NAME`: every tool is found, and its exit status is the command's."""

import importlib.metadata
import re
import subprocess
import sys

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


WRONG = [["key", *names] for names in ([], ["a", "b"], ["a b"], ["", "--admin"])]


@pytest.mark.parametrize("argv", [*WRONG, *([tool, "--no-such-flag"] for tool in TOOLS)])
def test_wrong_arguments_are_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(argv)
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", printed.err)
    assert "--no-such-flag" not in argv or f"python -m baton {argv[0]}" in printed.err


def test_a_full_disk_is_one_sentence() -> None:
    command = [sys.executable, "-m", "baton", "key", "a"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    lines = run.stderr.splitlines()[1:]
    assert (run.returncode, lines) == (2, ["error: [Errno 28] No space left on device"])


@pytest.mark.parametrize("module", ["baton", "frontend", "workers"])
def test_each_process_prints_the_version_of_its_package(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"baton {importlib.metadata.version('baton')}\n"
