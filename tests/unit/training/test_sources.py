"""Data as settings name them: held-out examples, overlapping clients, problems of the papers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.data.catalog import load
from fedveil.data.columns import Repeated, span
from fedveil.data.partition import Overlapping
from fedveil.engines.updates import taken
from fedveil.errors import UserError
from fedveil.training.settings import DataSettings, Settings, from_settings
from fedveil.training.sources import load_data, statistics_of
from fedveil.training.start import finish


def test_settings_are_chosen_on_training_examples_held_out() -> None:
    whole = load("digits")
    data = load_data(DataSettings(dataset="digits", clients=10, held_out=0.1))
    assert len(data.test) == round(0.1 * len(whole.train))
    assert len(data.labels) == len(whole.train) - len(data.test)
    known = {row.numpy().tobytes() for row in whole.train.inputs[:]}
    assert all(row.numpy().tobytes() in known for row in data.test.inputs[:])
    other = load_data(DataSettings(dataset="digits", clients=10, held_out=0.1, seed=1))
    assert not torch.equal(data.test.labels[:], other.test.labels[:])
    with pytest.raises(UserError, match="between 0 and 1"):
        load_data(DataSettings(dataset="digits", clients=10, held_out=1.0))


def test_overlapping_clients_have_the_same_classes_and_share_examples() -> None:
    data = load_data(
        DataSettings(dataset="digits", clients=60, partition="overlapping", examples=40)
    )
    assert data.sizes.tolist() == [40] * 60
    assert 60 * 40 > 1437  # more than there are, so that some repeat
    for client in (0, 59):
        mine = data.client(client)
        assert torch.bincount(mine.labels[:]).tolist() == [4] * 10
        assert len(np.unique(mine.inputs[:].flatten(1).numpy(), axis=0)) >= 38
    assert "copies of one example" in data.origin.caveat
    with pytest.raises(UserError, match="cannot be protected one by one"):
        data.by_example()


def test_examples_that_clients_share_are_held_once() -> None:
    """1,920 clients of 500 CIFAR-10 images would need 12 GB as copies."""
    whole, split = load("digits"), Overlapping(60, 40)
    data = whole.split(split, seed=3)
    assert isinstance(data.inputs, Repeated)
    assert data.inputs.of.data_ptr() == whole.train.inputs[:].data_ptr()
    order = split.assign(whole.train.labels[:].numpy(), None, np.random.default_rng(3)).order
    copied = replace(data, inputs=whole.train.inputs[torch.from_numpy(order)])
    assert data.inputs.shape == copied.inputs.shape
    for some in (7, slice(-3, None), torch.tensor([[0, 5], [2399, 5]])):
        assert torch.equal(data.inputs[some], copied.inputs[some])
    assert data.fingerprint() != whole.split(split, seed=4).fingerprint()
    assert span(data.inputs) == span(copied.inputs)
    rows = torch.arange(24).view(4, 6)  # a batch of each of four clients
    assert torch.equal(taken(data.inputs, rows), taken(copied.inputs, rows))


@pytest.mark.parametrize("data", [{"dataset": "digits"}, {"path": "digits.zip"}, {}])
def test_a_budget_for_statistics_is_refused_where_there_is_no_table(data: dict[str, str]) -> None:
    """It would be spent on nothing, although the user gave it to something."""
    settings = Settings(stats_epsilon=0.5, epsilon=2.0, data=DataSettings.model_validate(data))
    with pytest.raises(UserError, match=r"is not a table\. Remove stats_epsilon"):
        from_settings(settings)
    assert statistics_of(settings.model_copy(update={"stats_epsilon": 0.0})) is not None


@pytest.mark.parametrize("name", ["zhang2022-table4", "zhang2022-claim21", "das2022-quadratics"])
def test_a_problem_of_the_papers_starts_where_it_says(name: str) -> None:
    settings = Settings(
        algorithm="fedavg", data=DataSettings(dataset=name, seed=3), rounds=1, parameters={
            "learning_rate": 0.0, "steps": 1,
        },
    )  # fmt: skip
    training = from_settings(settings)
    assert training.data.optimum is not None
    assert training.data.optimum.start is not None
    finish(training)
    assert torch.equal(training.state.x, training.data.optimum.start)


def test_near_is_a_fifth_of_far() -> None:
    far, near = (
        load_data(DataSettings(dataset="das2022-quadratics", seed=1, start=start)).optimum
        for start in ("far", "near")
    )
    assert far is not None
    assert near is not None
    assert far.start is not None
    assert near.start is not None
    ratio = (far.start - far.x).norm() / (near.start - near.x).norm()
    assert ratio == pytest.approx(5, rel=1e-4)
    with pytest.raises(UserError, match="das2022-quadratics"):
        load_data(DataSettings(dataset="digits", start="near"))
