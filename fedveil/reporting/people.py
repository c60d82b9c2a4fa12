"""Charts of individual clients: norms and angles, confusion, and accuracy per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.reporting.chart import (
    DASHES,
    Chart,
    ChartTable,
    few_digits,
    numbers,
    share,
    shortened,
    text,
)
from fedveil.reporting.curves import level, shown
from fedveil.reporting.load import ReportMember, Story
from fedveil.reporting.words import best
from fedveil.training.evaluation import evenly

FEW = 5  # classes: with more, counts of 0 are not written in a confusion matrix
MOST_FRAMES = 40  # rounds on the slider
MOST_DOTS = 200  # clients per round
WORST = 0.1  # the share of clients with the lowest accuracy that is reported


def angles(story: Story) -> list[Chart]:
    """Norm and angle of each client's update, round by round: Zhang et al. 2022, Fig. 1–3."""
    known = [found for member in shown(story) if (found := _scatter(member)) is not None]
    return [_angles(known)] if known else []


@dataclass(frozen=True)
class Scatter:
    """A member's frames, and the range of their norms."""

    member: ReportMember
    frames: list[dict[str, Any]]
    played: int
    low: float
    high: float

    def plain(self) -> dict[str, Any]:
        """Data for the page's script."""
        bound = _thresholds(self.member, [frame["round"] for frame in self.frames])
        return {"label": text(self.member.label), "rounds": self.frames, "bound": bound}


def _scatter(member: ReportMember) -> Scatter | None:
    frame = member.first.clients()
    if frame is None:
        return None
    norm, cosine = frame["norm"].to_numpy(), frame["cosine"].cast(float).to_numpy()
    scale, rounds = frame["scale"].to_numpy(), frame["round"].to_numpy()
    known = np.isfinite(norm) & (norm > 0) & np.isfinite(cosine)
    if not known.any():
        return None
    norm, cosine, scale, rounds = norm[known], cosine[known], scale[known], rounds[known]
    angle = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    played = np.unique(rounds)
    chosen = played[evenly(len(played), MOST_FRAMES)]
    frames = [_frame(r, norm, angle, scale, rounds == r) for r in chosen]
    return Scatter(member, frames, len(played), float(norm.min()), float(norm.max()))


def _angles(known: Sequence[Scatter]) -> Chart:
    low, high = min(s.low for s in known), max(s.high for s in known)
    log = high > 20 * low
    reach = np.log10([low, high]) if log else np.array([0.0, high])
    pad = 0.05 * max(float(reach[1] - reach[0]), 1e-9)
    layout = {
        "xaxis": {
            "title": "norm of the update",
            "type": "log" if log else "linear",
            **({"dtick": 1 if high > 1000 * low else "D2"} if log else {}),
            "range": [float(reach[0]) - (pad if log else 0), float(reach[1]) + pad],
        },
        "yaxis": {"title": "angle (°)", "range": [-4, 184], "dtick": 45},
    }
    return Chart(
        title="Norms and angles",
        caption=_angles_caption(known),
        traces=[],
        layout=layout,
        alt="Scatter plot of the clients' updates by norm and angle, one frame for each of "
        f"{len(known[0].frames)} rounds. "
        + " ".join(_frame_words(s.frames[-1], s.member.label) for s in known),
        table=_frames_table(known),
        height=420,
        wide=True,
        kind="rounds",
        frames={"members": [s.plain() for s in known]},
    )


def _frame(round: int, norm: Any, angle: Any, scale: Any, here: np.ndarray) -> dict[str, Any]:
    """One round: at most `MOST_DOTS` clients, including the extreme norms and angles."""
    norm, angle, scale = norm[here], angle[here], scale[here]
    ends = [f(v) for v in (norm, angle) for f in (np.argmin, np.argmax)]
    keep = np.unique([*evenly(len(norm), MOST_DOTS - len(ends)), *ends])
    kind = np.where(scale < 1 - 1e-6, 1, np.where(scale > 1 + 1e-6, 2, 0))
    return {
        "round": int(round),
        "of": len(norm),
        "norm": numbers(norm[keep]),
        "angle": [round_(a) for a in angle[keep]],
        "kind": kind[keep].tolist(),  # 0 unchanged, 1 shortened, 2 lengthened
        "median": [float(f"{np.median(norm):.4g}"), round_(np.median(angle))],
        "shortened": float(f"{(kind == 1).mean():.3g}"),
    }


def round_(value: float) -> float:
    """Round to a tenth of a degree."""
    return round(float(value), 1)


def _thresholds(member: ReportMember, rounds: Sequence[int]) -> list[float | None]:
    """The threshold C of each of these rounds."""
    run = member.first
    adaptive = run.series("threshold")
    if adaptive is None:
        return [run.bound] * len(rounds)
    known = dict(zip(run.columns["round"].tolist(), adaptive.tolist(), strict=True))
    return numbers(np.array([known.get(float(r), np.nan) for r in rounds]))


def _angles_caption(known: Sequence[Scatter]) -> str:
    words = [
        "Each dot is a client's update: its norm, and its angle to the last step of the model "
        "(Zhang et al. 2022, Fig. 1–3)."
    ]
    if any(value is not None for s in known for value in s.plain()["bound"]):
        words.append("The dotted line is the bound C: updates to the right of it are shortened.")
    words.append(
        "Below 90° a client moves in the direction of the last step. Around 90° clients disagree."
    )
    if any(s.member.first.private for s in known):
        words.append(
            "That step includes noise: where noise outweighs the signal, all angles are near 90° "
            "even if clients agree."
        )
    if any(len(s.member.runs) > 1 for s in known):
        words.append("Shows the first seed.")
    chosen, played = len(known[0].frames), known[0].played
    if chosen < played:
        words.append(f"The slider selects {chosen} of {played} rounds, evenly spaced.")
    most = max(frame["of"] for s in known for frame in s.frames)
    if most > MOST_DOTS:
        words.append(
            f"Shows at most {MOST_DOTS} of {most:,} clients per round, evenly selected, including "
            "the extreme norms and angles."
        )
    return " ".join(words)


def _frame_words(frame: dict[str, Any], label: str) -> str:
    norm, angle = frame["median"]
    return (
        f"{label} in round {frame['round']}: median norm {few_digits(norm)}, median angle "
        f"{angle:.0f}°, {share(frame['shortened'])} shortened."
    )


def _frames_table(known: Sequence[Scatter]) -> ChartTable:
    rows = [
        [s.member.label, str(f["round"]), str(f["of"]), few_digits(f["median"][0]),
         f"{f['median'][1]:.0f}°", share(f["shortened"])]
        for s in known
        for f in (s.frames[i] for i in evenly(len(s.frames), 12))
    ]  # fmt: skip
    return ChartTable(["run", "round", "clients", "median norm", "median angle", "shortened"], rows)


def confusion(story: Story) -> list[Chart]:
    """Which classes are confused with which, for one member, summed over its seeds."""
    member = best(story)
    found = [run.evaluation for run in member.runs if run.evaluation is not None]
    tables = [np.asarray(f["confusion"]) for f in found if f["confusion"] is not None]
    if not tables:
        return []
    names, counts = found[0]["classes"], np.sum(tables, axis=0)
    of_true = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    shorter = shortened(names)
    order = list(range(len(names)))
    small = len(names) <= 12
    trace = {
        "type": "heatmap", "x": order, "y": order, "z": [numbers(row) for row in of_true],
        "zmin": 0, "zmax": 1, "colorscale": "@scale", "xgap": 1, "ygap": 1,
        "colorbar": {"tickformat": ".0%"},
        "customdata": [[[text(t), text(a), f"{int(counts[i, j]):,}"]
                        for j, a in enumerate(names)] for i, t in enumerate(names)],
        "hovertemplate": "%{customdata[0]} predicted as %{customdata[1]}: %{customdata[2]} "
        "(%{z:.1%})<extra></extra>",
        **({"text": [[_count(v, names) for v in row] for row in counts]} if small else {}),
    }  # fmt: skip
    ticks: dict[str, Any] = {}
    if len(names) <= 70:
        ticks = {"tickmode": "array", "tickvals": order, "ticktext": [text(n) for n in shorter]}
    return [
        Chart(
            title="Confusion matrix" if story.alone else f"Confusion matrix of {member.label}",
            caption="Rows are true classes, columns are predictions. Cells have the number of "
            "examples, and their colour is the share of their row. A good model has its examples "
            "on the diagonal"
            f" ({int(counts.sum()):,} predictions on test examples"
            f"{', all seeds' if len(tables) > 1 else ''}). {_mistakes(of_true, names)}",
            traces=[trace],
            layout={
                "xaxis": {"title": "predicted class", "tickangle": -40, "showgrid": False, **ticks},
                "yaxis": {
                    "title": "true class",
                    "autorange": "reversed",
                    "showgrid": False,
                    **ticks,
                },
            },
            alt="Heat map of true against predicted classes. " + _mistakes(of_true, names),
            table=_confusion_table(of_true, counts, names),
            height=520 if len(names) <= 30 else 640,
            wide=True,
        )
    ]


def _mistakes(of_true: np.ndarray, names: Sequence[str]) -> str:
    wrong = of_true.copy()
    np.fill_diagonal(wrong, 0)
    if not wrong.any():
        return "No class is confused with another."
    t, a = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return (
        f"The most frequent error: {names[int(t)]} predicted as {names[int(a)]}, "
        f"{share(float(wrong[t, a]))} of its examples."
    )


def _count(value: float, names: Sequence[str]) -> str:
    """A count in a cell; of many classes, zeros are left out."""
    return f"{int(value):,}" if value or len(names) <= FEW else ""


def _confusion_table(of_true: np.ndarray, counts: np.ndarray, names: Sequence[str]) -> ChartTable:
    """Each class: its accuracy, and its most frequent wrong prediction."""
    wrong = of_true.copy()
    np.fill_diagonal(wrong, 0)
    rows = []
    for i, name in enumerate(names):
        j = int(wrong[i].argmax())
        taken = f"{names[j]} ({share(float(wrong[i, j]))})" if wrong[i, j] > 0 else "–"
        rows.append([name, f"{int(counts[i].sum()):,}", share(float(of_true[i, i])), taken])
    return ChartTable(["true class", "examples", "accuracy", "most often predicted as"], rows)


def served(story: Story) -> list[Chart]:
    """The distribution of accuracy over clients, and by their number of examples."""
    known = [(m.label, *found) for m in shown(story) if (found := _served(m)) is not None]
    if not known:
        return []
    places = {member.label: place for place, member in enumerate(shown(story))}
    alone = [] if len(known) > 1 else _by_size(*known[0])
    return [_spread(known, places), *alone]


def _served(member: ReportMember) -> tuple[np.ndarray, np.ndarray] | None:
    """Examples and accuracy of clients, averaged over seeds if the clients are the same."""
    found = [r.evaluation["client_accuracy"] for r in member.runs if r.evaluation is not None]
    kept = [f for f in found if f is not None and f["accuracy"]]
    if not kept:
        return None
    same = [f for f in kept if f["examples"] == kept[0]["examples"]]
    accuracy = np.mean([f["accuracy"] for f in same], axis=0)
    return np.asarray(kept[0]["examples"]), accuracy


def in_short(story: Story) -> list[str]:
    """The accuracy of the worst-served clients, in one sentence per member."""
    return [
        ("The" if story.alone else f"{member.label}: the")
        + f" worst tenth of clients has a mean accuracy of {share(worst(found[1]))}, all clients "
        f"{share(float(found[1].mean()))}."
        for member in shown(story)
        if (found := _served(member)) is not None
    ]


def worst(accuracy: np.ndarray) -> float:
    """Mean accuracy of the tenth of clients with the lowest accuracy."""
    count = max(1, round(WORST * len(accuracy)))
    return float(np.sort(accuracy)[:count].mean())


def _spread(known: Sequence[tuple[str, np.ndarray, np.ndarray]], places: dict[str, int]) -> Chart:
    """Share of clients with at most this accuracy."""
    traces = []
    for label, _, accuracy in known:
        i = places[label]
        ordered = np.sort(accuracy)
        at = evenly(len(ordered), 200)
        traces.append({
            "type": "scatter", "mode": "lines", "name": text(label),
            "x": numbers(ordered[at]), "y": numbers((at + 1) / len(ordered)),
            "line": {"color": f"@c{i % 8}", "width": 2, "dash": DASHES[i % 8], "shape": "hv"},
            "hovertemplate": "%{y:.0%} of clients have at most %{x:.1%}",
        })  # fmt: skip
    rows = [
        [label, str(len(a)), share(a.mean()), share(float(np.median(a))), share(worst(a)),
         share(float(a.min()))]
        for label, _, a in known
    ]  # fmt: skip
    words = [
        f"{row[0]}: mean {row[2]}, median {row[3]}, worst tenth {row[4]}, minimum {row[5]}."
        for row in rows
    ]
    return Chart(
        title="Accuracy over clients",
        caption="Share of clients for which the final model (or the client's personal model) has "
        "at most this accuracy on the client's own examples. "
        "The further a line extends to the left, the worse the model is for some clients. "
        "Below the dotted line is the worst tenth.",
        traces=traces,
        layout={
            "xaxis": {"title": "accuracy on a client's own examples", "tickformat": ".0%",
                      "range": [-0.02, 1.02]},
            "yaxis": {"title": "share of clients", "tickformat": ".0%", "range": [0, 1.02]},
            "shapes": [level(WORST)],
        },
        alt="Line chart of the share of clients by accuracy. " + " ".join(words),
        table=ChartTable(["run", "clients", "mean", "median", "worst tenth", "minimum"], rows),
    )  # fmt: skip


def _by_size(label: str, examples: np.ndarray, accuracy: np.ndarray) -> list[Chart]:
    if len(np.unique(examples)) < 3:
        return []
    few = evenly(len(examples), 1000)
    edges = np.unique(np.quantile(examples, [0, 0.25, 0.5, 0.75, 1]))
    groups = np.clip(np.searchsorted(edges, examples, side="right") - 1, 0, len(edges) - 2)
    rows = []
    for g in range(len(edges) - 1):
        here = accuracy[groups == g]
        if len(here):
            span = f"{few_digits(edges[g])} – {few_digits(edges[g + 1])}"
            rows.append([span, str(len(here)), share(here.mean()), share(worst(here))])
    wide = examples.max() > 20 * max(1, examples.min())
    axis = {"type": "log", "dtick": "D2"} if wide else {}
    sampled = "" if len(few) == len(examples) else " Shows 1,000 clients, evenly selected."
    return [
        Chart(
            title="Accuracy by number of examples",
            caption="Each dot is a client. Is accuracy lower for clients with few examples?" +
            sampled, traces=[{
                "type": "scatter", "mode": "markers", "name": text(label), "showlegend": False,
                "x": numbers(examples[few]), "y": numbers(accuracy[few]),
                "marker": {"color": "@c0/0.55", "size": 6},
                "hovertemplate": "%{x} examples: %{y:.1%}<extra></extra>",
            }],
            layout={
                "xaxis": {"title": "examples of the client", **axis},
                "yaxis": {"title": "accuracy", "tickformat": ".0%", "range": [-0.02, 1.04]},
            },
            alt="Scatter plot of clients' accuracy by their number of examples. "
            + " ".join(f"{row[0]} examples: mean {row[2]}." for row in rows),
            table=ChartTable(["examples", "clients", "mean accuracy", "worst tenth"], rows),
        )
    ]  # fmt: skip
