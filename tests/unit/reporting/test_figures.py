"""Results in a notebook: short texts, tables, frames, and the report's charts as figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedveil import Dirichlet, algorithms, load, synthetic
from fedveil.errors import UserError
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.reporting.figures import charts, figure, plot
from fedveil.reporting.load import load_story
from fedveil.reporting.people import confusion
from fedveil.training.start import train
from tests.unit.reporting.made import write_run
from tests.unit.training.test_metrics import rare


def test_a_result_that_was_not_saved_is_shown_and_plotted() -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0, rate=0.5)
    result = train(recipe, rare(), rounds=3, metric="auc")
    assert repr(result).startswith("<Result of dp_fedavg on rare: accuracy 0.9")
    assert len(repr(result.statement)) < 100
    shown = result._repr_html_()
    assert "<th>AUC</th>" in shown
    assert "Privacy statement" in shown
    assert result.to_frame()["round"].to_list() == [1, 2, 3]
    assert result.statement.to_frame()["view"].to_list() == ["models", "sum", "messages"]
    assert recipe.to_frame().height == 10
    assert "Poisson(rate=0.5" in recipe._repr_html_()
    assert charts(result)[:2] == ["AUC", "Accuracy"]
    drawn = result.plot("Accuracy")
    assert list(drawn.data[0].y) == pytest.approx([r.accuracy for r in result.records], rel=1e-4)
    with pytest.raises(UserError, match="Did you mean 'Accuracy'"):
        result.plot("accuracy")
    with pytest.raises(UserError, match="what is 3; it must be a Result"):
        plot(3)  # type: ignore[arg-type]


def test_every_chart_of_a_saved_run_is_a_valid_figure(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    for title in charts(path):
        found = plot(path, title)
        assert found.layout.title.text == title
    [chart] = confusion(load_story([path]))
    assert figure(chart).data[0].colorscale[0][1].startswith("#")


def test_data_show_public_facts_only() -> None:
    data = rare()
    shown = data._repr_html_()
    assert "<th>clients</th><td>30</td>" in shown
    assert str(len(data.labels)) not in shown.replace("<th>test examples</th><td>600</td>", "")
    assert data.to_frame()["examples"].sum() == 600


def test_a_recipe_is_told_in_a_line() -> None:
    assert repr(algorithms.dp_fedavg(clip=2.0)) == (
        "<Recipe dp_fedavg: Poisson(rate=0.1), Clip(norm=2.0), Gaussian(), view models>"
    )
    long = algorithms.dp_fedavg(clip=2.0, rate=0.12345678901234567, cap=123456789012345)
    assert "dp_fedavg: Poisson(…), Clip" in repr(long)


def test_a_statement_and_a_recipe_show_epsilon_over_the_rounds() -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    made = statement(recipe, 10, 1000, 4, 1e-5)
    drawn = made.plot()
    assert drawn.layout.title.text == "ε over the rounds"
    assert drawn.data[0].x[-1] == 4
    assert drawn.data[0].y[-1] == pytest.approx(made.main.epsilon, rel=1e-4)
    assert recipe.plot(clients=1000, dim=10, rounds=4, delta=1e-5).data[0].y == drawn.data[0].y
    asked = algorithms.dp_fedavg().plot(clients=1000, dim=10, rounds=2, epsilon=2.0)
    assert asked.data[0].y[-1] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "run", "told"),
    [
        (algorithms.dp_fedavg(), {}, "Give clients and dim"),
        (
            algorithms.dp_fedavg(),
            {"clients": 9, "dim": 9},
            "dp_fedavg has no privacy budget. Pass ",
        ),
        (algorithms.dp_fedavg(), {"clients": 0, "dim": 9}, "clients is 0; it must be a whole"),
        (algorithms.fedavg(), {"clients": 9, "dim": 9}, "no finite ε"),
    ],
)
def test_a_recipe_without_an_epsilon_is_told(
    recipe: Recipe, run: dict[str, int], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        plot(recipe, **run)  # type: ignore[arg-type]


def test_data_are_plotted_by_size_and_class() -> None:
    data = load("digits").split(Dirichlet(20, 0.3))
    assert charts(data) == ["Examples per client", "Classes of clients"]
    sizes, classes = data.plot(), data.plot("Classes of clients")
    assert sorted(sizes.data[0].y) == sorted(data.sizes.tolist())
    shares = np.array(classes.data[0].z)
    assert shares.shape == (10, 20)
    assert np.allclose(shares.sum(0), 1, atol=1e-3)
    with pytest.raises(UserError, match="there is one client"):
        synthetic(clients=1, examples=3, features=2, classes=1).plot()
