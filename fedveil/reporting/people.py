"""Clients one by one: norms and angles, who is taken for what, and who is served badly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.evaluation import evenly
from fedveil.reporting.chart import (
    DASHES,
    Chart,
    Table,
    few_digits,
    numbers,
    share,
    shortened,
    text,
)
from fedveil.reporting.curves import level, shown
from fedveil.reporting.load import Member, Story
from fedveil.reporting.words import best

MOST_FRAMES = 40  # rounds that the slider can show
MOST_DOTS = 200  # clients of a round
WORST = 0.1  # the share of clients that is looked at as badly served


def angles(story: Story) -> list[Chart]:
    """Norm and angle of each client's update, round by round: Zhang et al. 2022, Fig. 1–3."""
    known = [found for member in shown(story) if (found := _scatter(member)) is not None]
    return [_angles(known)] if known else []


@dataclass(frozen=True)
class Scatter:
    """A member's frames, and between which norms they lie."""

    member: Member
    frames: list[dict[str, Any]]
    played: int
    low: float
    high: float

    def plain(self) -> dict[str, Any]:
        """For the page's script."""
        bound = _thresholds(self.member, [frame["round"] for frame in self.frames])
        return {"label": text(self.member.label), "rounds": self.frames, "bound": bound}


def _scatter(member: Member) -> Scatter | None:
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
        alt="Scatter of the clients' updates by norm and angle, one picture for each of "
        f"{len(known[0].frames)} rounds. "
        + " ".join(_frame_words(s.frames[-1], s.member.label) for s in known),
        table=_frames_table(known),
        height=420,
        wide=True,
        kind="rounds",
        frames={"members": [s.plain() for s in known]},
    )


def _frame(round: int, norm: Any, angle: Any, scale: Any, here: np.ndarray) -> dict[str, Any]:
    """One round: at most so many clients, the shortest, the longest and the extreme angles in."""
    norm, angle, scale = norm[here], angle[here], scale[here]
    ends = [f(v) for v in (norm, angle) for f in (np.argmin, np.argmax)]
    keep = np.unique([*evenly(len(norm), MOST_DOTS - len(ends)), *ends])
    kind = np.where(scale < 1 - 1e-6, 1, np.where(scale > 1 + 1e-6, 2, 0))
    return {
        "round": int(round),
        "of": len(norm),
        "norm": numbers(norm[keep]),
        "angle": [round_(a) for a in angle[keep]],
        "kind": kind[keep].tolist(),  # 0 as it was, 1 shortened, 2 lengthened
        "median": [float(f"{np.median(norm):.4g}"), round_(np.median(angle))],
        "shortened": float(f"{(kind == 1).mean():.3g}"),
    }


def round_(value: float) -> float:
    """A tenth of a degree is enough."""
    return round(float(value), 1)


def _thresholds(member: Member, rounds: Sequence[int]) -> list[float | None]:
    """C of each of these rounds."""
    run = member.first
    adaptive = run.series("threshold")
    if adaptive is None:
        return [run.bound] * len(rounds)
    known = dict(zip(run.columns["round"].tolist(), adaptive.tolist(), strict=True))
    return numbers(np.array([known.get(float(r), np.nan) for r in rounds]))


def _angles_caption(known: Sequence[Scatter]) -> str:
    words = [
        "Every dot is a client's update: how long it is, and its angle to the last step of the "
        "model (Zhang et al. 2022, Fig. 1–3)."
    ]
    if any(value is not None for s in known for value in s.plain()["bound"]):
        words.append("The dotted line is the bound C: updates right of it are shortened.")
    words.append(
        "Below 90° a client pulls where the model went last; around 90° clients do not agree."
    )
    if any(s.member.first.private for s in known):
        words.append(
            "That step has the noise in it: where noise outweighs the signal, all angles are near "
            "90°, however much clients agree."
        )
    if any(len(s.member.runs) > 1 for s in known):
        words.append("The first seed is shown.")
    chosen, played = len(known[0].frames), known[0].played
    if chosen < played:
        words.append(f"{chosen} of {played} rounds can be chosen, evenly spaced.")
    most = max(frame["of"] for s in known for frame in s.frames)
    if most > MOST_DOTS:
        words.append(
            f"At most {MOST_DOTS} of {most:,} clients of a round are drawn, evenly chosen, the "
            "extreme norms and angles among them."
        )
    return " ".join(words)


def _frame_words(frame: dict[str, Any], label: str) -> str:
    norm, angle = frame["median"]
    return (
        f"{label} in round {frame['round']}: median norm {few_digits(norm)}, median angle "
        f"{angle:.0f}°, {share(frame['shortened'])} shortened."
    )


def _frames_table(known: Sequence[Scatter]) -> Table:
    rows = [
        [s.member.label, str(f["round"]), str(f["of"]), few_digits(f["median"][0]),
         f"{f['median'][1]:.0f}°", share(f["shortened"])]
        for s in known
        for f in (s.frames[i] for i in evenly(len(s.frames), 12))
    ]  # fmt: skip
    return Table(["run", "round", "clients", "median norm", "median angle", "shortened"], rows)


def confusion(story: Story) -> list[Chart]:
    """Which classes are taken for which, of one member, summed over its seeds."""
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
        "customdata": [[[text(t), text(a)] for a in names] for t in names],
        "hovertemplate": "%{customdata[0]} taken for %{customdata[1]}: %{z:.1%}<extra></extra>",
        **({"text": [[f"{v:.0%}" if v > 0.005 else "" for v in row] for row in of_true]}
           if small else {}),
    }  # fmt: skip
    ticks: dict[str, Any] = {}
    if len(names) <= 70:
        ticks = {"tickmode": "array", "tickvals": order, "ticktext": [text(n) for n in shorter]}
    return [
        Chart(
            title="What is taken for what" if story.alone else f"Confusion of {member.label}",
            caption="Rows are true classes, columns the model's answers; a row adds up to 100%, "
            "and a good model has its shares on the diagonal"
            f" ({int(counts.sum()):,} answers on test examples"
            f"{', all seeds together' if len(tables) > 1 else ''}). {_mistakes(of_true, names)}",
            traces=[trace],
            layout={
                "xaxis": {"title": "answered", "tickangle": -40, "showgrid": False, **ticks},
                "yaxis": {"title": "true", "autorange": "reversed", "showgrid": False, **ticks},
            },
            alt="Heat map of true against answered classes. " + _mistakes(of_true, names),
            table=_confusion_table(of_true, counts, names),
            height=520 if len(names) <= 30 else 640,
            wide=True,
        )
    ]


def _mistakes(of_true: np.ndarray, names: Sequence[str]) -> str:
    wrong = of_true.copy()
    np.fill_diagonal(wrong, 0)
    if not wrong.any():
        return "No class is taken for another."
    t, a = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return (
        f"The most frequent mistake: {names[int(t)]} taken for {names[int(a)]}, "
        f"{share(float(wrong[t, a]))} of its examples."
    )


def _confusion_table(of_true: np.ndarray, counts: np.ndarray, names: Sequence[str]) -> Table:
    """Each class: how often it is right, and what it is taken for most when it is not."""
    wrong = of_true.copy()
    np.fill_diagonal(wrong, 0)
    rows = []
    for i, name in enumerate(names):
        j = int(wrong[i].argmax())
        taken = f"{names[j]} ({share(float(wrong[i, j]))})" if wrong[i, j] > 0 else "–"
        rows.append([name, f"{int(counts[i].sum()):,}", share(float(of_true[i, i])), taken])
    return Table(["true class", "examples", "right", "most often taken for"], rows)


def served(story: Story) -> list[Chart]:
    """How accuracy spreads over clients, and whether the small ones are served worse."""
    known = [(m.label, *found) for m in shown(story) if (found := _served(m)) is not None]
    if not known:
        return []
    places = {member.label: place for place, member in enumerate(shown(story))}
    alone = [] if len(known) > 1 else _by_size(*known[0])
    return [_spread(known, places), *alone]


def _served(member: Member) -> tuple[np.ndarray, np.ndarray] | None:
    """Examples and accuracy of clients, the mean of all seeds where they are the same clients."""
    found = [r.evaluation["client_accuracy"] for r in member.runs if r.evaluation is not None]
    kept = [f for f in found if f is not None and f["accuracy"]]
    if not kept:
        return None
    same = [f for f in kept if f["examples"] == kept[0]["examples"]]
    accuracy = np.mean([f["accuracy"] for f in same], axis=0)
    return np.asarray(kept[0]["examples"]), accuracy


def in_short(story: Story) -> list[str]:
    """How those who are served worst fare, in a sentence for each member."""
    return [
        ("The" if story.alone else f"{member.label}: the")
        + f" worst served tenth of clients has a mean accuracy of {share(worst(found[1]))}, all "
        f"clients {share(float(found[1].mean()))}."
        for member in shown(story)
        if (found := _served(member)) is not None
    ]


def worst(accuracy: np.ndarray) -> float:
    """Mean accuracy of the tenth of clients that is served worst."""
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
        f"{row[0]}: mean {row[2]}, median {row[3]}, worst tenth {row[4]}, least {row[5]}."
        for row in rows
    ]
    return Chart(
        title="Accuracy over clients",
        caption="Share of clients whose own examples the final model answers with at most this "
        "accuracy. The further a line reaches to the left, the worse some clients are served; "
        "below the dotted line is the worst served tenth.",
        traces=traces,
        layout={
            "xaxis": {"title": "accuracy on a client's own examples", "tickformat": ".0%",
                      "range": [-0.02, 1.02]},
            "yaxis": {"title": "share of clients", "tickformat": ".0%", "range": [0, 1.02]},
            "shapes": [level(WORST)],
        },
        alt="Lines of the share of clients by accuracy. " + " ".join(words),
        table=Table(["run", "clients", "mean", "median", "worst tenth", "least"], rows),
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
    sampled = "" if len(few) == len(examples) else " 1,000 clients are drawn, evenly chosen."
    return [
        Chart(
            title="Accuracy by a client's size",
            caption="Every dot is a client. Are those with few examples served worse?" + sampled,
            traces=[{
                "type": "scatter", "mode": "markers", "name": text(label), "showlegend": False,
                "x": numbers(examples[few]), "y": numbers(accuracy[few]),
                "marker": {"color": "@c0/0.55", "size": 6},
                "hovertemplate": "%{x} examples: %{y:.1%}<extra></extra>",
            }],
            layout={
                "xaxis": {"title": "examples of the client", **axis},
                "yaxis": {"title": "accuracy", "tickformat": ".0%", "range": [-0.02, 1.04]},
            },
            alt="Scatter of clients' accuracy by their number of examples. "
            + " ".join(f"{row[0]} examples: mean {row[2]}." for row in rows),
            table=Table(["examples", "clients", "mean accuracy", "worst tenth"], rows),
        )
    ]  # fmt: skip
