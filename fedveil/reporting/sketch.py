"""The first chart of a page as SVG, visible before Plotly has started."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.reporting.chart import Chart, few_digits

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 900, 68, 14, 10, 50
STROKES = {
    "solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4", "longdash": "14 5",
    "longdashdot": "14 4 2 4",
}  # fmt: skip
TICKS = 6
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, here = (_log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (here - low) / (high - low or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """A few round values within the axis."""
        if self.log:
            first, last = math.ceil(_log(self.low)), math.floor(_log(self.high))
            return [10.0**power for power in range(first, last + 1)]
        step = nice((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step)
        return [step * k for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice(step: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten.

    >>> nice(0.03), nice(7.0)
    (0.05, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((k * power for k in (1.0, 2.0, 5.0) if k * power >= step * (1 - 1e-9)), 10 * power)


def sketched(chart: Chart) -> str:
    """Lines with their axes; empty for any other chart."""
    lines = [t for t in chart.traces if t["type"] == "scatter" and t.get("line", {}).get("color")]
    points = [(t, _points(t)) for t in lines]
    known = [(t, found) for t, found in points if found]
    if not known:
        return ""
    x, y = _axes(chart, [point for _, found in known for point in found])
    percent = chart.layout["yaxis"].get("tickformat") == ".0%"
    drawn = "".join(_line(t, found, x, y) for t, found in known)
    show: Callable[[float], str] = (lambda v: f"{v:.0%}") if percent else few_digits
    return (
        f'<svg class="sketch" aria-hidden="true" viewBox="0 0 {WIDTH} {chart.height}">'
        f"{_frame(chart, x, y, show)}{drawn}</svg>"
    )


def _points(trace: dict[str, Any]) -> list[Point]:
    pairs = zip(trace["x"], trace["y"], strict=True)
    return [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]


def _axes(chart: Chart, points: Sequence[Point]) -> tuple[Axis, Axis]:
    given = chart.layout["yaxis"]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    log = given.get("type") == "log"
    low, high = given.get("range") or (min(ys), max(ys))
    if "range" not in given:
        low = 0.0 if given.get("rangemode") == "tozero" and low > 0 else low
        room = 0.05 * (high - low)
        low, high = (low, high) if log else (low - room if low else low, high + room)
    across = Axis(min(0.0, *xs), max(xs) or 1.0, LEFT, WIDTH - RIGHT)
    return across, Axis(low, high, chart.height - BOTTOM, TOP, log)


def _frame(chart: Chart, x: Axis, y: Axis, show: Callable[[float], str]) -> str:
    names = [html.escape(str(chart.layout[a].get("title", ""))) for a in ("xaxis", "yaxis")]
    across = "".join(
        f'<path d="M{x.at(v):.1f} {TOP}V{y.start}"/><text x="{x.at(v):.1f}" y="{y.start + 18}" '
        f'text-anchor="middle">{few_digits(v)}</text>'
        for v in x.ticks()
    )
    up = "".join(
        f'<path d="M{LEFT} {y.at(v):.1f}H{WIDTH - RIGHT}"/><text x="{LEFT - 6}" '
        f'y="{y.at(v) + 4:.1f}" text-anchor="end">{show(v)}</text>'
        for v in y.ticks()
    )
    return (
        f'<g class="grid">{across}{up}<text x="{(LEFT + WIDTH) / 2:.0f}" y="{chart.height - 10}" '
        f'text-anchor="middle">{names[0]}</text></g>'
    )


def _line(trace: dict[str, Any], points: Sequence[Point], x: Axis, y: Axis) -> str:
    colour = str(trace["line"]["color"]).removeprefix("@").partition("/")[0]
    dash = STROKES[trace["line"].get("dash", "solid")]
    path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in points)
    if len(points) == 1:
        a, b = points[0]
        return f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="4" style="fill:var(--{colour})"/>'
    style = f'style="stroke:var(--{colour})" stroke-dasharray="{dash}"'
    return f'<path class="curve" d="M{path}" {style}/>'


def _log(value: float) -> float:
    return math.log10(max(value, 1e-300))
