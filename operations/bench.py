"""`python -m baton bench`: a load on a running stack, and what its clients see of it."""

import dataclasses
import json
import math
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from baton.flags import Parsed, flag
from frontend.routing.health import Health
from operations.client import Client, FrontendFlags
from operations.errors import FrontendError

_MOST_TOKENS = 1_000_000
_MAX_LINE_BYTES = 1 << 20
_PAUSE_S = 0.2
"""After a failure, so that a closed loop sends no thousands of requests to a frontend that refuses all."""
_WORDS = (
    "air area art body book change child city company country day door end family friend game head health "
    "history home house idea job kind law level line man money month morning name night number office part"
)
"""Of prose: the demo model answers digits without a channel, so that all its text comes at the end."""
_VISIBLE = ("content", "reasoning_content", "reasoning", "tool_calls")
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_ROWS = ("ttft", "itl", "longest_gap", "duration")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings(FrontendFlags):
    """Flags of `python -m baton bench`."""

    model: str = flag("", "the served model; default: the first one", metavar="NAME")
    requests: int = flag(100, "how many", metavar="N", at_least=1, at_most=100_000)
    concurrency: int = flag(8, "how many at a time", metavar="N", at_least=1, at_most=1000)
    isl: int = flag(256, "tokens of a prompt, about", metavar="N", at_least=1, at_most=_MOST_TOKENS)
    osl: int = flag(64, "tokens of an answer", metavar="N", at_least=1, at_most=_MOST_TOKENS)
    timeout_s: float = flag(120.0, "longer requests have failed", metavar="S", above=0, at_most=3600)
    json: bool = flag(False, "figures as JSON")


def bench(parsed: Parsed[BenchSettings]) -> int:
    """Run the load and print its figures. Exit status: 0 all answered, 1 some failed, 130 after Ctrl-C, with
    the figures so far. Raises FrontendError if it cannot begin."""
    settings, client = parsed.settings, Client(parsed.settings)
    load, samples, is_stopped = Load(client, settings), list[Sample](), False
    sys.setswitchinterval(0.0005)  # a thread with a new token need not wait for others
    try:
        samples.extend(track(load.run(), "", settings.requests, console=Console(stderr=True)))
    except KeyboardInterrupt:
        if not samples:
            raise
        is_stopped = True
        sys.stderr.write("stopped; the figures so far:\n")
    figures = figures_of(samples)
    command = aiperf(load.model, client.url, settings)
    if settings.json:
        made = {"url": client.url, "model": load.model, **figures, "aiperf": command}
        sys.stdout.write(json.dumps(made, indent=1) + "\n")
    else:
        _print(figures)
        _plot(samples)
        sys.stdout.write(f"\nthe same with AIPerf:\n{command}\n")
    return 130 if is_stopped else int(figures["failed"] > 0)


class _Choice(msgspec.Struct):
    delta: dict[str, Any] = {}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are in seconds: `began_s` since the load began, the others since the request did;
    None where there were too few tokens. `failure`: status and code, or why there was no answer."""

    began_s: float
    duration_s: float
    failure: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    longest_gap_s: float | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0


class Load:
    """Sends streamed chats of random words. Raises FrontendError if the frontend does not answer the first
    three, which find out how many words make `isl` tokens and warm the workers up."""

    def __init__(self, client: Client, settings: BenchSettings) -> None:
        self._client = client
        self._settings = settings
        self.model = settings.model or _first_model(client)
        self._num_words = max(1, settings.isl // 2)
        for _ in range(3):
            _, usage = self._ask(num_tokens=1)
            num_words = round(self._num_words * settings.isl / max(1, usage.prompt_tokens))
            self._num_words = max(1, min(num_words, settings.isl))  # a word is at least a token

    def run(self) -> Iterator[Sample]:
        """Send all of it; yields the sample of each request when it has ended."""
        num_requests = self._settings.requests
        self._began_s = time.perf_counter()
        with ThreadPool(min(self._settings.concurrency, num_requests)) as pool:
            yield from pool.imap_unordered(self._sample, range(num_requests))

    def _sample(self, _: int) -> Sample:
        began_s = time.perf_counter()
        try:
            times_s, usage, failure = *self._ask(self._settings.osl), ""
        except FrontendError as error:
            times_s, usage = [], _Usage()
            failure = f"{error.status} {error.code}".strip() if error.status else str(error)
        duration_s = time.perf_counter() - began_s
        time.sleep(_PAUSE_S if failure else 0.0)  # a stack that refuses at once is not flooded
        num_gaps = usage.completion_tokens - 1
        return Sample(
            began_s=began_s - self._began_s,
            duration_s=duration_s,
            failure=failure,
            ttft_s=times_s[0] if times_s else None,
            itl_s=(times_s[-1] - times_s[0]) / num_gaps if times_s and num_gaps > 0 else None,
            longest_gap_s=max((b - a for a, b in pairwise(times_s)), default=None),
            num_prompt_tokens=usage.prompt_tokens,
            num_tokens=usage.completion_tokens,
        )

    def _ask(self, num_tokens: int) -> tuple[list[float], _Usage]:
        """Seconds until each visible token of one request, and its usage. Raises FrontendError."""
        words = " ".join(random.choices(_WORDS.split(), k=self._num_words))  # noqa: S311  no secret
        body = {"model": self.model, "messages": [{"role": "user", "content": words}], "stream": True}
        body |= {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        began_s, times_s, usage, rest = time.perf_counter(), list[float](), _Usage(), b""
        data, timeout_s = msgspec.json.encode(body), self._settings.timeout_s
        with self._client.send("/v1/chat/completions", data, timeout_s) as (_, parts):
            for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise ValueError("a line of its stream is too long")
                for line in lines:
                    if line.startswith(b"data: [DONE]"):
                        return times_s, usage
                    if line.startswith(b'data: {"error"'):
                        raise self._client.error(line[6:], 200)
                    if line.startswith(b"data: {"):
                        chunk = msgspec.json.decode(line[6:], type=_Chunk)
                        usage = chunk.usage or usage
                        if any(choice.delta.get(name) for choice in chunk.choices for name in _VISIBLE):
                            times_s.append(time.perf_counter() - began_s)
            raise ConnectionError("its stream ended too early")


def _first_model(client: Client) -> str:
    if served := client.get("/health", Health).instances:
        return served[0].model
    raise FrontendError(f"{client.url} serves no model yet: see python -m baton status")


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures by name."""
    answered = [sample for sample in samples if not sample.failure]
    lasted_s = max((sample.began_s + sample.duration_s for sample in samples), default=0.0)
    num_tokens = sum(sample.num_tokens for sample in answered)
    return {
        "lasted_s": round(lasted_s, 3),
        "answered": len(answered),
        "failed": len(samples) - len(answered),
        "failures": dict(Counter(sample.failure for sample in samples if sample.failure).most_common()),
        "requests_per_s": round(len(answered) / (lasted_s or 1.0), 2),
        "tokens_per_s": round(num_tokens / (lasted_s or 1.0), 2),
        "num_prompt_tokens": sum(sample.num_prompt_tokens for sample in answered) / max(1, len(answered)),
        "num_tokens": num_tokens / max(1, len(answered)),
        **{f"{row}_ms": _spread(getattr(sample, f"{row}_s") for sample in answered) for row in _ROWS},
    }


def _spread(values_s: Iterable[float | None]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum in milliseconds; empty without values."""
    ordered = sorted(1000 * value for value in values_s if value is not None)
    if not ordered:
        return {}
    ranks = [ordered[math.ceil(percent * len(ordered) / 100) - 1] for percent in (50, 90, 99, 100)]
    found = [sum(ordered) / len(ordered), *ranks]
    return {name: round(value, 2) for name, value in zip(_COLUMNS, found, strict=True)}


def _print(figures: dict[str, Any]) -> None:
    f = {name: f"{value:,.4g}" for name, value in figures.items() if isinstance(value, int | float)}
    rates = f"{f['requests_per_s']} requests/s, {f['tokens_per_s']} tokens/s"
    lines = [f"{figures['answered']} answers in {f['lasted_s']} s: {rates}"]
    lines += [f"tokens on average: prompt {f['num_prompt_tokens']}, answer {f['num_tokens']}"]
    lines += [f"failed {count}: {failure}" for failure, count in figures["failures"].items()]
    lines += ["", f"{'ms':<11}" + "".join(f"{name:>11}" for name in _COLUMNS)]
    for row in _ROWS:
        cells = (f"{value:>11,.1f}" for value in figures[f"{row}_ms"].values())
        lines.append(f"{row.replace('_', ' '):<11}" + ("".join(cells) or f"{'-':>11}" * len(_COLUMNS)))
    sys.stdout.write("\n".join(lines) + "\n")


def _plot(samples: Sequence[Sample]) -> None:
    """First tokens and longest gaps over time, on a terminal."""
    seen = [s for s in samples if s.ttft_s is not None]
    if not sys.stdout.isatty() or not seen:
        return
    import plotext  # type: ignore[import-untyped]  # noqa: PLC0415  it takes 0.15 s

    figure = plotext.figure
    figure.plot_size(78, 16)
    figure.theme("simple")
    figure.title("first token (blue) and longest gap (green), ms, by seconds")
    for name in ("ttft_s", "longest_gap_s"):
        values_ms = [1000 * (getattr(s, name) or 0.0) for s in seen]
        figure.draw(figure.signal([s.began_s for s in seen], values_ms))
    sys.stdout.write("\n" + figure.build().string(colorless="NO_COLOR" in os.environ) + "\n")


def aiperf(model: str, url: str, settings: BenchSettings) -> str:
    """The command with which AIPerf sends such a load."""
    osl, name = settings.osl, shlex.quote(model)
    words = (
        f"aiperf profile --model {name} --tokenizer {name} --url {shlex.quote(url)} --endpoint-type chat",
        f"--streaming --synthetic-input-tokens-mean {settings.isl} --synthetic-input-tokens-stddev 0",
        f"--output-tokens-mean {osl} --output-tokens-stddev 0 --use-server-token-count",
        f"--extra-inputs max_tokens:{osl} --extra-inputs min_tokens:{osl} --extra-inputs ignore_eos:true",
        f"--concurrency {settings.concurrency} --request-count {settings.requests}",
        '--api-key "$BATON_API_KEY"' if settings.api_key else "",
    )
    return " ".join(filter(None, words))
