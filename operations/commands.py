"""Runs the tool that `python -m baton NAME` names; imports no other."""

import importlib
import io
import os
import sys

from baton.flags import version
from operations.client import FrontendError

_TOOLS = {
    "status": ("operations.status", "the workers of a running stack, their load, the last events"),
    "top": ("operations.status", "the same, live"),
    "bench": ("operations.bench", "measure a running stack under a load"),
    "doctor": ("operations.doctor.command", "find what would break, before starting anything"),
    "download": ("operations.download", "download a model from the Hugging Face hub, and verify it"),
    "key": ("operations.key", "make an API key, and its line for --api-keys-file"),
    "why": ("operations.why", "which stage made a request slow or fail, and on which worker"),
}
_HELP = """\
usage: python -m baton COMMAND [flags]

Tools for the operator of a Baton stack.

{commands}

  python -m baton COMMAND --help    the flags of a command
  python -m baton --version         the version

example: python -m baton status --url http://127.0.0.1:8000
The servers are `python -m frontend` and `python -m workers`; `make up` starts both.
"""


def main(argv: list[str]) -> int:
    """Run a tool. Returns its exit status, or 2 for an unknown name."""
    name, *rest = argv or [""]
    if name in _TOOLS:
        return _run(name, rest)
    if name in {"-h", "--help", "help", ""}:
        commands = "\n".join(f"  {tool:<10}{text}" for tool, (_, text) in _TOOLS.items())
        (sys.stdout if name else sys.stderr).write(_HELP.format(commands=commands))
        return 0 if name else 2
    if name == "--version":
        sys.stdout.write(f"{version()}\n")
        return 0
    sys.stderr.write(f"error: {name!r} is not a command; choose from {', '.join(_TOOLS)}\n")
    return 2


def _run(name: str, argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not show UTF-8
    try:
        status: int = getattr(importlib.import_module(_TOOLS[name][0]), name)(argv)
        sys.stdout.flush()
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {name} needs {error.name}: pip install 'baton[frontend]'\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status
