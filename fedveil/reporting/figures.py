"""The report's charts as Plotly figures, for notebooks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.federated import Federated
from fedveil.errors import UserError, unknown
from fedveil.parts.checks import count
from fedveil.privacy.calibrate import Budget, calibrated, sensible_delta
from fedveil.privacy.guarantee import guarantee
from fedveil.privacy.statement import Statement, statement
from fedveil.recipe import Recipe
from fedveil.reporting import curves, grids, people, split
from fedveil.reporting.chart import Chart
from fedveil.reporting.load import ReportMember, Run, Story, load_story, measure_of
from fedveil.serialization.arguments import for_python
from fedveil.serialization.codec import to_plain
from fedveil.training.evaluation import evenly
from fedveil.training.result import Result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


MOST_EPSILONS = 25  # rounds whose ε is computed for a statement
Plotted = Result | Statement | Recipe | Federated | str | Path


@for_python
def plot(
    what: Plotted,
    chart: str | None = None,
    clients: int | None = None,
    dim: int | None = None,
    rounds: int = 100,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Figure:
    """A chart of `what` as a Plotly figure, by its title; `charts` lists all titles.

    Without a title, a run shows the metric that ranks runs over the rounds. Like a report, charts
    are private data.

    Args:
        what: A result, a statement, a recipe, data, or the directory of a run or a comparison.
        chart: Title of the chart. [default: the first one]
        clients: Number of clients, for a recipe.
        dim: Number of parameters of the model, for a recipe.
        rounds: Number of rounds, for a recipe.
        epsilon: ε that a recipe's noise is calibrated to. [default: its own noise]
        delta: δ of a recipe's guarantee. [default: 1e-5, or 0.1/n if smaller]

    >>> plot("runs/a", "Loss").show()  # doctest: +SKIP
    """
    if isinstance(what, Recipe):
        what = _stated(what, clients, dim, rounds, epsilon, delta)
    found = {one.title: one for one in _charts(what)}
    if not found:
        raise UserError(f"There is nothing to plot: {_missing(what)}.")
    if chart is not None and chart not in found:
        raise unknown("chart", chart, found)
    return figure(found[chart] if chart is not None else next(iter(found.values())))


@for_python
def charts(what: Result | Statement | Federated | str | Path) -> list[str]:
    """The titles of the charts that `plot` can draw of `what`.

    >>> charts("runs/a")  # doctest: +SKIP
    ['Accuracy', 'Loss', 'ε over the rounds']
    """
    return [chart.title for chart in _charts(what)]


def _charts(what: Result | Statement | Federated | str | Path) -> list[Chart]:
    if isinstance(what, Federated):
        return split.charts_of(what)
    if isinstance(what, Statement):
        return curves.spending(_promised(what))
    return list(_all(story_of(what)))


def _missing(what: object) -> str:
    if isinstance(what, Statement):
        return "the statement has no finite ε, or a single round"
    return (
        "there is one client" if isinstance(what, Federated) else "the run was not evaluated twice"
    )


def _stated(
    recipe: Recipe,
    clients: int | None,
    dim: int | None,
    rounds: int,
    epsilon: float | None,
    delta: float | None,
) -> Statement:
    """The statement of a run of a recipe."""
    if clients is None or dim is None:
        raise UserError(
            "The ε of a recipe depends on the run. Give clients and dim, the number of the "
            "model's parameters."
        )
    for name, value in (("clients", clients), ("dim", dim), ("rounds", rounds)):
        count("plot", name, value)
    delta = sensible_delta(clients) if delta is None else delta
    budget = None if epsilon is None else Budget(epsilon, delta)
    made = calibrated(recipe, budget, rounds, dim, clients)
    return statement(made, dim, clients, rounds, delta, None)


def _promised(made: Statement) -> Story:
    """A statement as the rounds of a run: ε, had the run been planned to end there."""
    said = made.main
    ends = evenly(said.rounds, MOST_EPSILONS) + 1
    size = (made.recipe, made.dim, said.population)
    spent = [guarantee(*size, int(k), said.delta, said.view).epsilon for k in ends]
    columns = {"round": ends.astype(float), "epsilon": np.array(spent)}
    name, settings = made.recipe.name, {"recipe": to_plain(made.recipe)}
    run = Run(Path(name), "", settings, {"privacy": made.plain()}, columns, None)
    return Story((ReportMember(name, {}, (run,)),))


def story_of(what: Result | str | Path) -> Story:
    """A saved run or comparison, or a result that was not saved."""
    if isinstance(what, Result):
        return load_story([what.path]) if what.path is not None else _unsaved(what)
    return load_story([Path(what)])


def _unsaved(result: Result) -> Story:
    rows = [asdict(record) for record in result.records]
    columns = {
        name: np.array([np.nan if row[name] is None else float(row[name]) for row in rows])
        for name in (rows[0] if rows else {})
    }
    settings = {"recipe": to_plain(result.recipe)}
    run = Run(Path(result.recipe.name), "", settings, result.summary(), columns, None)
    return Story((ReportMember(result.recipe.name, {}, (run,), measure=measure_of([run])),))


def _all(story: Story) -> Iterator[Chart]:
    """Every chart of the report except the one with a slider."""
    yield from curves.learning(story)
    yield from grids.heat_maps(story)
    yield from curves.spending(story)
    yield from curves.sending(story)
    yield from curves.signal(story)
    yield from curves.bounding(story)
    yield from people.served(story)
    yield from people.confusion(story)


def figure(chart: Chart) -> Figure:
    """A chart as a Plotly figure in the report's light colours."""
    from plotly.graph_objects import Figure

    colours = _colours()
    traces = [_themed(trace, colours) for trace in chart.traces]
    layout = {
        **_themed(chart.layout, colours), "title": {"text": chart.title}, "height": chart.height,
        "template": "plotly_white",
    }  # fmt: skip
    return Figure(data=traces, layout=layout)


def _colours() -> dict[str, str]:
    """The colours of the light theme, from the page's style sheet."""
    style = resources.files("fedveil.reporting").joinpath("page.css").read_text(encoding="utf-8")
    light = style.partition("@media")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))


def _themed(value: Any, colours: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _themed(one, colours) for key, one in value.items()}
    if isinstance(value, list):
        return [_themed(one, colours) for one in value]
    return _colour(value, colours) if isinstance(value, str) and value.startswith("@") else value


def _colour(named: str, colours: dict[str, str]) -> Any:
    """`@c0/0.2` is the colour c0 at an opacity of 0.2, and `@scale` the scale of heat maps."""
    name, _, opacity = named[1:].partition("/")
    if name == "scale":
        return [[i / 4, colours[f"scale-{i}"]] for i in range(5)]
    if name not in colours:
        return named
    if not opacity:
        return colours[name]
    parts = (str(int(colours[name][i : i + 2], 16)) for i in (1, 3, 5))
    return f"rgba({','.join(parts)},{opacity})"
