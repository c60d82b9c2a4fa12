"""A numeric label column: scaled by a declared range, and predicted in its own unit."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch

from fedveil.algorithms import fedavg
from fedveil.data.frames import as_frame
from fedveil.data.partition import ByKey
from fedveil.data.table import load_table
from fedveil.data.targets import numeric_targets
from fedveil.errors import UserError
from fedveil.runs.opened import open_run
from fedveil.training.settings import read_settings
from fedveil.training.start import train


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    ages = [20 + (7 * i) % 60 for i in range(80)]
    cost = [str(1000 + 10 * age) for age in ages]
    cost[3], cost[4] = "unknown", ""
    who = [f"p{i % 8}" for i in range(80)]
    pl.DataFrame({"who": who, "age": ages, "cost": cost}).write_csv(tmp_path / "costs.csv")
    return tmp_path / "costs.csv"


def test_numbers_are_read_and_other_cells_are_left_out(costs: Path) -> None:
    data = load_table(costs, "who", "cost", target="number", holdout="rows")
    assert data.loss == "half_squared"
    assert data.classes == 1
    assert data.train.labels[:].dtype == torch.float32
    assert len(data.train) + len(data.test) == 78
    assert any("1 rows whose 'cost' is not a number" in note for note in data.notes)
    assert not data.origin.exclusions


def test_a_truth_value_is_a_number_whatever_the_others_are() -> None:
    truth = [i % 3 == 0 for i in range(40)]
    for last in ([True, False], ["x", 3.0]):
        targets = numeric_targets(as_frame({"y": [*truth, *last]})["y"], "y", {})
        assert targets.column[:40].tolist() == [float(value) for value in truth]
        assert targets.known[:40].all()


def test_a_declared_range_scales_and_clips(costs: Path) -> None:
    ranges = {"cost": (1000.0, 1500.0), "age": (0.0, 100.0)}
    data = load_table(costs, "who", "cost", target="number", holdout="rows", ranges=ranges)
    labels = torch.cat([data.train.labels[:], data.test.labels[:]])
    assert 0 < labels.min() < 0.5
    assert labels.max() == 1


def test_predictions_and_metrics_are_in_the_unit_of_the_column(costs: Path, tmp_path: Path) -> None:
    ranges = {"cost": (1000.0, 2000.0), "age": (0.0, 100.0)}
    data = load_table(costs, "who", "cost", target="number", holdout="rows", ranges=ranges).split(
        ByKey()
    )
    recipe = fedavg(learning_rate=0.5, steps=5)
    result = train(recipe, data, "linear", rounds=40, save=tmp_path / "a", metric="rmse")
    assert result.evaluation is not None
    error = result.evaluation["rmse"]
    assert error is not None
    assert 1 < error < 60  # of costs whose deviation is about 170
    found = open_run(tmp_path / "a").predict({"age": [30, 70]})
    assert found[0] == pytest.approx(1300, abs=100)
    assert found[1] == pytest.approx(1700, abs=100)


def test_a_column_without_numbers_and_classes_of_numbers_are_refused(costs: Path) -> None:
    with pytest.raises(UserError, match="No cell of the label column 'who' is a number"):
        load_table(costs, "age", "who", target="number")
    with pytest.raises(UserError, match="Remove classes"):
        load_table(costs, "who", "cost", target="number", holdout="rows", classes=("a", "b"))
    with pytest.raises(UserError, match="Give low < high"):
        load_table(
            costs, "who", "cost", target="number", holdout="rows", ranges={"cost": (2.0, 1.0)}
        )


def test_a_loss_of_numbers_makes_the_label_numeric(costs: Path) -> None:
    flags = {"data": {"path": str(costs), "client": "who", "label": "cost"}}
    assert read_settings(None, {**flags, "loss": "huber(delta=2)"}).data.target == "number"
    assert read_settings(None, {**flags, "loss": "focal"}).data.target is None
    assert read_settings(None, flags).data.target is None
