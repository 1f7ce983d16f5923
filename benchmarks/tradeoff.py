"""Draws what disaggregation buys and costs, from benchmarks/results: `python benchmarks/tradeoff.py` writes
docs/images/tradeoff-light.svg and tradeoff-dark.svg."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = ("disaggregated", "two aggregated workers", "vllm serve, twice")
SHIPPED = "--router-mode prefix --local-prefill-tokens 8192 --local-prefill-after-s 0.3"
"""The frontend's flags in launch/gpt_oss_vllm.sh."""
_PER_GPU = "output_tokens_per_s_per_gpu"
_LONG = "32000 in, 256 out, 8 at a time"
PALETTES = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "bar": "#8c959f", "ours": "#0969da"},
    "dark": {"text": "#e6edf3", "quiet": "#9198a1", "bar": "#6e7681", "ours": "#58a6ff"},
}
_HEADINGS = ("What it buys", "What it costs")
_SOURCE = (
    "gpt-oss-20b's shape, random weights, vLLM, two H200; single runs, on several days: docs/gpu-runs.md"
)
_COLUMN, _PANEL, _LABEL, _BAR = 440, 104, 165, 210
_HEIGHT = 52 + 3 * _PANEL + 8


class Panel(NamedTuple):
    """One figure of the three set-ups, in the order of `NAMES`."""

    title: str
    values: tuple[float, float, float]
    unit: str


def figures() -> tuple[list[Panel], list[Panel]]:
    """What it buys, and what it costs. Of the aggregated runs, the one with the best times between tokens."""
    runs = json.loads((ROOT / "benchmarks/results/agent_turns_20b.json").read_text())["runs"]
    aiperf = json.loads((ROOT / "benchmarks/results/vllm_aiperf_20b.json").read_text())
    (apart,) = (run for run in runs if run.get("frontend") == SHIPPED and run["load"]["conversations"] == 48)
    of_way = [[run for run in runs if run["way"] == way] for way in ("aggregated", "vllm")]
    turns = [apart, *(min(them, key=lambda run: run["later_turns"]["itl_p99_ms"]) for them in of_way)]
    assert all(run["load"] == apart["load"] for run in turns)
    long = [aiperf[way][_LONG] for way in ("apart", "aggregated", "vllm")]
    buys = [
        _panel("Agents' turns: time between tokens, p99", turns, "later_turns", "itl_p99_ms", unit="ms"),
        _panel("Agents' turns: throughput", turns, "output_tokens_per_s", unit="tokens/s"),
        _panel("32,000-token prompts: time between tokens, mean", long, "itl_ms", "avg", unit="ms"),
    ]
    costs = [
        _panel(
            "Agents: first token of a new conversation, p50", turns, "first_turn", "ttft_p50_ms", unit="ms"
        ),
        _panel("32,000-token prompts: first token, mean", long, "ttft_ms", "avg", unit="ms"),
        _panel("32,000-token prompts: throughput", long, _PER_GPU, unit="tokens/s per GPU"),
    ]
    return buys, costs


def _panel(title: str, found: list[Mapping[str, Any]], *path: str, unit: str) -> Panel:
    first, second, third = (each[path[0]] if len(path) == 1 else each[path[0]][path[1]] for each in found)
    return Panel(title, (first, second, third), unit)


def svg(theme: str) -> str:
    """The picture, on a transparent ground; `theme` is light or dark."""
    colors = PALETTES[theme]
    parts = [
        text(10, _HEIGHT - 10, _SOURCE, f'fill="{colors["quiet"]}" font-size="12"'),
        *(
            part
            for column, (heading, panels) in enumerate(zip(_HEADINGS, figures(), strict=True))
            for part in _column(10 + _COLUMN * column, heading, panels, colors)
        ),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _COLUMN} {_HEIGHT}" font-size="13" '
        'font-family="system-ui, sans-serif"><title>What disaggregation buys and costs</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _column(left: int, heading: str, panels: list[Panel], colors: Mapping[str, str]) -> Iterator[str]:
    bold = f'fill="{colors["text"]}" font-weight="600"'
    yield text(left, 22, heading, f'{bold} font-size="17"')
    for row, panel in enumerate(panels):
        top, bar = 52 + _PANEL * row, left + _LABEL
        yield text(left, top, f"{panel.title} ({panel.unit})", bold)
        for i, (name, value) in enumerate(zip(NAMES, panel.values, strict=True)):
            y, width = top + 10 + 24 * i, _BAR * value / max(panel.values)
            place = f'x="{bar}" y="{y}" width="{width:.1f}" height="17" rx="2"'
            yield f'<rect {place} fill="{colors["bar" if i else "ours"]}"/>'
            color = f'fill="{colors["quiet" if i else "text"]}"'
            yield text(left, y + 13, name, color)
            yield text(bar + width + 6, y + 13, f"{value:,.{int(value < 10)}f}", color)


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(words)}</text>'


def main() -> None:
    """Write both pictures."""
    for theme in PALETTES:
        file = ROOT / f"docs/images/tradeoff-{theme}.svg"
        file.parent.mkdir(exist_ok=True)
        file.write_text(svg(theme))


if __name__ == "__main__":
    main()
