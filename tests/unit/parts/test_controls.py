"""Control variates and double momentum, against the published algorithms written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.data.problems import heterogeneous_quadratic
from fedveil.engines.dense import DenseEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.ledger.session import Session
from fedveil.loop import State, begin, cohort_of, run_round
from fedveil.parts.cohort import FixedSize
from fedveil.parts.controls import ControlVariates, DoubleMomentum
from fedveil.parts.report import Difference
from fedveil.recipe import Recipe
from fedveil.training.start import finish, train
from tests.statistics.least_squares import LeastSquaresEngine
from tests.system.test_crash import begun, crashed, files, resumed

PROBLEM = heterogeneous_quadratic(6, 4, seed=1)


def rows_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    data = PROBLEM.data
    part = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    inputs, labels = data.inputs[:][part], data.labels[:][part]
    return inputs.double().numpy(), labels.double().numpy().reshape(-1)


def gradient(client: int, y: np.ndarray) -> np.ndarray:
    rows, targets = rows_of(client)
    return np.asarray(rows.T @ (rows @ y - targets) / len(rows))


def solved(recipe: Recipe, rounds: int, engine: str = "loop") -> list[State]:
    """The states of a run on the quadratics."""
    task = Task(PROBLEM.model, PROBLEM.data.loss)
    workers: dict[str, Engine] = {
        "loop": LoopEngine(task),
        "dense": DenseEngine(task, 4),
        "least squares": LeastSquaresEngine(),
    }
    states = [begin(recipe, PROBLEM.start.clone(), PROBLEM.data, rounds, key=5)]
    for _ in range(rounds):
        states.append(run_round(recipe, states[-1], PROBLEM.data, workers[engine], key=5)[0])
    return states


@pytest.mark.parametrize("engine", ["loop", "dense"])
@pytest.mark.parametrize("clients", [None, 2])
def test_scaffold_is_the_published_algorithm(clients: int | None, engine: str) -> None:
    """Karimireddy et al. 2020, Alg. 1, option II, with both differences sent."""
    steps, eta, rounds = 3, 0.05, 8
    recipe = algorithms.scaffold(steps, clients=clients, learning_rate=eta)
    states = solved(recipe, rounds, engine)
    x, c, own = PROBLEM.start.double().numpy(), np.zeros(4), np.zeros((6, 4))
    for k in range(rounds):
        cohort = cohort_of(recipe, states[k], 6, key=5)
        moves, turns = [], []
        for i in cohort:
            y = x.copy()
            for _ in range(steps):
                y -= eta * (gradient(i, y) - own[i] + c)
            control = own[i] - c + (x - y) / (steps * eta)
            moves.append(y - x)
            turns.append(control - own[i])
            own[i] = control
        x = x + np.mean(moves, axis=0)
        c = c + len(cohort) / 6 * np.mean(turns, axis=0)
    assert np.allclose(states[-1].x.numpy(), x, atol=1e-5)
    assert np.allclose(states[-1].parts["memory"]["control"].numpy(), c, atol=1e-4)
    assert states[-1].memory is not None
    assert np.allclose(states[-1].memory[np.arange(6)].numpy(), own, atol=1e-4)


def test_scaffold_reaches_the_optimum_where_local_steps_drift() -> None:
    steps, eta = 4, 0.1
    plain = algorithms.fedavg(steps=steps, learning_rate=eta)
    drifted = solved(plain, 40, "least squares")[-1]
    controlled = solved(algorithms.scaffold(steps, learning_rate=eta), 40, "dense")[-1]
    gaps = [PROBLEM.suboptimality(state.x) for state in (drifted, controlled)]
    assert gaps[1] < 1e-3 * gaps[0]


def test_with_everyone_the_server_s_control_is_the_mean_of_the_clients() -> None:
    states = solved(algorithms.dp_scaffold(clip=0.3, steps=3, rate=1.0, noise_multiplier=1e-12), 5)
    last = states[-1]
    assert last.memory is not None
    mean = last.memory[np.arange(6)].mean(dim=0)
    assert torch.allclose(last.parts["memory"]["control"], mean, atol=1e-5)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_clip21_is_the_published_algorithm(clip: float) -> None:
    """Islamov et al. 2025, Alg. 1, without noise, with the first step of zero left out."""
    beta, eta, gamma, rounds = 0.3, 0.4, 0.1, 12
    recipe = algorithms.clip21_sgd2m(clip, beta, eta, learning_rate=gamma, private=False)
    states = solved(recipe, rounds)
    x, v, g = PROBLEM.start.double().numpy(), np.zeros((6, 4)), np.zeros((6, 4))
    for _ in range(rounds):
        v = (1 - beta) * v + beta * np.array([gradient(i, x) for i in range(6)])
        w = v - g
        b = w * np.minimum(1, clip / np.linalg.norm(w, axis=1, keepdims=True))
        g = g + eta * b
        x = x - gamma * g.mean(axis=0)
    assert np.allclose(states[-1].x.numpy(), x, atol=1e-4)


def test_clip21_reaches_the_optimum_where_clipping_stops_short() -> None:
    recipe = algorithms.clip21_sgd2m(0.1, 0.5, 0.5, learning_rate=0.2, private=False)
    clipped = algorithms.clipped_fedavg(clip=0.01, steps=1, learning_rate=0.2)
    states = [solved(one, 150, "least squares")[-1] for one in (recipe, clipped)]
    gaps = [PROBLEM.suboptimality(state.x) for state in states]
    assert gaps[0] < 1e-3 * gaps[1]


def test_a_broken_gradient_leaves_the_memory_finite() -> None:
    memory = DoubleMomentum(0.5, 0.5)
    remembered, broken = torch.ones(2, 6), torch.tensor([[torch.nan, 0.0, 0.0], [1.0, 2.0, 3.0]])
    after = memory.after(remembered, broken, torch.zeros(2, 3), {})
    assert torch.equal(after[0], remembered[0])
    assert torch.equal(after[1, :3], torch.tensor([1.0, 1.5, 2.0]))


@pytest.mark.parametrize(
    ("recipe", "part", "why"),
    [
        (algorithms.dp_scaffold(noise_multiplier=1.0), {"cohort": FixedSize(3)}, "who was drawn"),
        (algorithms.clip21_sgd2m(noise_multiplier=1.0), {"cohort": FixedSize(3)}, "who was drawn"),
        (algorithms.scaffold(), {"report": Difference()}, "so many local steps"),
        (algorithms.scaffold(4), {"memory": ControlVariates(5)}, "so many local steps"),
    ],
    ids=["dp_scaffold", "clip21", "report", "steps"],
)
def test_what_is_not_proved_is_refused(recipe: Recipe, part: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        replace(recipe, **part)


@pytest.mark.parametrize(
    "recipe",
    [
        algorithms.dp_scaffold(steps=2, rate=0.5, noise_multiplier=3.0),
        algorithms.clip21_sgd2m(noise_multiplier=3.0),
    ],
    ids=lambda recipe: recipe.name,
)
def test_a_run_that_crashed_ends_at_the_same_bytes(
    recipe: Recipe, blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Path
) -> None:
    """Client memory of either width is saved and restored."""
    train(recipe, blobs, rounds=8, checkpoint_every=3, save=tmp_path / "whole")
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a")
    monkeypatch.undo()
    finish(resumed(recipe, blobs, tmp_path / "a"))
    assert files(tmp_path / "a") == files(tmp_path / "whole")
