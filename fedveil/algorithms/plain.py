"""Federated averaging without noise: FedAvg, FedProx, and the bounds alone.  Not private."""

from __future__ import annotations

from typing import Literal

from fedveil.algorithms.shared import clip_at, sgd, some
from fedveil.parts.bound import Clip, Normalize
from fedveil.parts.local import Proximal
from fedveil.parts.report import Model
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import Step
from fedveil.recipe import Recipe


def fedavg(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """x ← x + η_g·mean(y_i − x): local SGD, then the mean difference.

    Zhang et al. 2022, Alg. 1, lines 3–10; Das et al. 2022, Alg. 3. Not private.
    """
    local = sgd(learning_rate, steps, epochs, batch, decay, momentum, weight_decay)
    return Recipe("fedavg", local, some(clients), server=Step(schedule(server_rate)))


def fedprox(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    strength: float = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
) -> Recipe:
    """FedAvg whose local loss is f_i(y) + (strength/2)‖y − x‖².

    Li et al. 2020 (FedProx), Alg. 2, lines 4–6. Not private.
    """
    length = (steps, epochs) if steps or epochs else (10, None)
    local = Proximal(schedule(learning_rate), *length, batch, strength=strength)
    return Recipe("fedprox", local, some(clients), server=Step(schedule(server_rate)))


def model_clipped_fedavg(
    clip: float = 1.0,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
) -> Recipe:
    """x ← mean(clip(y_i, c)): the local models themselves are clipped.

    Zhang et al. 2022, §2.1 (model clipping). Not private; its limit is biased (Claim 2.1).
    """
    local = sgd(learning_rate, steps, epochs, batch)
    return Recipe("model_clipped_fedavg", local, some(clients), Model(), bound=Clip(clip))


def clipped_fedavg(
    clip: float | Literal["probe"] = 1.0,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
) -> Recipe:
    """x ← x + η_g·mean(clip(y_i − x, c)): CE-FedAvg, without noise.

    Zhang et al. 2022, Alg. 2, lines 9–12. Not private.
    """
    local = sgd(learning_rate, steps, epochs, batch)
    return Recipe(
        "clipped_fedavg",
        local,
        some(clients),
        bound=clip_at(clip),
        server=Step(schedule(server_rate)),
    )


def norm_fedavg(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """x ← x − (β_k/r)·Σ (x − y_i)/‖x − y_i‖.

    Das et al. 2021, Remark 3 (NormFedAvg): Alg. 2 without the operator of line 9. Not private.
    """
    local = sgd(learning_rate, steps, epochs, batch, decay, momentum, weight_decay)
    return Recipe(
        "norm_fedavg",
        local,
        some(clients),
        bound=Normalize(1.0),
        server=Step(schedule(server_rate, decay)),
    )
