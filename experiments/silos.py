"""Silos on Fashion-MNIST at equal (ε, δ) per record: alone, averaged, MR-MTL, and DP-SGD over all.

    python experiments/silos.py > silos.jsonl

Every silo holds out a third of its records and is scored on them, by its own model where it has
one. Learning rates are chosen on the split of seed 100, which no reported number uses. The lines
printed are one run each. docs/methods.md, "Silos", has the table.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Examples, Federated
from fedveil.data.partition import Dirichlet, Iid
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.run import Training

SILOS, RECORDS = 10, 9000  # of all silos, with those held out
ROUNDS, STEPS, RATE, CLIP, DELTA = 6, 10, 0.1, 1.0, 1e-5
RATES = (0.5, 1.0, 2.0)
PULLS = (0.03, 0.1, 0.3)
SEEDS, TUNING = (0, 1, 2), 100
SETTINGS = (("0.3", 1.0), ("0.3", 4.0), ("iid", 1.0))  # Dirichlet parameter or iid, and ε


@dataclass(frozen=True, eq=False)
class Split:
    """Silos with records of their own to train on, and others to be scored on."""

    train: Federated
    held_out: tuple[Examples, ...]


def split(heterogeneity: str, seed: int) -> Split:
    """A part of Fashion-MNIST, other records for each seed, over ten silos."""
    whole = load("fashion-mnist")
    some = np.random.default_rng(seed).permutation(len(whole.train))[:RECORDS]
    inputs, labels = whole.train.inputs[some], whole.train.labels[some]
    parts = Iid(SILOS) if heterogeneity == "iid" else Dirichlet(SILOS, float(heterogeneity))
    drawn = parts.assign(labels.numpy(), None, np.random.default_rng(seed))
    rng = np.random.default_rng(seed + 1)
    mine, others = [], []
    for start, stop in zip(drawn.offsets[:-1], drawn.offsets[1:], strict=True):
        own = rng.permutation(drawn.order[start:stop])
        held = max(1, len(own) // 3)
        others.append(Examples(inputs[own[:held]], labels[own[:held]]))
        mine.append(own[held:])
    order = torch.from_numpy(np.concatenate(mine))
    offsets = torch.tensor([0, *np.cumsum([len(own) for own in mine])])
    train = Federated("fashion-mnist", inputs[order], labels[order], offsets, whole.test, 10)
    return Split(train, tuple(others))


def made(name: str, eta: float) -> Recipe:
    """The method with a learning rate."""
    inside = {"rate": RATE, "steps": STEPS, "learning_rate": eta}
    if name == "dp_sgd":
        return algorithms.dp_sgd(CLIP, rate=RATE, learning_rate=1.0, server_rate=eta)
    if name == "silo_dp_fedavg":
        return algorithms.silo_dp_fedavg(CLIP, **inside)
    return algorithms.mr_mtl(CLIP, 0.0 if name == "alone" else float(name.split()[1]), **inside)


def run(name: str, eta: float, epsilon: float, parts: Split, seed: int) -> dict[str, Any]:
    """Train, and score every silo on its own held-out records."""
    rounds = ROUNDS * STEPS if name == "dp_sgd" else ROUNDS
    started = time.process_time()
    training = prepare(
        made(name, eta), parts.train, rounds=rounds, epsilon=epsilon, delta=DELTA, seed=seed,
        evaluate_every=rounds, diagnostics=False,
    )  # fmt: skip
    prepared = time.process_time()
    while not training.finished:
        training.step()
    scores = [score(training, silo, held) for silo, held in enumerate(parts.held_out)]
    return {
        "method": name, "eta": eta, "epsilon": training.guarantee().epsilon,
        "accuracy": float(np.mean(scores)), "least": min(scores),
        "cpu": time.process_time() - prepared, "calibration": prepared - started,
    }  # fmt: skip


def score(training: Training, silo: int, held: Examples) -> float:
    """Accuracy of the silo's own model, or of the common one, on its held-out records."""
    return float(training.task.evaluate(training.model_of(silo), held)[1])


def lines() -> Iterator[dict[str, Any]]:
    """Learning rates by the tuning split, then the seeds."""
    names = ["alone", *(f"mr_mtl, {pull}" for pull in PULLS), "silo_dp_fedavg", "dp_sgd"]
    for heterogeneity, epsilon in SETTINGS:
        where = {"split": heterogeneity, "target": epsilon}
        tuning = split(heterogeneity, TUNING)
        for name in names:
            tried = {}
            for eta in RATES:
                found = run(name, eta, epsilon, tuning, TUNING)
                tried[eta] = found["accuracy"]
                yield {**where, "seed": TUNING, **found}
            best = max(tried, key=lambda eta: tried[eta])
            for seed in SEEDS:
                parts = split(heterogeneity, seed)
                yield {**where, "seed": seed, **run(name, best, epsilon, parts, seed)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines():
        assert math.isfinite(line["epsilon"])
        print(json.dumps(line), flush=True)
