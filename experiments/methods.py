"""Fashion-MNIST over 3,000 clients at (5, 1e-5): FedAdagrad, Clip21-SGD2M, and early stopping.

    python experiments/methods.py > methods.jsonl

The lines printed are one run each. docs/methods.md has the tables, and which settings were tried
with seed 0 before those here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Federated
from fedveil.data.partition import Shards
from fedveil.parts.cohort import Everyone
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare

CLIENTS, SHARDS, EPSILON, DELTA = 3000, 5, 5.0, 1e-5
LOCAL: dict[str, Any] = {"rate": 0.2, "steps": 20, "learning_rate": 0.016}
STOPPING: dict[str, Any] = {"private_evaluation": 1.0, "patience": 3, "evaluate_every": 4}


def adagrad() -> Recipe:
    """FedAdagrad with noise, as under "Adaptive servers"."""
    return algorithms.dp_fedadagrad(20.0, server_rate=0.03, **LOCAL)


def clip21(clip: float, beta: float, rate: float) -> Recipe:
    """Clip21-SGD2M with the clients' full gradients as they are."""
    return algorithms.clip21_sgd2m(clip, 1.0, beta, learning_rate=rate)


def everyone(clip: float, rate: float, momentum: float) -> Recipe:
    """Clipped full gradients of every client in every round, with momentum at the server."""
    options: dict[str, Any] = {"steps": 1, "learning_rate": 1.0, "server_momentum": momentum}
    recipe = algorithms.dp_fedavg(clip, server_rate=rate, **options)
    return replace(recipe, cohort=Everyone())


def averaged(rate: float) -> Recipe:
    """FedAvg with noise and momentum, as under "Adaptive servers"."""
    return algorithms.dp_fedavg(20.0, server_rate=rate, server_momentum=0.8, **LOCAL)


def run(recipe: Recipe, data: Federated, rounds: int, seed: int, **options: Any) -> dict[str, Any]:
    """Train, and score the last model on all test examples."""
    given = {"evaluate_every": rounds, "diagnostics": False, **options}
    training = prepare(
        recipe, data, rounds=rounds, epsilon=EPSILON, delta=DELTA, seed=seed, **given
    )
    while not training.finished:
        training.step()
    accuracy = training.task.evaluate(training.state.model, data.test)[1]
    said = training.guarantee()
    return {"rounds": training.state.round, "epsilon": said.epsilon, "accuracy": float(accuracy)}


def lines(data: Federated) -> Iterator[dict[str, Any]]:
    """All runs of the tables."""
    for seed in range(4):
        yield {"what": "fedadagrad", "seed": seed, **run(adagrad(), data, 60, seed)}
    for seed in range(3):
        for setting in ((0.3, 0.25, 2.0), (0.3, 0.5, 1.0), (0.3, 0.5, 2.0)):
            found = run(clip21(*setting), data, 40, seed)
            yield {"what": "clip21", "setting": setting, "seed": seed, **found}
        for setting in ((0.3, 2.0, 0.8), (1.0, 0.5, 0.0)):
            found = run(everyone(*setting), data, 40, seed)
            yield {"what": "everyone", "setting": setting, "seed": seed, **found}
        for rate in (0.05, 0.15):
            for rounds in (20, 40, 80):
                found = run(averaged(rate), data, rounds, seed)
                yield {"what": "fixed", "rate": rate, "seed": seed, **found}
            found = run(averaged(rate), data, 80, seed, **STOPPING)
            yield {"what": "stopped", "rate": rate, "seed": seed, **found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines(load("fashion-mnist").split(Shards(CLIENTS, SHARDS), 0)):
        print(json.dumps(line), flush=True)
