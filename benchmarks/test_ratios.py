"""Ratios that hold on any machine, with tolerance for noise: `make guard` checks them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fedveil.data.federated import Examples, Federated
from fedveil.models.catalog import build
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import FixedSize
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Constant
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.run import Training


def population(clients: int, size: int) -> Federated:
    """Noise in the shape of Fashion-MNIST."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.random((clients * size, 1, 28, 28), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, clients * size))
    offsets = torch.arange(clients + 1) * size
    test = Examples(inputs[:10], labels[:10])
    return Federated("noise", inputs, labels, offsets, test, 10)


def run(model: str, data: Federated, engine: str, participants: int, local: SGD) -> Training:
    """Rounds of DP-FedAvg, or of DP-SGD where a client is an example."""
    recipe = Recipe(
        "guard", local, FixedSize(participants), Difference(), bound=Clip(1.0), noise=Gaussian(1.0)
    )
    return prepare(recipe, data, model, 1000, engine=engine, evaluate_every=1000)


def quickest(play: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of the fastest round after a warm-up."""
    play()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        play()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ours(benchmark: Any, training: Training) -> float:
    """Seconds of the fastest round, recorded by pytest-benchmark."""
    benchmark.pedantic(training.step, rounds=5, warmup_rounds=1)
    return float(benchmark.stats.stats.min)


def plain(model: str, data: Federated, examples: int) -> Callable[[], None]:
    """A step of SGD without privacy on this many examples."""
    module = build(model, data, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step() -> None:
        rows = torch.randperm(len(data.labels))[:examples]
        optimizer.zero_grad()
        F.cross_entropy(module(data.inputs[rows]), data.labels[rows]).backward()
        optimizer.step()

    return step


SMALL = SGD(Constant(0.1), steps=20)


def test_factors_beat_stacked_weights_for_small_clients(benchmark: Any) -> None:
    data = population(300, 20)
    stacked = quickest(run("softmax", data, "dense", 300, SMALL).step)
    assert stacked > 2 * ours(benchmark, run("softmax", data, "factored", 300, SMALL))


def test_patches_beat_stacked_convolutions(benchmark: Any) -> None:
    data, local = population(20, 40), SGD(Constant(0.1), epochs=2, batch=20)
    stacked = quickest(run("cnn", data, "dense", 20, local).step)
    assert stacked > 1.3 * ours(benchmark, run("cnn", data, "factored", 20, local))


@pytest.mark.parametrize(("model", "times"), [("mlp", 4.0), ("cnn", 2.0)])
def test_dp_sgd_costs_little_more_than_sgd(benchmark: Any, model: str, times: float) -> None:
    data = population(2000, 1)
    bare = quickest(plain(model, data, 512), rounds=20)
    private = run(model, data, "factored", 512, SGD(Constant(0.1), steps=1))
    assert ours(benchmark, private) < times * bare


def test_time_grows_with_the_clients_and_no_faster(benchmark: Any) -> None:
    data = population(4000, 5)
    few = quickest(run("softmax", data, "factored", 500, SMALL).step)
    assert ours(benchmark, run("softmax", data, "factored", 4000, SMALL)) < 1.3 * 8 * few
