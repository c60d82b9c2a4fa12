"""Curves over rounds: ε, accuracy and loss, signal to noise, norms and the bound's bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedveil.privacy.statement import BRIEFLY
from fedveil.reporting.chart import COLOURS, Chart, Curve, lines
from fedveil.reporting.load import Member, Run, Story

Series = Callable[[Run], np.ndarray | None]
ROUNDS = "rounds played"


def shown(story: Story) -> list[Member]:
    """At most as many members as there are colours: those of the best results, in their order."""
    if len(story.members) <= COLOURS:
        return list(story.members)
    best = sorted(story.members, key=_merit, reverse=True)[:COLOURS]
    return [member for member in story.members if member in best]


def _merit(member: Member) -> float:
    accuracy, loss = member.results("accuracy"), member.results("loss")
    return float(np.mean(accuracy)) if accuracy else -float(np.mean(loss or [np.inf]))


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


def curve(member: Member, y: Series, x: Series | None = None, label: str = "") -> Curve | None:
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
    return Curve(
        label or member.label, at, stacked.mean(0), stacked.min(0), stacked.max(0), len(known)
    )


def _means(member: Member, x: Series, rounds: np.ndarray) -> np.ndarray:
    found = [x(run) for run in member.runs]
    kept = [
        v[np.isin(run.columns["round"], rounds)]
        for run, v in zip(member.runs, found, strict=True)
        if v is not None
    ]
    return np.asarray(np.mean(kept, axis=0))


def _curves(members: Sequence[Member], y: Series, x: Series | None = None) -> list[Curve]:
    return [found for m in members if (found := curve(m, y, x)) is not None]


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
    """ε so far."""
    members = [m for m in shown(story) if m.first.private]
    if not members:
        return []
    found = _curves(members, column("epsilon"))
    asked = {budget for m in members if (budget := m.first.budget) is not None}
    dotted = " The dotted line is the budget." if len(asked) == 1 else ""
    said = members[0].first.guarantee
    delta, seen = said["delta"], BRIEFLY[said["view"]]
    chart = lines(
        found, ROUNDS, "ε", "ε spent over the rounds",
        f"What had been spent at δ = {delta:g}, {seen}, had training stopped there.{dotted}",
    )  # fmt: skip
    if chart is None:
        return []
    chart.layout["yaxis"] = {"title": "ε", "rangemode": "tozero"}
    if len(asked) == 1:
        chart.layout["shapes"] = [_level(asked.pop())]
    return [chart]


def _level(height: float) -> dict[str, object]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
        "line": {"color": "@text", "width": 1.5, "dash": "dot"},
    }  # fmt: skip


def sending(story: Story) -> list[Chart]:
    """Accuracy against what was sent: Shulgin et al. 2025, Fig. 2."""
    members = shown(story)

    def total(name: str, scale: float = 1.0) -> Series:
        return lambda run: np.nancumsum(run.columns[name]) / scale

    most = max(float(np.nansum(run.columns["sent"])) for m in members for run in m.runs)
    scale, unit = next(
        ((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= s), (1.0, "bytes")
    )
    accuracy = column("accuracy")
    kind = "The same accuracy against what it took"
    charts = [
        lines(
            _curves(members, accuracy, total("participants")), "messages sent", "test accuracy",
            "Accuracy by transmissions",
            f"{kind}: messages that clients sent, all rounds together (Shulgin et al. 2025, "
            "Fig. 2).", percent=True,
        ),
        lines(
            _curves(members, accuracy, total("sent", scale)), f"sent ({unit})", "test accuracy",
            "Accuracy by bytes", f"{kind}: bytes of those messages.", percent=True,
        ),
    ]  # fmt: skip
    return _present(charts if most else charts[:1])


def signal(story: Story) -> list[Chart]:
    """Signal to noise: Das et al. 2022, Fig. 2."""
    chart = lines(
        _curves(shown(story), ratio("signal", "noise")), ROUNDS, "signal to noise",
        "Signal to noise",
        "Norm of the mean bounded update over the norm of the noise on it (Das et al. 2022, "
        "Fig. 2). Below 1 a single round is mostly noise; many rounds may still average it out.",
    )  # fmt: skip
    return _present([chart])


def bounding(story: Story) -> list[Chart]:
    """What the bound meets and what it does: Zhang et al. 2022 and DP-LSGD."""
    members = shown(story)
    return _present(
        [
            lines(
                _curves(members, _norms), ROUNDS, "update norm", "Norm of updates",
                "Median norm of the clients' updates before the bound (their mean, where no "
                "median was recorded).",
            ),
            lines(
                _curves(members, column("shrunk")), ROUNDS, "shortened",
                "How many were shortened", "Share of updates that the bound made shorter.",
                percent=True,
            ),
            lines(
                _curves(members, column("cosine")), ROUNDS, "mean cosine",
                "Do clients agree?", "Mean cosine of the angle between an update and the last "
                "global step: 1 is the same direction, 0 is a right angle.",
                axis={"range": [-1.02, 1.02]},
            ),
            *_biases(members),
            lines(
                _curves(members, column("incremental_norm")), ROUNDS, "Ψ",
                "Incremental norm", "Mean of Ψ = max(‖Δ‖ − c, 0), what the bound cuts off "
                "(DP-LSGD, Fig. 1).",
            ),
            lines(
                _curves(members, column("memory_error")), ROUNDS, "memory error",
                "Error of memory", "Mean ‖v_i − u_i‖: how far a client's memory is from what it "
                "stands for (Shulgin et al. 2025).",
            ),
            lines(
                _curves(members, column("distance")), ROUNDS, "distance",
                "Distance to the optimum", "‖x_k − x*‖, where the optimum is known.",
            ),
            lines(
                _curves(members, column("heterogeneity")), ROUNDS, "Δ*", "Heterogeneity",
                "Δ*: how far the clients' own optima are from the common one.",
            ),
        ]
    )  # fmt: skip


def _norms(run: Run) -> np.ndarray | None:
    median = run.series("norm_median")
    return run.series("norm") if median is None else median


def _biases(members: Sequence[Member]) -> Iterator[Chart | None]:
    """Both terms in one chart for one member, and a chart for each term for several."""
    told = (
        "Mean |α_i − α̃_i|, own, and |α̃_i − ᾱ|, shared (Zhang et al. 2022, Thm. 3.1): how far "
        "clipping weighs clients unequally."
    )
    terms = {"own": column("bias_own"), "shared": column("bias_shared")}
    if len(members) == 1:
        found = [curve(members[0], term, label=word) for word, term in terms.items()]
        kept = [line for line in found if line is not None]
        yield lines(kept, ROUNDS, "bias", "Bias of clipping", told)
        return
    for word, term in terms.items():
        yield lines(_curves(members, term), ROUNDS, "bias", f"Bias of clipping, {word}", told)
