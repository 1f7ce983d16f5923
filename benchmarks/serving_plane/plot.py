"""The plot: CPU time per request of each row, stacked by process, as SVG."""

from collections.abc import Mapping
from html import escape

from benchmarks.serving_plane.load import Measured

_COLORS = {"frontend": "#2563eb", "prefill": "#16a34a", "decode": "#ea580c"}
_BAR, _GAP, _LEFT, _WIDTH = 16, 10, 300, 560


def svg(found: Mapping[str, Mapping[str, Measured]]) -> str:
    """One bar per row and server; rows differ much, so each row has its own scale."""
    parts, y = [], 40
    for i, (name, color) in enumerate(_COLORS.items()):
        parts.append(f'<rect x="{_LEFT + 110 * i}" y="10" width="12" height="12" fill="{color}"/>')
        parts.append(_text(_LEFT + 110 * i + 18, 20, name))
    for row in next(iter(found.values())):
        measured = {server: rows[row] for server, rows in found.items() if row in rows}
        most_us = max(sum(each.cpu_us_per_request.values()) for each in measured.values())
        for server, each in measured.items():
            parts.append(_text(10, y + 12, f"{row}: {server}"))
            x = float(_LEFT)
            for process, us in each.cpu_us_per_request.items():
                width = _WIDTH * us / most_us
                place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"'
                parts.append(f'<rect {place} fill="{_COLORS[process]}"/>')
                x += width
            total = f"{sum(each.cpu_us_per_request.values()):,.0f} us, {each.requests_per_s:,.0f} req/s"
            parts.append(_text(int(x) + 6, y + 12, total))
            y += _BAR + 2
        y += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 180}" height="{y}" '
        f'font-family="sans-serif" font-size="12"><title>CPU time per request</title>{"".join(parts)}</svg>\n'
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
