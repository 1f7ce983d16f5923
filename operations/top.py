"""`python -m baton top`: what status shows, live."""

import contextlib
import dataclasses
import itertools
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from baton.flags import flag, parse
from operations.client import Client, FrontendError, FrontendFlags
from operations.status import look, sections
from operations.terminal import Line, is_terminal, optional, show

_LEAST_ROWS = (3, 3, 8, 5, 4)
"""Of each section, on a terminal that is too low for all: 23, and one below them."""
_HELP = Line("q: quit   python -m baton why ID: one request", "dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopSettings(FrontendFlags):
    """Flags of `python -m baton top`."""

    interval: float = flag(1.0, "seconds between looks", metavar="S", at_least=0.1, at_most=3600)
    count: int | None = flag(None, "plain text, N times", metavar="N", at_least=1, at_most=1_000_000)


def top(argv: list[str]) -> int:
    """Show the fleet until q or Ctrl-C. Exit status: 0; 2 if no frontend answers at first; with `--count`
    that of status.
    """
    about = "Status, once a second, until q. Plain text where stdout is no terminal."
    parsed = parse(TopSettings, argv, prog="python -m baton top", description=about)
    settings = parsed.settings
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the terminal is restored
    try:
        looks = _looks(Client(parsed))
        if settings.count is None and is_terminal() and sys.stdin.isatty() and optional("rich.live"):
            return _live(looks, settings.interval)
        for number, (code, parts, note) in enumerate(looks, 1):
            show([note] if code == 2 else [*itertools.chain(*parts), Line("")])
            if number == settings.count:
                return code
            time.sleep(settings.interval)
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _looks(client: Client) -> Iterator[tuple[int, list[list[Line]], Line]]:
    """The exit status that status would have, its sections, and a line below them. While no frontend answers
    these are the last sections; raises FrontendError if there were none.
    """
    parts, seen_s = list[list[Line]](), 0.0
    while True:
        try:
            health, fleet = look(client)
            parts, seen_s = sections(health, fleet), time.monotonic()
            yield int(health.status != "healthy"), parts, _HELP
        except FrontendError as error:
            if not parts:
                raise
            away_s = time.monotonic() - seen_s
            yield 2, parts, Line(f"{error}; these figures are {away_s:.0f} s old", "reverse red")


def _live(looks: Iterator[tuple[int, list[list[Line]], Line]], interval_s: float) -> int:
    from rich.console import Console, Group  # noqa: PLC0415  not in the base install
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console, first = Console(highlight=False), next(looks)  # an error comes before the screen changes
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys():
        for _, parts, note in itertools.chain([first], looks):
            lines = [*fit(parts, console.height - 1), note]
            texts = (Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in lines)
            live.update(Group(*texts), refresh=True)
            if _is_over(interval_s):
                break
    return 0


def fit(parts: Sequence[Sequence[Line]], num_rows: int) -> list[Line]:
    """The sections in at most `num_rows`; what does not fit is counted."""
    sizes = [min(len(part), least) for part, least in zip(parts, _LEAST_ROWS, strict=False)]
    for number, part in enumerate(parts):
        sizes[number] += max(0, min(len(part) - sizes[number], num_rows - sum(sizes)))
    found: list[Line] = []
    for part, size in zip(parts, sizes, strict=True):
        left_out = len(part) - size
        found += [*part[: size - 1], Line(f"... {left_out + 1} more", "dim")] if left_out else part
    return found[:num_rows]


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys arrive at once and are not shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_over(within_s: float) -> bool:
    """Whether q is pressed, or the terminal goes away, within this time."""
    end_s = time.monotonic() + within_s
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False
