"""Curves over rounds: ε, accuracy and loss, signal to noise, norms and the bound's bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedveil.data.origin import footnote
from fedveil.privacy.statement import BRIEFLY
from fedveil.reporting.chart import Chart, Curve, few_digits, lines, merged, share, size
from fedveil.reporting.load import Member, Run, Story

Series = Callable[[Run], np.ndarray | None]
ROUNDS = "rounds played"
MOST_LINES = 6  # in a chart; more cannot be told apart
SHARE: dict[str, Any] = {"percent": True, "axis": {"range": [0, 1.03]}}


def shown(story: Story) -> list[Member]:
    """All members in their order, or, of more than can be drawn, the best, the best one first."""
    if len(story.members) <= MOST_LINES:
        return list(story.members)
    return ranked(story.members)[:MOST_LINES]


def ranked(members: Sequence[Member]) -> list[Member]:
    """The best first: by mean accuracy at the end, or by loss where there is none."""
    return sorted(members, key=merit, reverse=True)


def merit(member: Member) -> float:
    """Greater is better; without any result it is −∞."""
    accuracy, loss = member.results("accuracy"), member.results("loss")
    return float(np.mean(accuracy)) if accuracy else -float(np.mean(loss or [math.inf]))


def column(name: str) -> Series:
    """A column of the metrics as it is."""
    return lambda run: run.series(name)


def ratio(name: str, over: str) -> Series:
    """One column over another, where that one is not zero."""

    def found(run: Run) -> np.ndarray | None:
        top, below = run.series(name), run.series(over)
        if top is None or below is None or not (below > 0).any():
            return None
        return np.asarray(np.where(below > 0, top / np.where(below > 0, below, 1), np.nan))

    return found


def curve(member: Member, y: Series, x: Series | None = None) -> Curve | None:
    """Mean, least and greatest over the seeds, at the rounds that all of them recorded."""
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


def _means(member: Member, x: Series, rounds: np.ndarray) -> np.ndarray:
    found = [x(run) for run in member.runs]
    kept = [
        v[np.isin(run.columns["round"], rounds)]
        for run, v in zip(member.runs, found, strict=True)
        if v is not None
    ]
    return np.asarray(np.mean(kept, axis=0))


def _curves(members: Sequence[Member], y: Series, x: Series | None = None) -> list[Curve]:
    """A member's place among all gives its colour, also where others have no curve."""
    found = [(place, curve(member, y, x)) for place, member in enumerate(members)]
    return [replace(line, place=place) for place, line in found if line is not None]


def _present(charts: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def learning(story: Story) -> list[Chart]:
    """Accuracy and loss on the test examples."""
    members = shown(story)
    return _present(
        [
            lines(
                _curves(members, column("accuracy")), ROUNDS, "test accuracy", "Accuracy",
                "Share of test examples that the model answers rightly.", percent=True,
            ),
            lines(
                _curves(members, column("loss")), ROUNDS, "test loss", "Loss",
                "Mean loss over the test examples.",
            ),
        ]
    )  # fmt: skip


def spending(story: Story) -> list[Chart]:
    """ε so far, which is a guarantee for a run only that was to stop there from the start."""
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
        f"Of the rounds so far, at δ = {delta:g}, {seen}. It holds only if it was fixed in advance "
        f"to stop there; a run that is stopped by choice has the ε of all planned rounds.{dotted}",
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
    """Accuracy against what was sent: Shulgin et al. 2025, Fig. 2.

    Where all messages are of one size, one picture has both scales.
    """
    members = shown(story)
    sizes = _message_sizes(members)
    most = max(float(np.nansum(run.columns["sent"])) for m in members for run in m.runs)
    scale, unit = next(
        ((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= s), (1.0, "bytes")
    )
    accuracy = column("accuracy")
    kind = "The same accuracy against what clients sent in all rounds together"
    source = "(Shulgin et al. 2025, Fig. 2)"
    by_messages = _curves(members, accuracy, _total("participants"))
    if len(sizes) == 1 and most:
        return _present([lines(
            by_messages, "messages sent, and their size", "test accuracy",
            "Accuracy by messages and bytes",
            f"{kind}: messages of {size(sizes[0])} each {source}.",
            percent=True, across=_both_scales(by_messages, sizes[0]),
        )])  # fmt: skip
    by_bytes = _curves(members, accuracy, _total("sent", scale)) if most else []
    return _present([
        lines(by_messages, "messages sent", "test accuracy", "Accuracy by messages",
              f"{kind}: messages {source}.", percent=True),
        lines(by_bytes, f"sent ({unit})", "test accuracy", "Accuracy by bytes",
              f"{kind}: bytes of those messages.", percent=True),
    ])  # fmt: skip


def _total(name: str, scale: float = 1.0) -> Series:
    return lambda run: np.nancumsum(run.columns[name]) / scale


def _message_sizes(members: Sequence[Member]) -> list[float]:
    """The different mean sizes of a message."""
    found = set()
    for run in (run for member in members for run in member.runs):
        sent, came = (float(np.nansum(run.columns[name])) for name in ("sent", "participants"))
        found.add(round(sent / came, 6) if came else 0.0)
    return sorted(found)


def _both_scales(curves: Sequence[Curve], each: float) -> dict[str, Any]:
    """Ticks of an axis that have the number of messages, and below it their bytes."""
    most = max((float(c.x[-1]) for c in curves if len(c.x)), default=1.0)
    power = 10 ** math.floor(math.log10(max(most, 1) / 4))
    step = max(1, next(power * k for k in (1, 2, 5, 10) if power * k >= most / 4))
    ticks = [float(step * i) for i in range(int(most / step) + 1)]
    told = [f"{t:,.0f}<br>{size(t * each)}" if t else "0" for t in ticks]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": told}


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
        "Norm of the mean bounded update over the norm of the noise on it (Das et al. 2022, "
        "Fig. 2). Below 1 a single round is mostly noise; many rounds may still average it out. "
        f"Median of all rounds: {medians}." + " Dotted: 1." * across_one,
        axis={"rangemode": "tozero"}, **({"shapes": [level(1.0)]} if across_one else {}),
    )  # fmt: skip
    return _present([chart])


@dataclass(frozen=True)
class Measure:
    """What is recorded of every round, and how it is told."""

    series: Series
    unit: str  # on the side of the chart
    title: str
    caption: str
    more: dict[str, Any] = field(default_factory=dict)


def bounding(story: Story) -> list[Chart]:
    """What the bound meets and what it does, where it changes over the rounds."""
    return _present([
        lines(found, ROUNDS, m.unit, m.title, m.caption, **m.more)
        for m in _measures(story)
        if not _steady(found := _curves(shown(story), m.series))
    ])  # fmt: skip


def unchanging(story: Story) -> list[str]:
    """What stays the same in all rounds, in a sentence each."""
    return [
        f"{m.title}: {_levels(found, len(shown(story)), 'percent' in m.more)} in every round."
        for m in _measures(story)
        if _steady(found := _curves(shown(story), m.series))
    ]


def _steady(curves: Sequence[Curve]) -> bool:
    """Whether a picture would show level lines only."""
    return bool(curves) and all(
        len(c.x) and c.high.max() - c.low.min() <= 1e-6 * abs(c.high.max()) for c in curves
    )


def _levels(curves: Sequence[Curve], members: int, percent: bool) -> str:
    show = share if percent else few_digits
    told = merged(curves)
    if len(told) == 1 and len(curves) == members:
        return show(told[0].mean[0])
    return ", ".join(f"{show(c.mean[0])} ({c.label})" for c in told)


def _measures(story: Story) -> list[Measure]:
    """Of Zhang et al. 2022, DP-LSGD and Shulgin et al. 2025."""
    noisy = (
        " The step has the noise in it: where noise outweighs the signal, the cosine is near 0, "
        "however much clients agree."
    ) * any(m.first.private for m in story.members)
    return [
        Measure(_norms, "update norm", "Norm of updates",
                "Median norm of the clients' updates before the bound (their mean, where no "
                "median was recorded)."),
        Measure(column("shrunk"), "shortened", "Share of updates shortened",
                "Share of updates that the bound made shorter.", SHARE),
        Measure(column("cosine"), "mean cosine", "Do clients agree?",
                "Mean cosine of the angle between a client's update and the last global step: 1 is "
                f"the same direction, 0 a right angle.{noisy}", {"axis": {"range": [-1.02, 1.02]}}),
        Measure(column("bias_shared"), "|α̃_i − ᾱ|", "Bias of clipping between clients",
                "Clipping multiplies a client's update by α_i ≤ 1. Shown is how far these factors "
                "are from their mean; 0 is all clients shortened alike (Zhang et al. 2022, "
                "Thm. 3.1)."),
        Measure(column("bias_own"), "|α_i − α̃_i|", "Bias of clipping from random batches",
                "How far a client's factor α_i moves with the examples it happened to draw; 0 is "
                "not at all (Zhang et al. 2022, Thm. 3.1)."),
        Measure(column("incremental_norm"), "Ψ", "Length cut off",
                "Mean of Ψ = max(‖Δ‖ − c, 0): how much of an update's norm the bound c cuts off "
                "(DP-LSGD, Fig. 1)."),
        Measure(column("memory_error"), "‖v_i − u_i‖", "Error of memory",
                "How far what a client keeps is from its newest update, on average; error "
                "compensation works as it falls (Shulgin et al. 2025)."),
        Measure(column("distance"), "‖x − x*‖", "Distance to the optimum",
                "How far the model is from the best one, which is known here."),
        Measure(column("heterogeneity"), "Δ*", "Heterogeneity Δ*",
                "How much more a client loses at the common optimum than at its own, on average "
                "(Das et al. 2022, Def. 1)."),
    ]  # fmt: skip


def _norms(run: Run) -> np.ndarray | None:
    median = run.series("norm_median")
    return run.series("norm") if median is None else median
