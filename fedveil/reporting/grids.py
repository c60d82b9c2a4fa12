"""Heat maps over two varied parameters, and paths of models with two parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedveil.reporting.chart import (
    DASHES,
    SYMBOLS,
    Chart,
    ChartTable,
    extremes,
    few_digits,
    numbers,
    share,
    shortened,
    text,
)
from fedveil.reporting.curves import shown
from fedveil.reporting.load import ReportMember, Run, Story
from fedveil.training.metrics import titled

LETTERS = {
    "steps": "K", "learning_rate": "η", "beta": "β", "clip": "C", "rounds": "rounds",
    "server_rate": "server rate", "alpha": "α",
}  # fmt: skip
Value = Callable[[ReportMember], float | None]


def heat_maps(story: Story) -> list[Chart]:
    """B/c over K × η, accuracy over β × γ, and accuracy over any other two varied parameters."""
    charts = [_bias(story)]
    pairs = itertools.combinations(_grid(story), 2)
    charts += [_accuracy(story, *_ordered(pair)) for pair in pairs]
    return [chart for chart in charts if chart is not None]


def _ordered(pair: tuple[str, str]) -> tuple[str, str]:
    """Puts a learning rate on the vertical axis."""
    return (pair[1], pair[0]) if pair[0] == "learning_rate" else pair


def _grid(story: Story) -> list[str]:
    """The parameters varied over at least two plain values."""
    return [name for name in story.varied if len(_levels(story, name)) > 1]


def _levels(story: Story, name: str) -> list[Any]:
    found = {m.parameters[name] for m in story.members if _plain(m.parameters.get(name))}
    return sorted(found, key=lambda v: (isinstance(v, str), v))


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _bias(story: Story) -> Chart | None:
    """B/c: DP-LSGD, Fig. 2."""
    if not {"steps", "learning_rate"} <= set(_grid(story)):
        return None
    return _heat(
        story, "steps", "learning_rate", _b_over_c, _two_digits,
        "B/c over K and η",
        "How much of the updates the bound c cuts off: B is the root mean square of the "
        "clipped length, averaged over all rounds and seeds (DP-LSGD, Fig. 2). At 0 nothing is "
        "clipped; a large B/c means a biased step.",
    )  # fmt: skip


def _two_digits(value: float) -> str:
    return few_digits(float(f"{value:.2g}"))


def _accuracy(story: Story, across: str, up: str) -> Chart | None:
    figure = " (Shulgin et al. 2025, Fig. 4)" if {across, up} == {"beta", "learning_rate"} else ""
    gamma = {"learning_rate": "γ"} if figure else {}
    name = titled(story.measure.name)
    return _heat(
        story, across, up, _mean_score, share if story.measure.share else few_digits,
        f"{name[:1].upper()}{name[1:]} over {letter(across, gamma)} and {letter(up, gamma)}",
        f"Final test {name}, mean over seeds{figure}. The best is framed.", gamma,
        framed=True,
    )  # fmt: skip


def letter(name: str, instead: dict[str, str] | None = None) -> str:
    """The symbol of a parameter in formulas, or its name."""
    return {**LETTERS, **(instead or {})}.get(name, name)


def _mean_score(member: ReportMember) -> float | None:
    found = member.results()
    return float(np.mean(found)) if found else None


def _b_over_c(member: ReportMember) -> float | None:
    found = [value for run in member.runs if (value := _run_b_over_c(run)) is not None]
    return float(np.mean(found)) if found else None


def _run_b_over_c(run: Run) -> float | None:
    moment, threshold = run.series("second_moment"), run.series("threshold")
    if moment is None:
        return None
    if threshold is not None:
        return float(np.nanmean(moment / threshold))
    return float(np.nanmean(moment)) / run.bound if run.bound else None


def _heat(
    story: Story,
    across: str,
    up: str,
    value: Value,
    show: Callable[[float], str],
    title: str,
    caption: str,
    letters: dict[str, str] | None = None,
    framed: bool = False,
) -> Chart | None:
    xs, ys = _levels(story, across), _levels(story, up)
    z = np.full((len(ys), len(xs)), np.nan)
    lower = framed and not story.measure.higher_is_better
    best = np.nanmin if lower else np.nanmax
    several = False
    for member in story.members:
        here, there = member.parameters.get(across), member.parameters.get(up)
        found = value(member)
        if here not in xs or there not in ys or found is None:
            continue
        cell = ys.index(there), xs.index(here)
        several |= bool(np.isfinite(z[cell]))
        z[cell] = best([z[cell], found])
    if np.isfinite(z).sum() < 4 or not np.isfinite(z).any(0).all():
        return None
    x_name, y_name = letter(across, letters), letter(up, letters)
    labels = [list(map(text, shortened([*map(str, levels)], 20))) for levels in (xs, ys)]
    trace = {
        "type": "heatmap", "x": labels[0], "y": labels[1], "z": [numbers(row) for row in z],
        "colorscale": "@scale", "xgap": 2, "ygap": 2, "hoverongaps": False,
        **({"text": [[show(v) if np.isfinite(v) else "" for v in row] for row in z]}
           if z.size <= 100 else {}),
        "colorbar": {"tickformat": ".0%"} if show is share else {},
        "hovertemplate": f"{text(x_name)} = %{{x}}, {text(y_name)} = %{{y}}: "
        f"%{{z:{'.1%' if show is share else '.2~g'}}}<extra></extra>",
    }  # fmt: skip
    rows = [[str(y), *(show(v) for v in row)] for y, row in zip(ys, z, strict=True)]
    i, j = np.unravel_index(int(np.nanargmax(z)), z.shape)
    k, m = np.unravel_index(int(np.nanargmin(z)), z.shape)
    others = " If other settings varied too, a cell shows the best of them." if several else ""
    return Chart(
        title=title,
        caption=caption + others,
        traces=[trace],
        layout={
            "xaxis": {"title": _axis(across, x_name), "type": "category", "showgrid": False},
            "yaxis": {"title": _axis(up, y_name), "type": "category", "showgrid": False},
            **(
                {"shapes": [_frame(int(m), int(k)) if lower else _frame(int(j), int(i))]}
                if framed
                else {}
            ),
        },
        alt=f"Heat map, {x_name} horizontal and {y_name} vertical. Maximum "
        f"{show(float(z[i, j]))} at {x_name} = {xs[int(j)]}, {y_name} = {ys[int(i)]}; "
        f"minimum {show(float(z[k, m]))} at {x_name} = {xs[int(m)]}, {y_name} = {ys[int(k)]}.",
        table=ChartTable([f"{y_name} \\ {x_name}", *map(str, xs)], rows),
        height=380,
    )


def _axis(name: str, sign: str) -> str:
    """`K (steps)`."""
    whole = sign if sign == name else f"{sign} ({name.replace('_', ' ')})"
    return text(shortened([whole], 40)[0])


def _frame(x: int, y: int) -> dict[str, Any]:
    """A frame around a cell."""
    return {
        "type": "rect", "x0": x - 0.48, "x1": x + 0.48, "y0": y - 0.48, "y1": y + 0.48,
        "line": {"color": "@c1", "width": 3},
    }  # fmt: skip


def paths(story: Story) -> list[Chart]:
    """The smoothed path of a model in the plane: Das et al. 2022, Fig. 3."""
    members = shown(story)
    known = [(m.label, *found) for m in members if (found := _path(m.first)) is not None]
    if not known:
        return []
    goal = next((at for m in members if (at := optimum(m.first)) is not None), None)
    window = max(1, max(len(a) for _, a, _ in known) // 20)
    traces = [t for i, path in enumerate(known) for t in _path_traces(i, *path, window)]
    words = [
        f"{label}: from ({few_digits(a[0])}, {few_digits(b[0])}) to ({few_digits(a[-1])}, "
        f"{few_digits(b[-1])})."
        for label, a, b in known
    ]
    rows = [
        [label, str(i + 1), few_digits(a[i]), few_digits(b[i])]
        for label, a, b in known
        for i in np.unique(np.linspace(0, len(a) - 1, 8).round().astype(int))
    ]
    smooth = f"a running mean over {window} rounds" if window > 1 else "round by round"
    told = "" if goal is None else " Star: the optimum."
    if goal is not None:
        traces.append(_star(goal))
        words.append(f"The optimum is ({few_digits(goal[0])}, {few_digits(goal[1])}).")
    own = all(m.first.series("position_0") is not None for m in members)
    axes = ("x₁", "x₂") if own else ("along the line to the start", "away from that line")
    what = "a model with two parameters" if own else "the model around the optimum, projected"
    return [
        Chart(
            title="Path of the model",
            caption=f"Path of {what}, {smooth} (Das et al. 2022, Fig. 3). "
            f"Faint line: unsmoothed. Circle: after the first round. Cross: final model.{told}"
            + " Shows the first seed."
            * any(len(m.runs) > 1 for m in members),
            traces=traces,
            layout={
                "xaxis": {"title": axes[0]},
                "yaxis": {"title": axes[1], "scaleanchor": "x", "scaleratio": 1},
            },
            alt="Paths in the plane. " + " ".join(words),
            table=ChartTable(["run", "round", *axes], rows),
            height=460,
            wide=True,
        )
    ]


def _path(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """The model itself in two dimensions, else its projection around a known optimum."""
    a, b = run.series("position_0"), run.series("position_1")
    if a is None or b is None:
        a, b = run.series("along"), run.series("across")
    if a is None or b is None:
        return None
    known = np.isfinite(a) & np.isfinite(b)
    return a[known], b[known]


def optimum(run: Run) -> tuple[float, float] | None:
    """The point whose distance from the path was recorded in every round, if there is one.

    ‖x_k − x*‖² − ‖x_1 − x*‖² is linear in x*.
    """
    path, distance = _path(run), run.series("distance")
    if path is None or distance is None or not len(path[0]) == len(distance) >= 3:
        return None
    places = np.stack(path, axis=1)
    squares = (places**2).sum(1) - distance**2
    slopes = 2 * (places[1:] - places[0])
    found, _, rank, _ = np.linalg.lstsq(slopes, squares[1:] - squares[0], rcond=None)
    away = np.linalg.norm(places - found, axis=1)
    if rank < 2 or not np.allclose(away, distance, rtol=1e-3):
        return None
    return float(found[0]), float(found[1])


def _star(goal: tuple[float, float]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "x": [goal[0]], "y": [goal[1]], "showlegend": False,
        "marker": {"color": "@text", "size": 14, "symbol": "star"},
        "hovertemplate": "optimum: %{x:.4~g}, %{y:.4~g}<extra></extra>",
    }  # fmt: skip


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of up to `window` values up to each position; the ends stay fixed.

    >>> smoothed(np.array([0.0, 2.0, 4.0, 6.0]), 2)
    array([0., 1., 3., 5.])
    """
    sums = np.cumsum(np.concatenate([[0.0], values]))
    at = np.arange(1, len(values) + 1)
    start = np.maximum(0, at - window)
    return np.asarray((sums[at] - sums[start]) / (at - start))


def _path_traces(
    index: int, label: str, a: np.ndarray, b: np.ndarray, window: int
) -> Sequence[dict[str, Any]]:
    keep = extremes([a, b], 400)
    x, y = smoothed(a, window), smoothed(b, window)
    colour = f"@c{index % 8}"
    line = {"color": colour, "width": 2, "dash": DASHES[index % 8]}
    hover = "%{x:.4~g}, %{y:.4~g}"
    return [
        {"type": "scatter", "mode": "lines", "x": numbers(a[keep]), "y": numbers(b[keep]),
         "line": {"color": f"{colour}/0.3", "width": 1}, "hoverinfo": "skip", "showlegend": False},
        {"type": "scatter", "mode": "lines", "x": numbers(x[keep]), "y": numbers(y[keep]),
         "name": text(label), "line": line, "hovertemplate": hover},
        {"type": "scatter", "mode": "markers", "x": numbers(np.array([a[0], x[-1]])),
         "y": numbers(np.array([b[0], y[-1]])), "showlegend": False, "hovertemplate": hover,
         "marker": {"color": colour, "size": 11, "symbol": ["circle-open", SYMBOLS[4]]}},
    ]  # fmt: skip
