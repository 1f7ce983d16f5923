"""Draws, for each way to use one GPU, how even running answers are beside 32,000-token prompts, against those
prompts' first tokens: `python -m benchmarks.curve` reads benchmarks/results/one_gpu_20b_h200.json and writes
docs/images/one-gpu-light.svg and one-gpu-dark.svg. Hollow points are from the table of an earlier run, whose
raw data were not kept (docs/gpu-runs.md)."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.tradeoff import PALETTES, ROOT, text

TOKENS = 32_000
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 880, 540, 64, 52, 850, 476
_NAMES = {
    "mps100-below": "MPS, decode's kernels first (the default)",
    "mps92-below": "the same, prefill on 92 % of the SMs",
    "mps80-below, cuBLAS 13.10": "the same, 80 %, cuBLAS 13.10",
    "mps60-below, cuBLAS 13.10": "the same, 60 %, cuBLAS 13.10",
    "mps50-below": "the same, 50 %",
    "mps100-below@2048": "the same, prefill's steps of 2,048 tokens",
    "agg": "one aggregated worker",
    "vllm": "vllm serve",
}
_LABELLED_LEFT = {
    _NAMES["mps100-below"],
    _NAMES["mps92-below"],
    _NAMES["mps80-below, cuBLAS 13.10"],
    _NAMES["mps60-below, cuBLAS 13.10"],
    "vllm serve",
}


class Point(NamedTuple):
    """One way: milliseconds."""

    name: str
    is_apart: bool
    is_earlier: bool
    ttft_ms: float
    itl_p99_ms: float


EARLIER = (
    Point("vllm serve, steps of 512", False, True, 1210, 23),
    Point("MPS, equal kernels", True, True, 742, 50),
    Point("time slices", True, True, 1273, 13.1),
)
"""vLLM 0.25."""


def points() -> tuple[list[Point], str]:
    """The ways of the results, and what they were measured with."""
    results = json.loads((ROOT / "benchmarks/results/one_gpu_20b_h200.json").read_text())
    found = [
        Point(
            _NAMES[run["way"]],
            run["way"].startswith(("mps", "slices")),
            False,
            row["ttft_p50_ms"],
            row["itl_p99_ms"],
        )
        for run in results["runs"]
        for row in run.get("long_prompts", ())
        if row["handed_over_tokens"] == TOKENS and run["way"] in _NAMES
    ]
    gpu = results["hardware"][0].removeprefix("NVIDIA ")
    return found, f"{gpu}, vLLM {results['versions']['vllm']} (hollow: vLLM 0.25)"


def _x(ttft_ms: float, most_ms: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * ttft_ms / most_ms


def _y(itl_ms: float, most_ms: float) -> float:
    """Logarithmic, from 5 ms at the bottom."""
    return _BOTTOM - (_BOTTOM - _TOP) * math.log(itl_ms / 5) / math.log(most_ms / 5)


def svg(theme: str) -> str:
    """The picture, on a transparent ground; `theme` is light or dark."""
    found, source = points()
    title = "Running answers beside 32,000-token prompts, on one GPU"
    colors = PALETTES[theme]
    bold = f'fill="{colors["text"]}" font-weight="600"'
    quiet = f'fill="{colors["quiet"]}" font-size="12"'
    parts = [
        text(10, 22, title, f'{bold} font-size="17"'),
        text(_LEFT, 44, "time between tokens, p99, ms", quiet),
        text(_RIGHT - 190, _BOTTOM + 36, "first token of the prompt, p50, ms", quiet),
        text(
            10,
            _HEIGHT - 8,
            f"gpt-oss-20b's shape, random weights, {source}; single runs: docs/gpu-runs.md",
            quiet,
        ),
        *_drawn(found, colors),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="13" '
        f'font-family="system-ui, sans-serif"><title>{title}</title>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _drawn(found: list[Point], colors: dict[str, str]) -> Iterator[str]:
    """Axes, ticks and points."""
    found = [*EARLIER, *found]
    right = 200 * math.ceil(max(point.ttft_ms for point in found) * 1.25 / 200)
    top = 1.2 * max(point.itl_p99_ms for point in found)
    quiet = f'fill="{colors["quiet"]}" font-size="12"'
    line = f'stroke="{colors["bar"]}" stroke-width="1"'
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" {line}/>'
    for tick in range(0, right + 1, 200):
        yield text(_x(tick, right) - 10, _BOTTOM + 18, f"{tick:,}", quiet)
    for tick in (5, 10, 20, 50, 100, 200, 500):
        if tick <= top:
            yield text(_LEFT - 34, _y(tick, top) + 4, f"{tick:>3}", quiet)
    for point in found:
        x, y = _x(point.ttft_ms, right), _y(point.itl_p99_ms, top)
        color = colors["ours" if point.is_apart else "bar"]
        fill = f'fill="none" stroke="{color}" stroke-width="2"' if point.is_earlier else f'fill="{color}"'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {fill}/>'
        style = f'fill="{colors["text" if point.is_apart else "quiet"]}"'
        is_left = point.name in _LABELLED_LEFT
        style += ' text-anchor="end"' if is_left else ""
        yield text(x + (-11 if is_left else 11), y + 4, f"{point.name}: {point.itl_p99_ms:.0f}", style)


def main() -> None:
    """Write both pictures."""
    for theme in PALETTES:
        Path(ROOT / f"docs/images/one-gpu-{theme}.svg").write_text(svg(theme))


if __name__ == "__main__":
    main()
