"""Runs the tool that `python -m baton NAME` names; imports no other."""

import importlib
import sys

from baton.flags import version

_TOOLS = {
    "status": "operations.status",
    "doctor": "operations.doctor.command",
    "download": "operations.download",
    "key": "operations.key",
}


def main(argv: list[str]) -> int:
    """Run a tool. Returns its exit status, or 2 for an unknown name; `--version` prints the version."""
    if argv == ["--version"]:
        sys.stdout.write(f"{version()}\n")
        return 0
    if not argv or argv[0] not in _TOOLS:
        sys.stderr.write(f"usage: python -m baton {{{','.join(_TOOLS)}}} [--help | --version]\n")
        return 2
    tool = getattr(importlib.import_module(_TOOLS[argv[0]]), argv[0])
    status: int = tool(argv[1:])
    return status
