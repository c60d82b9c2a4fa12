"""Curves over rounds: ε, accuracy and loss, signal to noise, norms and the bound's bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedveil.accounting.rounding import short
from fedveil.data.origin import footnote
from fedveil.privacy.guarantee import BRIEFLY
from fedveil.reporting.chart import Chart, Curve, few_digits, lines, merged, share, size
from fedveil.reporting.load import ReportMember, Run, Story
from fedveil.training.metrics import titled

Series = Callable[[Run], np.ndarray | None]
ROUNDS = "round"
MOST_LINES = 6  # per chart; more cannot be distinguished
SHARE: dict[str, Any] = {"percent": True, "axis": {"range": [0, 1.03]}}


def shown(story: Story) -> list[ReportMember]:
    """All members in order, or, if there are too many to draw, the best ones, best first."""
    if len(story.members) <= MOST_LINES:
        return list(story.members)
    return ranked(story.members)[:MOST_LINES]


def ranked(members: Sequence[ReportMember]) -> list[ReportMember]:
    """Best first: by the final mean of their measure."""
    return sorted(members, key=merit, reverse=True)


def merit(member: ReportMember) -> float:
    """Larger is better; −∞ without any result."""
    found = member.results()
    return member.measure.sign * float(np.mean(found)) if found else -math.inf


def column(name: str) -> Series:
    """A column of the metrics."""
    return lambda run: run.series(name)


def ratio(name: str, over: str) -> Series:
    """One column divided by another, where that one is not zero."""

    def found(run: Run) -> np.ndarray | None:
        top, below = run.series(name), run.series(over)
        if top is None or below is None or not (below > 0).any():
            return None
        return np.asarray(np.where(below > 0, top / np.where(below > 0, below, 1), np.nan))

    return found


def curve(member: ReportMember, y: Series, x: Series | None = None) -> Curve | None:
    """Mean, minimum and maximum over the seeds, at the rounds that all of them recorded."""
    found = [(run.columns["round"], y(run)) for run in member.runs]
    known = [(r[np.isfinite(v)], v[np.isfinite(v)]) for r, v in found if v is not None]
    if len(known) < len(found):
        return None
    common = known[0][0]
    for rounds, _ in known[1:]:
        common = np.intersect1d(common, rounds)
    stacked = np.stack([v[np.isin(r, common)] for r, v in known])
    at = common if x is None else _means(member, x, common)
    last = [float(r[-1]) for r, _ in found]
    until = min(last) if x is None and _ends_early(common, min(last)) else 0.0
    return Curve(
        member.label, at, stacked.mean(0), stacked.min(0), stacked.max(0), len(known), until=until
    )


def _ends_early(rounds: np.ndarray, last: float) -> bool:
    """Whether more than one value is missing at the end."""
    steps = np.diff(rounds)
    return bool(len(steps)) and last - rounds[-1] > float(np.median(steps))


def _means(member: ReportMember, x: Series, rounds: np.ndarray) -> np.ndarray:
    found = [x(run) for run in member.runs]
    kept = [
        v[np.isin(run.columns["round"], rounds)]
        for run, v in zip(member.runs, found, strict=True)
        if v is not None
    ]
    return np.asarray(np.mean(kept, axis=0))


def _curves(members: Sequence[ReportMember], y: Series, x: Series | None = None) -> list[Curve]:
    """A member's position among all decides its colour, even if others have no curve."""
    found = [(place, curve(member, y, x)) for place, member in enumerate(members)]
    return [replace(line, place=place) for place, line in found if line is not None]


def _present(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def learning(story: Story) -> list[Chart]:
    """Accuracy and loss on the test examples."""
    members, main = shown(story), story.measure
    title = _capital(titled(main.name))
    noisy = _noisy(members)
    own = lines(
        _curves(members, column("metric")), ROUNDS, f"test {titled(main.name)}", title,
        f"Of the test examples. This metric ranks runs.{noisy}", percent=main.share,
    )  # fmt: skip
    return _present(
        [
            own,
            lines(
                _curves(members, column("accuracy")), ROUNDS, "test accuracy", "Accuracy",
                f"Share of test examples classified correctly.{noisy}", percent=True,
            ),
            lines(
                _curves(members, column("loss")), ROUNDS, "test loss", "Loss",
                f"Mean loss over the test examples.{noisy}",
            ),
        ]
    )  # fmt: skip


def _noisy(members: Sequence[ReportMember]) -> str:
    """Whether the results carry noise."""
    scores = [run.scores for member in members for run in member.runs]
    if not any(found is not None and not found.exact for found in scores):
        return ""
    return " Results of a private evaluation carry noise, and the run's ε covers them."


def spending(story: Story) -> list[Chart]:
    """ε so far, which is a guarantee only for a run that was fixed in advance to stop there."""
    members = [m for m in shown(story) if m.first.private]
    if not members:
        return []
    found = _curves(shown(story), lambda run: run.series("epsilon") if run.private else None)
    asked = {budget for m in members if (budget := m.first.budget) is not None}
    told = footnote(m.first.origin for m in members)
    dotted = f" {told}" if told else ""
    dotted += " The dotted line is the budget." if len(asked) == 1 else ""
    said = members[0].first.guarantee
    delta, seen = said["delta"], BRIEFLY[said["view"]]
    chart = lines(
        found, ROUNDS, "ε", "ε over the rounds",
        f"ε of the rounds so far at δ = {short(delta)}, {seen}. Each value holds only if stopping "
        "there was fixed in advance. A run stopped by choice has the ε of all planned "
        f"rounds.{dotted}",
    )  # fmt: skip
    if chart is None:
        return []
    chart.layout["yaxis"] = {"title": "ε", "rangemode": "tozero"}
    if len(asked) == 1:
        chart.layout["shapes"] = [level(asked.pop())]
    return [chart]


def level(height: float) -> dict[str, object]:
    """A dotted line across a chart."""
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
        "line": {"color": "@text", "width": 1.5, "dash": "dot"},
    }  # fmt: skip


def sending(story: Story) -> list[Chart]:
    """Accuracy against communication: Shulgin et al. 2025, Fig. 2.

    If all messages have one size, one chart has both scales.
    """
    members = shown(story)
    sizes = _message_sizes(members)
    most = max(float(np.nansum(run.columns["sent"])) for m in members for run in m.runs)
    scale, unit = next(
        ((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= s), (1.0, "bytes")
    )
    ranked_by = story.measure
    extra = ranked_by.name not in ("accuracy", "loss")
    name = titled(ranked_by.name)
    score, percent = column("metric" if extra else ranked_by.name), ranked_by.share
    kind = f"{_capital(name)} against the total communication of all clients"
    source = "(Shulgin et al. 2025, Fig. 2)"
    by_messages = _curves(members, score, _total("participants"))
    if len(sizes) == 1 and most:
        return _present([lines(
            by_messages, "messages sent, and their total size", f"test {name}",
            f"{_capital(name)} by messages and bytes",
            f"{kind}: messages of {size(sizes[0])} each {source}.",
            percent=percent, across=_both_scales(by_messages, sizes[0]),
        )])  # fmt: skip
    by_bytes = _curves(members, score, _total("sent", scale)) if most else []
    return _present([
        lines(by_messages, "messages sent", f"test {name}", f"{_capital(name)} by messages",
              f"{kind}, in messages {source}.", percent=percent),
        lines(by_bytes, f"sent ({unit})", f"test {name}", f"{_capital(name)} by bytes",
              f"{kind}, in bytes.", percent=percent),
    ])  # fmt: skip


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _total(name: str, scale: float = 1.0) -> Series:
    return lambda run: np.nancumsum(run.columns[name]) / scale


def _message_sizes(members: Sequence[ReportMember]) -> list[float]:
    """The distinct mean sizes of a message."""
    found = set()
    for run in (run for member in members for run in member.runs):
        sent, came = (float(np.nansum(run.columns[name])) for name in ("sent", "participants"))
        found.add(round(sent / came, 6) if came else 0.0)
    return sorted(found)


def _both_scales(curves: Sequence[Curve], each: float) -> dict[str, Any]:
    """Ticks that show the number of messages and, below it, their bytes."""
    most = max((float(c.x[-1]) for c in curves if len(c.x)), default=1.0)
    power = 10 ** math.floor(math.log10(max(most, 1) / 4))
    step = max(1, next(power * k for k in (1, 2, 5, 10) if power * k >= most / 4))
    ticks = [float(step * i) for i in range(int(most / step) + 1)]
    told = [f"{_round(t)}<br>{size(t * each)}" if t else "0" for t in ticks]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": told}


def _round(count: float) -> str:
    """A short number of messages.

    >>> _round(250_000), _round(1_500_000), _round(800)
    ('250k', '1.5M', '800')
    """
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if count >= 10 * scale or (unit == "M" and count >= scale):
            return f"{count / scale:g}{unit}"
    return f"{count:,.0f}"


def signal(story: Story) -> list[Chart]:
    """Signal to noise: Das et al. 2022, Fig. 2."""
    found = _curves(shown(story), ratio("signal", "noise"))
    medians = ", ".join(
        f"{few_digits(float(f'{np.median(c.mean):.2g}'))}" + (f" ({c.label})" if found[1:] else "")
        for c in found
    )
    across_one = any(c.mean.max() > 0.7 and c.mean.min() < 1.4 for c in found)
    chart = lines(
        found, ROUNDS, "signal to noise", "Signal to noise",
        "Norm of the mean bounded update over the norm of its noise (Das et al. 2022, Fig. 2). "
        "Below 1 a single round is mostly noise, but many rounds may average it out. "
        f"Median over all rounds: {medians}." + " Dotted line: 1." * across_one,
        axis={"rangemode": "tozero"}, **({"shapes": [level(1.0)]} if across_one else {}),
    )  # fmt: skip
    return _present([chart])


@dataclass(frozen=True)
class RecordedCurve:
    """A quantity recorded in every round, and its labels."""

    series: Series
    unit: str  # of the y axis
    title: str
    caption: str
    more: dict[str, Any] = field(default_factory=dict)


def bounding(story: Story) -> list[Chart]:
    """Charts of the updates and the effect of the bound, for what changes over the rounds."""
    return _present([
        lines(found, ROUNDS, m.unit, m.title, m.caption, **m.more)
        for m in _measures(story)
        if not _steady(found := _curves(shown(story), m.series))
    ])  # fmt: skip


def unchanging(story: Story) -> list[str]:
    """One sentence for each quantity that is the same in all rounds."""
    return [
        f"{m.title}: {_levels(found, len(shown(story)), 'percent' in m.more)} in every round."
        for m in _measures(story)
        if _steady(found := _curves(shown(story), m.series))
    ]


def _steady(curves: Sequence[Curve]) -> bool:
    """Whether a chart would show horizontal lines only."""
    return bool(curves) and all(
        len(c.x) and c.high.max() - c.low.min() <= 1e-6 * abs(c.high.max()) for c in curves
    )


def _levels(curves: Sequence[Curve], members: int, percent: bool) -> str:
    show = share if percent else few_digits
    told = merged(curves)
    if len(told) == 1 and len(curves) == members:
        return show(told[0].mean[0])
    return ", ".join(f"{show(c.mean[0])} ({c.label})" for c in told)


def _clipped(run: Run) -> np.ndarray | None:
    """The clipped fraction, which is no finding of a normalization: it changes every update."""
    return None if run.normalizes else run.series("clipped_fraction")


def _measures(story: Story) -> list[RecordedCurve]:
    """The measures of Zhang et al. 2022, DP-LSGD and Shulgin et al. 2025."""
    noisy = (
        " The step includes noise: where noise outweighs the signal, the cosine is near 0 even if "
        "clients agree."
    ) * any(m.first.private for m in story.members)
    return [
        RecordedCurve(_norms, "update norm", "Norm of updates",
                "Median norm of the clients' updates before the bound (the mean, if no median was "
                "recorded)."),
        RecordedCurve(_clipped, "clipped fraction", "Clipped fraction",
                "Share of updates that the bound shortened.", SHARE),
        RecordedCurve(column("cosine"), "mean cosine", "Agreement of clients",
                "Mean cosine of the angle between a client's update and the last global step. 1 is "
                f"the same direction, 0 a right angle.{noisy}", {"axis": {"range": [-1.02, 1.02]}}),
        RecordedCurve(column("bias_shared"), "|α̃_i − ᾱ|", "Clipping bias between clients",
                "Clipping multiplies a client's update by α_i ≤ 1. The chart shows the distance of "
                "these factors from their mean; at 0 all clients are clipped alike (Zhang et al. "
                "2022, Thm. 3.1)."),
        RecordedCurve(column("bias_own"), "|α_i − α̃_i|", "Clipping bias from random batches",
                "How much a client's factor α_i depends on the examples it happened to draw; at 0 "
                "not at all (Zhang et al. 2022, Thm. 3.1)."),
        RecordedCurve(column("incremental_norm"), "Ψ", "Clipped length",
                "Mean of Ψ = max(‖Δ‖ − c, 0): how much of an update's norm the bound c cuts off "
                "(DP-LSGD, Fig. 1)."),
        RecordedCurve(column("memory_error"), "‖v_i − u_i‖", "Memory error",
                "Mean distance of a client's memory from its newest update. Error compensation "
                "works if it decreases (Shulgin et al. 2025)."),
        RecordedCurve(column("distance"), "‖x − x*‖", "Distance to the optimum",
                "Distance of the model from the optimum, which is known here."),
        RecordedCurve(column("heterogeneity"), "Δ*", "Heterogeneity Δ*",
                "Mean excess loss of a client at the common optimum over its own optimum "
                "(Das et al. 2022, Def. 1)."),
    ]  # fmt: skip


def _norms(run: Run) -> np.ndarray | None:
    median = run.series("norm_median")
    return run.series("norm") if median is None else median
