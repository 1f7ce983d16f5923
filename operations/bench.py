"""`python -m baton bench`: a load on a running stack, and what its clients see of it."""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from baton.flags import flag, parse
from operations.client import Client, FrontendError
from operations.load import MOST_REQUESTS, Load, LoadFlags, Sample
from operations.terminal import is_terminal, optional

_PLOT = (78, 16)
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_ROWS = ("ttft_ms", "itl_ms", "longest_gap_ms", "duration_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings(LoadFlags):
    """Flags of `python -m baton bench`."""

    ttft_ms: float | None = flag(None, "goodput: the first token came in time", metavar="MS", above=0)
    itl_ms: float | None = flag(None, "goodput: the others too, on average", metavar="MS", above=0)
    json: bool = flag(False, "figures as JSON")


def bench(argv: list[str]) -> int:
    """Run the load and print its figures. Exit status: 0 all answered, 1 some failed, 2 it could not begin,
    130 after Ctrl-C, with the figures so far.
    """
    about = "A load on a running stack: how long its clients wait."
    parsed = parse(BenchSettings, argv, prog="python -m baton bench", description=about)
    settings, load, is_stopped = parsed.settings, None, False
    try:
        client = Client(parsed)
        load = Load(client, settings)
        _watch(load)
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        is_stopped = True
    if load is None:
        return 130
    figures = figures_of(load.samples, settings)
    command = aiperf(load.model, load.most, client.url, settings)
    lines = [*table(figures), *_plot(load.samples), "\nthe same with AIPerf:", command]
    made = {"url": client.url, "model": load.model, **figures, "aiperf": command}
    sys.stdout.write((json.dumps(made, indent=1) if settings.json else "\n".join(lines)) + "\n")
    return 130 if is_stopped else int(figures["failed"] > 0)


def _watch(load: Load) -> None:
    """Run it, with its progress on stderr."""
    sys.setswitchinterval(0.0005)  # a thread with a new token need not wait for others
    running = threading.Thread(target=load.run, daemon=True)
    with _progress() as (show, every_s):
        running.start()
        while running.is_alive():
            running.join(every_s)
            num_failed = sum(bool(sample.failure) for sample in list(load.samples))
            num_ended = len(load.samples)
            show(load.share, f"{num_ended} ended, {num_failed} failed, {load.num_sent - num_ended} running")


@contextlib.contextmanager
def _progress() -> Iterator[tuple[Callable[[float, str], object], float]]:
    """How to show a share and a text, and how often: a bar, or lines where stderr is no terminal."""
    if not sys.stderr.isatty() or (rich := optional("rich.progress")) is None:
        yield lambda share, text: sys.stderr.write(f"{share:.0%}: {text}\n"), 5.0
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with rich.Progress(
        *rich.Progress.get_default_columns()[1:3], "{task.description}", console=console
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=text), 0.2


def figures_of(samples: Sequence[Sample], settings: BenchSettings) -> dict[str, Any]:
    """The figures by name. Goodput counts the answers that met both limits."""
    answered = [sample for sample in samples if not sample.failure]
    lasted_s = max((sample.began_s + sample.duration_s for sample in samples), default=0.0)
    most_s = [math.inf if limit is None else limit / 1000 for limit in (settings.ttft_ms, settings.itl_ms)]
    num_good = sum((s.first_s or 0.0) <= most_s[0] and (s.itl_s or 0.0) <= most_s[1] for s in answered)
    num_tokens = sum(sample.num_tokens for sample in answered)
    totals = {"requests": len(answered), "tokens": num_tokens}
    if min(most_s) < math.inf:
        totals["goodput"] = num_good
    means = ("num_prompt_tokens", "num_cached_tokens", "num_tokens")
    return {
        "lasted_s": round(lasted_s, 3),
        "answered": len(answered),
        "failed": len(samples) - len(answered),
        "failures": dict(Counter(sample.failure for sample in samples if sample.failure).most_common()),
        **{
            f"{name}_per_s": round(total / lasted_s, 2) if lasted_s else 0.0 for name, total in totals.items()
        },
        **{name: sum(getattr(s, name) for s in answered) / max(1, len(answered)) for name in means},
        "ttft_ms": spread(s.first_s for s in answered),
        "itl_ms": spread(s.itl_s for s in answered),
        "longest_gap_ms": spread(s.longest_gap_s for s in answered if s.first_s is not None),
        "duration_ms": spread(s.duration_s for s in answered),
    }


def spread(values_s: Iterable[float | None]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum in milliseconds; empty without values."""
    ordered = sorted(1000 * value for value in values_s if value is not None)
    if not ordered:
        return {}
    ranks = [ordered[math.ceil(percent * len(ordered) / 100) - 1] for percent in (50, 90, 99, 100)]
    found = [sum(ordered) / len(ordered), *ranks]
    return {name: round(value, 2) for name, value in zip(_COLUMNS, found, strict=True)}


def table(figures: dict[str, Any]) -> Iterator[str]:
    """The figures, for people."""
    f = {name: f"{value:,.4g}" for name, value in figures.items() if isinstance(value, int | float)}
    good = f", {f['goodput_per_s']} within the limits" if "goodput_per_s" in f else ""
    rates = f"{f['requests_per_s']} requests/s{good}, {f['tokens_per_s']} tokens/s"
    yield f"{figures['answered']} answers in {f['lasted_s']} s: {rates}"
    prompt = f"prompt {f['num_prompt_tokens']} ({f['num_cached_tokens']} cached)"
    yield f"tokens on average: {prompt}, answer {f['num_tokens']}"
    yield from (f"failed {count}: {failure}" for failure, count in figures["failures"].items())
    yield f"\n{'':<14}" + "".join(f"{name:>12}" for name in _COLUMNS)
    for row in _ROWS:
        cells = (figures[row].get(name) for name in _COLUMNS)
        yield f"{row.replace('_', ' '):<14}" + "".join(
            f"{'-' if v is None else format(v, ',.1f'):>12}" for v in cells
        )


def _plot(samples: Sequence[Sample]) -> Iterator[str]:
    """First tokens and longest gaps over time, on a terminal."""
    seen = [(s.began_s, 1000 * s.first_s, 1000 * s.longest_gap_s) for s in samples if s.first_s is not None]
    if not is_terminal() or not seen:
        return
    if (plotext := optional("plotext")) is None:
        yield "\nno plot without plotext: pip install '.[frontend]'"
        return
    began_s, first_ms, gap_ms = zip(*seen, strict=True)
    figure = plotext.figure
    figure.plot_size(*_PLOT)
    figure.theme("simple")
    figure.title("first token (blue) and longest gap (green), ms, by seconds")
    for values in (first_ms, gap_ms):
        figure.draw(figure.signal(began_s, values))
    yield "\n" + figure.build().string(colorless="NO_COLOR" in os.environ)


def aiperf(model: str, most: int, url: str, settings: BenchSettings) -> str:
    """The command with which AIPerf sends such a load."""
    osl, turns, name = settings.osl, settings.turns, shlex.quote(model)
    count = "--request-count" if turns == 1 else "--conversation-num"
    slo = {"time_to_first_token": settings.ttft_ms, "inter_token_latency": settings.itl_ms}
    goodput = " ".join(f"{tag}:{limit:g}" for tag, limit in slo.items() if limit)
    words = (
        f"aiperf profile --model {name} --tokenizer {name} --url {url} --endpoint-type chat --streaming",
        f"--synthetic-input-tokens-mean {settings.isl} --synthetic-input-tokens-stddev 0",
        f"--output-tokens-mean {osl} --output-tokens-stddev 0 --use-server-token-count",
        f"--extra-inputs max_tokens:{osl} --extra-inputs min_tokens:{osl} --extra-inputs ignore_eos:true",
        f"--request-rate {settings.rate:g}" if settings.rate else f"--concurrency {settings.concurrency}",
        f"--conversation-turn-mean {turns} --conversation-turn-stddev 0" if turns > 1 else "",
        f"--benchmark-duration {settings.seconds:g}" if settings.seconds else "",
        "" if most == MOST_REQUESTS else f"{count} {math.ceil(most / turns)}",
        f"--goodput '{goodput}'" if goodput else "",
        '--api-key "$BATON_API_KEY"' if settings.api_key else "",
    )
    return " ".join(filter(None, words))
