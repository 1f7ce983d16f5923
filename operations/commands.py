"""Runs the tool that `python -m baton NAME` names; imports no other."""

import importlib
import io
import os
import sys
from typing import get_args, get_type_hints

from baton.flags import parse, version
from operations.errors import CommandError

_TOOLS = {
    "status": ("operations.status", "", "the workers of a running stack, their load, the last events"),
    "top": ("operations.status", "", "workers, load, events once a second; in a pipe plain text"),
    "bench": ("operations.bench", "", "measure a running stack under a load"),
    "doctor": ("operations.doctor.command", "", "find what would break, before starting anything"),
    "shares": ("operations.shares", "", "divide one GPU between prefill and decode on vLLM"),
    "key": ("operations.key", " NAME", "make an API key: its line, on stdout, is for --api-keys-file"),
    "why": ("operations.why", " ID", "which stage made a request slow or fail, and on which worker"),
}
"""Module, argument, text. The module's function of that name takes its flags and returns the exit status."""
_HELP = """\
usage: python -m baton COMMAND [flags]

Tools for the operator of a Baton stack.

{commands}

  python -m baton COMMAND --help    the flags of a command
  python -m baton --version         the version

The servers are `python -m frontend` and `python -m workers`; `make up` starts both.
"""


def main(argv: list[str]) -> int:
    """Run a tool. Returns its exit status, or 2 for an unknown name."""
    name, *rest = argv or [""]
    if name in _TOOLS:
        return _run(name, rest)
    if name in {"-h", "--help", "help", ""}:
        commands = "\n".join(f"  {tool:<10}{text}" for tool, (_, _, text) in _TOOLS.items())
        (sys.stdout if name else sys.stderr).write(_HELP.format(commands=commands))
        return 0 if name else 2
    if name == "--version":
        sys.stdout.write(f"{version()}\n")
        return 0
    sys.stderr.write(f"error: {name!r} is not a command; choose from {', '.join(_TOOLS)}\n")
    return 2


def _run(name: str, argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal need not show UTF-8
    module, argument, about = _TOOLS[name]
    try:
        tool = getattr(importlib.import_module(module), name)
        (flags,) = get_args(get_type_hints(tool)["parsed"])
        status: int = tool(parse(flags, argv, prog=f"python -m baton {name}{argument}", description=about))
        sys.stdout.flush()
    except CommandError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {name} needs {error.name}: pip install '.[frontend]'\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    except OSError as error:  # of stdout: `| head` has read enough, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        text, status = ("", 141) if isinstance(error, BrokenPipeError) else (f"error: {error}\n", 2)
        sys.stderr.write(text)
    return status
