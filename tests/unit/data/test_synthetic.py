"""A population made up by a formula: its law, and that it is the same however it is asked for."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.columns import digest, span
from fedveil.data.describe import describe
from fedveil.data.federated import Federated
from fedveil.data.partition import ByKey
from fedveil.data.synthetic import Population, synthetic
from fedveil.engines.choose import choose
from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.models import build
from fedveil.recipe import Recipe
from fedveil.training.start import train

SMALL = {"clients": 40, "examples": 7, "features": 30, "classes": 4}


def stored(data: Federated) -> Federated:
    """The same examples, all in memory."""
    return replace(data, inputs=data.inputs[:], labels=data.labels[:])


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# The same on every machine, however it is asked for


def test_the_examples_of_a_seed_never_change() -> None:
    data = synthetic(**SMALL)
    assert sha256(data.inputs[:])[:16] == "28f0685277a4d781"
    assert sha256(data.labels[:])[:16] == "e98da40827c04d86"
    assert sha256(data.test.inputs[:20])[:16] == "0c950ba21dc43d9c"


def test_any_batch_gives_the_bits_of_all_examples_at_once() -> None:
    data = synthetic(clients=700, examples=9)  # more than are computed in one block
    inputs, labels = data.inputs[:], data.labels[:]
    asked = torch.from_numpy(np.random.default_rng(0).integers(len(data.labels), size=(50, 3)))
    assert torch.equal(data.inputs[asked], inputs[asked])
    assert torch.equal(data.labels[asked], labels[asked])
    for position in (0, 17, -1):
        assert torch.equal(data.inputs[position], inputs[position])
        assert torch.equal(data.labels[position], labels[position])
    assert data.inputs.shape == inputs.shape
    assert data.inputs.dtype == inputs.dtype
    assert data.labels.shape == labels.shape
    assert data.labels.dtype == labels.dtype
    client = data.client(3)
    assert torch.equal(client.inputs[:], inputs[27:36])
    assert torch.equal(client.labels[:], labels[27:36])


def test_no_position_outside_is_answered() -> None:
    data = synthetic(**SMALL)
    for column in (data.inputs, data.labels):
        with pytest.raises(IndexError):
            column[torch.tensor([280])]


def test_sums_stay_where_float32_is_exact() -> None:
    population = Population(features=5000)
    scale = float(population._signs[0, 0].abs())
    codes = population._latent(np.arange(2000))
    exact = codes.double() @ population._signs.double()
    assert np.log2(scale).is_integer()
    assert codes.abs().max() <= 640
    assert torch.equal(population.inputs(np.arange(2000)).double(), exact)


def test_a_larger_population_begins_with_the_smaller_one() -> None:
    few, many = synthetic(clients=10), synthetic(clients=1000)
    assert torch.equal(few.inputs[:], many.inputs[: len(few.inputs)])
    assert torch.equal(few.labels[:], many.labels[: len(few.labels)])
    assert torch.equal(few.test.inputs[:50], many.test.inputs[:50])


def test_no_test_example_is_trained_on() -> None:
    data = synthetic(clients=50)
    rows = {tuple(row) for row in data.inputs[:].tolist()}
    assert len(rows) == 1000
    assert rows.isdisjoint(tuple(row) for row in data.test.inputs[:1000].tolist())


@pytest.mark.parametrize("field", [field.name for field in fields(Population)])
def test_other_settings_are_other_data_with_another_fingerprint(field: str) -> None:
    plain = Population(**SMALL)
    other = replace(plain, **{field: getattr(plain, field) + 1})
    one, two = (
        synthetic(**{f.name: getattr(law, f.name) for f in fields(law)}) for law in (plain, other)
    )
    assert one.fingerprint() == synthetic(**SMALL).fingerprint()
    assert one.fingerprint() != two.fingerprint()
    same = {name: np.int64(size) for name, size in SMALL.items()}
    assert one.fingerprint() == synthetic(**same, alpha=0.5).fingerprint()
    if field in ("alpha", "seed"):
        assert not torch.equal(one.inputs[:], two.inputs[:])


def test_nothing_is_stored() -> None:
    data = synthetic(clients=10**6, examples=1000, features=10**5)
    assert not isinstance(data.inputs, torch.Tensor)
    assert data.inputs.shape == (10**9, 10**5)
    assert data.inputs[10**9 - 1].shape == (10**5,)
    assert len(data.fingerprint()) == 64
    assert repr(data) == "<Federated synthetic: 1000000 clients, 1000000000 examples, 10 classes>"


def test_by_example_every_example_is_its_own() -> None:
    data = synthetic(**SMALL).by_example()
    assert (data.clients, data.unit) == (280, "example")
    assert torch.equal(data.client(33).inputs[:], synthetic(**SMALL).inputs[33:34])


# Its law


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pair", [(0, 1), (0, 19), (18, 19), (7, 13)])
def test_two_examples_of_a_client_agree_as_under_a_dirichlet_mix(
    alpha: float, pair: tuple[int, int]
) -> None:
    """P(y_j = y_k) = (α + 1) / (α·classes + 1), the same for all pairs: draws are exchangeable."""
    labels = synthetic(clients=20_000, alpha=alpha).labels[:].reshape(-1, 20)
    agree = int((labels[:, pair[0]] == labels[:, pair[1]]).sum())
    chance = (alpha + 1) / (10 * alpha + 1)
    assert stats.binomtest(agree, 20_000, chance).pvalue > 1e-3
    for wrong in (2 / 3 * alpha, 3 / 2 * alpha):
        assert stats.binomtest(agree, 20_000, (wrong + 1) / (10 * wrong + 1)).pvalue < 1e-3


def test_every_class_is_as_frequent_as_another() -> None:
    first = synthetic(clients=20_000).labels[torch.arange(20_000) * 20 + 11]
    assert stats.chisquare(torch.bincount(first, minlength=10).numpy()).pvalue > 1e-3


def test_inputs_are_like_those_of_their_class_and_their_client() -> None:
    """μ, ν and 3ε have variances 1 : 1 : 9, so a shared one is an eleventh of the whole.

    Sums over all pairs of examples are squares of sums over examples.
    """
    data = synthetic(clients=2000, examples=2, alpha=100.0)
    x, y = data.inputs[:].double(), data.labels[:]
    x -= x.mean(0)
    x /= x.square().sum(1).mean().sqrt()
    products, alike = (x[::2] * x[1::2]).sum(1), y[::2] == y[1::2]  # of the two of each client
    of_classes = torch.zeros(10, x.shape[1], dtype=torch.float64).index_add(0, y, x)
    inside = of_classes.square().sum() - x.square().sum() - 2 * products[alike].sum()
    pairs_inside = torch.bincount(y).square().sum() - len(y) - 2 * alike.sum()
    across = x.sum(0).square().sum() - of_classes.square().sum() - 2 * products[~alike].sum()
    pairs_across = len(y) ** 2 - torch.bincount(y).square().sum() - 2 * (~alike).sum()
    assert products[~alike].mean() == pytest.approx(1 / 11, abs=0.01)
    assert inside / pairs_inside == pytest.approx(1 / 11, abs=0.02)
    assert across / pairs_across == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("features", [3, 64, 784, 3000])
def test_inputs_are_about_as_long_whatever_their_number_of_features(features: int) -> None:
    lengths = synthetic(features=features).inputs[:].norm(dim=1)
    assert 5 < float(lengths.square().mean().sqrt()) < 13


@pytest.mark.parametrize("model", ["softmax", "mlp-32"])
def test_it_can_be_learned(model: str) -> None:
    data = synthetic(clients=300, alpha=0.2)
    result = train(algorithms.fedavg(clients=60, learning_rate=0.1, steps=5), data, model, 25)
    assert result.accuracy > 0.65


# Trained on


RECIPES = [
    algorithms.dp_fedavg(clip=0.5, rate=0.5, steps=3, noise_multiplier=0.1),
    algorithms.fedavg(clients=9, learning_rate=0.1, epochs=2, batch=3),
    algorithms.dp_sgd(clip=0.1, rate=0.3, noise_multiplier=0.5),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("engine", ["factored", "dense", "loop"])
def test_training_on_demand_gives_the_bits_of_training_on_stored_data(
    recipe: Recipe, engine: str
) -> None:
    models = []
    for data in (synthetic(**SMALL), stored(synthetic(**SMALL))):
        data = data.by_example() if recipe.unit == "example" else data
        task = Task(build("mlp-8", data, torch.Generator().manual_seed(0)), data.loss)
        working = choose(engine, task, data).engine
        state = begin(recipe, task.flatten(), data, 2, "key")
        for _ in range(2):
            state, _ = run_round(recipe, state, data, working, "key")
        models.append(state.x)
    assert torch.equal(*models)


def test_described_as_if_stored() -> None:
    data = synthetic(**SMALL)
    assert describe(data) == describe(stored(data))


def test_what_it_says_of_itself_holds() -> None:
    data = synthetic(**SMALL)
    assert span(data.labels) == (0, 3) == span(data.labels[:])
    low, high = span(data.inputs)
    assert low < data.inputs[:].min() < data.inputs[:].max() < high
    assert digest(data.inputs) != digest(data.labels)


def test_the_catalogue_has_a_small_one() -> None:
    data = synthetic()
    split = load("synthetic").split(ByKey())
    assert torch.equal(split.inputs[:], data.inputs[:])
    assert torch.equal(split.labels[:], data.labels[:])
    assert torch.equal(split.offsets, data.offsets)
    assert torch.equal(split.test.inputs[:], data.test.inputs[:])


# Refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clients": 0}, "clients is 0. Give a whole number, 1 or more"),
        ({"clients": 1e6}, "clients is 1000000.0; it must be a whole number"),
        ({"examples": 0}, "examples is 0"),
        ({"features": -1}, "features is -1"),
        ({"classes": 0}, "classes is 0"),
        ({"clients": 2**40, "examples": 2}, "exceed the limit"),
        ({"alpha": 0.0}, "alpha is 0.0. Give a positive number"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": float("inf")}, "alpha is inf"),
    ],
    ids=str,
)
def test_settings_that_make_no_population_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        synthetic(**settings)
