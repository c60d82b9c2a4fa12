"""Charts as plain values: traces, layout, caption, and the same content as text and table."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedveil.accounting.rounding import short

MOST_POINTS = 400  # per curve
MOST_ROWS = 12  # of the table below a chart
MOST_MARKED = 4  # up to this many lines, every point has a marker
COLOURS = 8  # @c0 … @c7, defined by the page's style sheet for light and dark
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")


@dataclass(frozen=True)
class ChartTable:
    """Formatted numbers under column headings."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """One chart; colours are named @c0 … and defined by the page's theme."""

    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    alt: str
    table: ChartTable
    height: int = 340
    wide: bool = False
    named: bool = False  # whether even a single line needs a legend
    kind: str = "plain"  # "rounds" for a chart with a slider
    frames: dict[str, Any] = field(default_factory=dict)  # the slider's data


@dataclass(frozen=True)
class Curve:
    """A member's line: its mean over seeds, and the minimum and maximum over them."""

    label: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int = 1
    place: int = 0  # of its member, which has one colour and one dash throughout the page
    until: float = 0.0  # the last x, had all values stayed finite

    def thinned(self, most: int = MOST_POINTS) -> Curve:
        """At most about `most` points, including the extremes of every interval."""
        keep = extremes([self.mean, self.low, self.high], most)
        x, mean, low, high = (v[keep] for v in (self.x, self.mean, self.low, self.high))
        return replace(self, x=x, mean=mean, low=low, high=high)

    @property
    def spreads(self) -> bool:
        """Whether its seeds differ anywhere."""
        return self.seeds > 1 and bool((self.high > self.low).any())

    def same(self, other: Curve) -> bool:
        """Whether one line would hide the other."""
        return self.x.shape == other.x.shape and all(
            np.allclose(a, b, rtol=1e-6, atol=0)
            for a, b in ((self.x, other.x), (self.low, other.low), (self.high, other.high))
        )


def extremes(lines: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Positions that keep both ends and each line's minimum and maximum in equal intervals.

    >>> extremes([np.array([0, 9, 1, 2, -5, 3, 4, 5.0])], 6)
    array([0, 1, 4, 7])
    """
    count = len(lines[0])
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), max(1, (most - 2) // (2 * len(lines)))):
        for line in lines:
            kept |= {int(part[line[part].argmin()]), int(part[line[part].argmax()])}
    return np.array(sorted(kept))


def merged(curves: Sequence[Curve]) -> list[Curve]:
    """Coinciding curves as one, labelled with all their names."""
    groups: list[list[Curve]] = []
    for curve in curves:
        found = next((group for group in groups if group[0].same(curve)), None)
        if found is None:
            groups.append([curve])
        else:
            found.append(curve)
    return [
        replace(group[0], label=f"all {len(group)} coincide")
        if len(group) == len(curves) > 2
        else replace(group[0], label=" and ".join(curve.label for curve in group))
        for group in groups
    ]


def lines(
    curves: Sequence[Curve], x: str, y: str, title: str, caption: str, **more: Any
) -> Chart | None:
    """Lines with bands over seeds; None if there are fewer than two points to draw."""
    curves = merged([curve for curve in curves if len(curve.x)])
    if all(len(curve.x) < 2 for curve in curves):
        return None
    drawn = [curve.thinned() for curve in curves]
    percent = bool(more.pop("percent", False))
    axis = more.pop("axis", {})
    across = more.pop("across", {})
    layout = {
        "xaxis": {"title": x, "rangemode": "tozero", **across},
        "yaxis": {"title": y, **axis},
        **more,
    }
    if percent:
        layout["yaxis"] = {**layout["yaxis"], "tickformat": ".0%"}
    elif "range" not in layout["yaxis"] and _spreads(curves):
        layout["yaxis"] = {**layout["yaxis"], "type": "log", "dtick": 1 if _wide(curves) else "D2"}
    if "range" not in layout["yaxis"] and (ends := _flat(curves, percent)) is not None:
        layout["yaxis"] = {**layout["yaxis"], "range": ends}
    marked = len(drawn) <= MOST_MARKED
    traces = [trace for curve in drawn for trace in _traces(curve, percent, marked)]
    return Chart(
        title=title,
        caption=" ".join([caption, *_remarks(curves, drawn)]),
        traces=traces,
        layout=layout,
        alt=f"Line chart of {y} by {x}. " + " ".join(told(curve, x, percent) for curve in curves),
        table=_table(curves, x, percent),
    )


def _flat(curves: Sequence[Curve], percent: bool) -> list[float] | None:
    """An axis around values that hardly differ, which would else span far more than they do.

    >>> one = np.array([0.75])
    >>> [round(end, 3) for end in _flat([Curve("a", one, one, one, one)], True) or []]
    [0.7, 0.8]
    """
    low = min(float(curve.low.min()) for curve in curves)
    high = max(float(curve.high.max()) for curve in curves)
    room = 0.05 if percent else 0.1 * max(abs(low), abs(high), 1e-9)
    if high - low > room / 5:
        return None
    ends = [low - room, high + room]
    return [max(ends[0], 0.0), min(ends[1], 1.0)] if percent and 0 <= low <= high <= 1 else ends


def _remarks(curves: Sequence[Curve], drawn: Sequence[Curve]) -> Iterable[str]:
    seeds = [curve.seeds for curve in curves if curve.spreads]
    if seeds:
        yield f"Line: mean of {max(seeds)} seeds. Band: minimum to maximum over seeds."
    for curve in curves:
        if curve.x[-1] < curve.until:
            yield f"{curve.label} has no finite value after {few_digits(curve.x[-1])}."
    largest = max(range(len(curves)), key=lambda i: len(curves[i].x))
    all_, kept = len(curves[largest].x), len(drawn[largest].x)
    if kept < all_:
        yield (
            f"Shows {kept} of {all_} points: both ends, and the minimum and maximum of each "
            "interval between."
        )


def _traces(curve: Curve, percent: bool, marked: bool) -> Iterable[dict[str, Any]]:
    index = curve.place % COLOURS
    colour = f"@c{index}"
    x = numbers(curve.x)
    if curve.spreads:
        yield {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
            "x": x + x[::-1], "y": numbers(curve.high) + numbers(curve.low)[::-1],
            "fill": "toself", "fillcolor": f"{colour}/0.2", "line": {"width": 0},
        }  # fmt: skip
    few = (marked and len(curve.x) <= 30) or len(curve.x) == 1
    yield {
        "type": "scatter", "mode": "lines+markers" if few else "lines", "name": text(curve.label),
        "x": x, "y": numbers(curve.mean),
        "line": {"color": colour, "width": 2, "dash": DASHES[index]},
        "marker": {"color": colour, "size": 6, "symbol": SYMBOLS[index]},
        "hovertemplate": f"%{{x:,}}: %{{y:{'.2%' if percent else '.4~g'}}}",
    }  # fmt: skip


def told(curve: Curve, x: str, percent: bool) -> str:
    """Describe a line in one sentence."""
    show = share if percent else few_digits
    least, most = float(curve.mean.min()), float(curve.mean.max())
    return (
        f"{curve.label}: {show(curve.mean[0])} at {x} {few_digits(curve.x[0])}, "
        f"{show(curve.mean[-1])} at {few_digits(curve.x[-1])}; minimum {show(least)}, maximum "
        f"{show(most)}."
    )


def _table(curves: Sequence[Curve], x: str, percent: bool) -> ChartTable:
    """A few points of each line."""
    show = share if percent else few_digits
    rows = []
    for curve in curves:
        for i in np.unique(np.linspace(0, len(curve.x) - 1, MOST_ROWS).round().astype(int)):
            spread = f"{show(curve.low[i])} – {show(curve.high[i])}" if curve.seeds > 1 else ""
            rows.append([curve.label, few_digits(curve.x[i]), show(curve.mean[i]), spread])
    several = any(curve.seeds > 1 for curve in curves)
    head = ["run", x, "mean" if several else "value", "range over seeds"]
    return ChartTable(head, rows) if several else ChartTable(head[:3], [row[:3] for row in rows])


def _values(curves: Sequence[Curve]) -> np.ndarray:
    return np.concatenate([curve.mean for curve in curves])


def _spreads(curves: Sequence[Curve]) -> bool:
    """Whether to use a logarithmic axis: all positive, over more than a decade and a half."""
    lows = np.concatenate([curve.low for curve in curves])
    return bool((lows > 0).all() and _values(curves).max() > 30 * lows.min())


def _wide(curves: Sequence[Curve]) -> bool:
    values = _values(curves)
    return bool(values.max() > 1000 * values.min())


def numbers(values: np.ndarray) -> list[float | None]:
    """Five-digit numbers for JSON; numbers that are not finite become null."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float)]


def text(label: str) -> str:
    """A user's text for a chart, escaped for Plotly's markup."""
    return html.escape(label, quote=False)


def shortened(names: Sequence[str], most: int = 16) -> list[str]:
    """Names that fit next to an axis and stay distinct.

    >>> shortened(["a", "a name that is long", "a name that is too long"])
    ['a', 'a name that is… (1)', 'a name that is… (2)']
    """
    cut = [name if len(name) <= most else f"{name[: most - 2]}…" for name in names]
    return [f"{c} ({i})" if cut.count(c) > 1 else c for i, c in enumerate(cut)]


def few_digits(value: float) -> str:
    """Format a number for reading.

    >>> few_digits(0.000012345), few_digits(1234567.0), few_digits(0.5), few_digits(float("nan"))
    ('1.23e-5', '1,234,567', '0.5', '–')
    """
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-3:
        return short(value, 3)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share(value: float) -> str:
    """A fraction in percent.

    >>> share(0.83456)
    '83.5%'
    """
    return f"{value:.1%}" if math.isfinite(value) else "–"


def size(count: float) -> str:
    """Format a number of bytes for reading.

    >>> size(512), size(31_360_000)
    ('512 bytes', '31.4 MB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"
