"""Short runs of many kinds, by one process or by those that torchrun started.

    torchrun --nproc-per-node 2 -m tests.system.played FOLDER

leaves what each run came to as FOLDER/NAME.npz.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Federated
from fedveil.data.partition import Iid
from fedveil.engines.processes import ALONE, Team, joined
from fedveil.engines.ranks import end_at_once
from fedveil.parts.server import RandomIterate
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import follow

ROUNDS = 3
Played = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A recipe, and on what it is played."""

    recipe: Callable[[], Recipe]
    model: str = "softmax"
    broken: tuple[int, ...] = ()  # clients whose examples are not finite
    noise: Literal["seeded", "secure"] = "seeded"


NOISY = {"noise_multiplier": 1.0}
CASES = {
    "gaussian": Case(
        lambda: algorithms.dp_fedavg(
            rate=0.5, batch=8, steps=3, server_momentum=0.5, **NOISY
        )
    ),
    "not private": Case(lambda: algorithms.fedavg(learning_rate=0.5, steps=2), "mlp-8"),
    "rounded": Case(lambda: algorithms.dp_norm_fedavg(rate=0.5, levels=64, **NOISY)),
    "residues": Case(lambda: algorithms.dp_norm_fedavg_secagg(clients=7, sigma=20.0, support=90)),
    "packed": Case(lambda: algorithms.dp_norm_fedavg_binomial(clients=7, trials=40)),
    "too few come": Case(
        lambda: algorithms.dp_norm_fedavg_discrete(rate=0.5, honest=10, sigma=20.0, support=90)
    ),
    "memory": Case(lambda: algorithms.fed_alpha_normec(rate=0.5, alpha=0.1, beta=0.5, **NOISY)),
    "memory of all": Case(
        lambda: algorithms.fed_alpha_normec(rate=0.3, update="everyone", **NOISY)
    ),
    "adaptive, capped": Case(
        lambda: algorithms.dp_fedavg_adaptive(start=0.05, rate=0.6, cap=2, **NOISY)
    ),
    "probed": Case(lambda: algorithms.dp_fedavg(clip="probe", rate=0.5, **NOISY)),
    "by example": Case(
        lambda: replace(algorithms.dp_sgd(rate=0.05, **NOISY), output=RandomIterate()), "mlp-8"
    ),
    "one client": Case(lambda: algorithms.dp_fedavg(clients=1, **NOISY)),
    "rejected": Case(lambda: algorithms.dp_fedavg(rate=0.7, **NOISY), broken=(1, 8, 19)),
    "secure": Case(lambda: algorithms.dp_fedavg(rate=0.5, **NOISY), noise="secure"),
}  # fmt: skip


def data(case: Case) -> Federated:
    """scikit-learn's digits over 20 clients."""
    digits = load("digits").split(Iid(20))
    inputs = digits.inputs.clone()
    for client in case.broken:
        inputs[digits.offsets[client] : digits.offsets[client + 1]] = torch.inf
    return replace(digits, inputs=inputs)


def ready(case: Case, team: Team = ALONE) -> Training:
    """At round 0, not to be evaluated before its end."""
    return prepare(
        case.recipe(), data(case), case.model, ROUNDS + 1, evaluate_every=99, noise=case.noise,
        team=team,
    )  # fmt: skip


def play(training: Training) -> Played:
    """What the first process, or the only one, knows after the rounds."""
    for _ in range(ROUNDS):
        training.step()
    team, state = training.team, training.state
    team.lead("gather", state.x)
    team.gather(state.memory)
    team.lead("end", state.x)
    named = {
        "x": state.x,
        "model": state.model,
        "threshold": state.parts["bound"].get("threshold"),
        "taken": state.parts["cohort"].get("taken"),
    }
    named |= {"memory": state.memory and state.memory[np.arange(training.data.clients)]}
    numbers = [
        (
            r.participants,
            r.rejected,
            r.norm,
            r.clipped_fraction,
            r.signal,
            r.noise,
            r.sent,
            r.aborted,
        )
        for r in training.records
    ]
    played = {name: np.asarray(leaf) for name, leaf in named.items() if leaf is not None}
    return {**played, "records": np.array(numbers, dtype=np.float64)}


def main() -> None:
    """Play all cases, one after the other."""
    with joined() as team:
        for name, case in CASES.items():
            training = ready(case, team)
            if team.first:
                np.savez(Path(sys.argv[1]) / f"{name}.npz", **play(training))
            else:
                follow(training)
    end_at_once(SystemExit(0))


if __name__ == "__main__":
    main()
