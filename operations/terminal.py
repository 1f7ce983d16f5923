"""Lines of text for a terminal or a pipe. Packages that are not installed cost looks, never figures."""

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class Line(NamedTuple):
    """One line; `style` is rich's."""

    text: str
    style: str = ""


def optional(module: str) -> Any:
    """The module, None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def is_terminal() -> bool:
    """Whether stdout is a terminal that can do more than print lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def printable(text: str) -> str:
    """Without control characters, which clients may put into ids."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def show(lines: Iterable[Line]) -> None:
    """Print them, with their styles if stdout is a terminal."""
    if is_terminal() and (rich := optional("rich.console")) is not None:
        console = rich.Console(highlight=False)
        for text, style in lines:
            console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
        return
    sys.stdout.write("".join(f"{text}\n" for text, _ in lines))
    sys.stdout.flush()
