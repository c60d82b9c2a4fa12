"""Predicted hours: known multiplications, runs and rounds; every item can be predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.reproducing.hours import SIZES, predicted_hours, products_of_example
from fedveil.reproducing.item import Arm, Item, Scale, items

PAPERS = Path(__file__).parents[3] / "papers"


@pytest.mark.parametrize(
    ("model", "products"),
    [
        ("softmax", 784 * 10),
        ("mlp-300-300", 784 * 300 + 300 * 300 + 300 * 10),
        ("cnn", 14 * 14 * 16 * 64 + 5 * 5 * 32 * 256 + 512 * 32 + 32 * 10),
    ],
)
def test_multiplications_of_an_example_are_those_of_its_layers(model: str, products: int) -> None:
    assert products_of_example(model, SIZES["fashion-mnist"]) == products


def test_hours_are_runs_times_rounds_times_multiplications() -> None:
    """Two points on one tuning seed, then three seeds, of 10 rounds, 5 clients, 4 steps of 6."""
    data = {"dataset": "fashion-mnist", "partition": "iid", "clients": 100}
    parameters = {"clients": 5, "steps": 4, "batch": 6}
    settings = {"model": "softmax", "rounds": 10, "data": data, "parameters": parameters}
    arm = Arm(name="a", settings={"algorithm": "fedavg"}, grid={"learning_rate": [0.1, 0.2]})
    item = Item(
        title="t", citation="c", measure="accuracy", settings=settings, arms=(arm,),
        scales={"small": Scale(changes=".")},
    )  # fmt: skip
    expected = (2 + 3) * 10 * 5 * 4 * 6 * 3 * 7840 / 10e9 / 3600
    assert predicted_hours(item, "small") == pytest.approx(expected)


def test_every_item_is_predicted_at_every_scale() -> None:
    found = {(i.name, s): predicted_hours(i, s) for i in items(PAPERS) for s in i.scales}
    assert all(hours > 0 for hours in found.values())
    assert all(found[name, "ci"] < 0.01 for name, scale in found if scale == "ci")
    assert all(hours < 1 for (_, scale), hours in found.items() if scale == "small")
