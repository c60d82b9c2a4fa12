"""Servers and outputs, against the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.parts.bound import AdaptiveClip
from fedveil.parts.cohort import Everyone
from fedveil.parts.correlated import BandedNoise
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.part import Begin
from fedveil.parts.report import Difference, Model, PseudoGradient
from fedveil.parts.schedule import Constant, Decay
from fedveil.parts.server import (
    Adagrad,
    Adam,
    LastIterate,
    Momentum,
    MovingAverage,
    NormalizedStep,
    RandomIterate,
    Step,
    Yogi,
)
from fedveil.testing.replay import Scripted, people

X, D = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


def first(x: torch.Tensor, rounds: int = 1, seed: int = 0) -> Begin:
    return Begin(x, 1, rounds, np.random.default_rng(seed))


def test_step_uses_the_round_s_rate() -> None:
    assert torch.equal(Step(Decay(1.0, 0.5)).step(X, D, {}, 1)[0], X - 0.5 * D)


def test_momentum_is_torch_s_sgd() -> None:
    server, x, state = Momentum(Constant(0.1), 0.8), X.clone(), Momentum().initial_state(first(X))
    leaf = X.clone().requires_grad_()
    reference = torch.optim.SGD([leaf], lr=0.1, momentum=0.8)
    for k in range(4):
        x, state = server.step(x, D * (k + 1), state, k)
        leaf.grad = D * (k + 1)
        reference.step()
    assert torch.allclose(x, leaf.detach())


def test_adam_with_bias_correction_is_torch_s_adam() -> None:
    server = Adam(Constant(0.1), 0.9, 0.99, 1e-3, bias_correction=True)
    x, state = X.clone(), server.initial_state(first(X))
    leaf = X.clone().requires_grad_()
    reference = torch.optim.Adam([leaf], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for k in range(4):
        x, state = server.step(x, D * (k - 1.5), state, k)
        leaf.grad = D * (k - 1.5)
        reference.step()
    assert torch.allclose(x, leaf.detach(), atol=1e-6)


SQUARES = {
    Adagrad: lambda v, d: v + d**2,
    Adam: lambda v, d: 0.9 * v + 0.1 * d**2,
    Yogi: lambda v, d: v - 0.1 * d**2 * np.sign(v - d**2),
}


@pytest.mark.parametrize("kind", SQUARES)
def test_adaptive_servers_follow_algorithm_2(kind: type) -> None:
    """By hand: v begins at τ², neither moment is corrected."""
    server = kind(Constant(0.1), first=0.5, second=0.9, floor=0.3)
    x, state = X.clone(), server.initial_state(first(X))
    y, m, v = X.double().numpy(), np.zeros(2), np.full(2, 0.09)
    for k in range(5):
        d = D.double().numpy() * (k - 1.5) / 10
        x, state = server.step(x, torch.from_numpy(d).float(), state, k)
        m, v = 0.5 * m + 0.5 * d, SQUARES[kind](v, d)
        y = y - 0.1 * m / (np.sqrt(v) + 0.3)
    assert np.allclose(x.numpy(), y, atol=1e-6)


@pytest.mark.parametrize("kind", [Adagrad, Adam, Yogi])
def test_removed_noise_leaves_the_squares_of_the_signal(kind: type) -> None:
    """On noise alone, v stays near where it began; with the noise in it, it does not.

    A sum of 400 squares of N(0, σ²) minus σ² has a mean of 0 and a deviation of σ²·√800 in a
    coordinate, so the mean of 4,000 coordinates is within 3σ² except with probability 1e-10.
    """
    sigma, x, rng = 0.5, torch.zeros(4000), np.random.default_rng(0)
    grown = {}
    for removed in (True, False):
        server = kind(remove_noise=removed)
        state = server.initial_state(Begin(x, 1, 400, rng, noise=sigma))
        for k in range(400):
            noise = torch.from_numpy(rng.normal(0, sigma, 4000)).float()
            _, state = server.step(x, noise, state, k)
        grown[removed] = float(state["second"].mean())
    assert grown[False] > 0.6 * sigma**2
    assert abs(grown[True]) < (3 if kind is Adagrad else 0.5) * sigma**2 < grown[False]


def test_the_variance_that_is_removed_is_that_of_the_loop_s_noise() -> None:
    recipe = algorithms.dp_fedadam(clip=0.7, rate=0.5, noise_multiplier=2.0, remove_noise=True)
    state = begin(recipe, torch.zeros(4000), people(8), 3, key=1)
    silent = [torch.zeros(4000)] * 8
    _, info = run_round(recipe, state, people(8), Scripted(silent), key=1)
    variance = float(state.parts["server"]["noise"])
    assert variance == pytest.approx((2.0 * 0.7 / 4) ** 2)
    assert info.noise**2 / 4000 == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize(
    "part",
    [
        {"bound": AdaptiveClip(1.0)},
        {"memory": ErrorCompensation(0.1)},
        {"noise": BandedNoise(2.0, bands=2), "cohort": Everyone()},
    ],
    ids=repr,
)
def test_noise_without_a_fixed_variance_is_not_removed(part: dict[str, Any]) -> None:
    recipe = algorithms.dp_fedadam(noise_multiplier=2.0, remove_noise=True)
    with pytest.raises(UserError, match="no fixed variance"):
        replace(recipe, **part)


def test_normalized_step_has_length_eta_and_stays_at_zero() -> None:
    x, _ = NormalizedStep(Constant(0.5)).step(X, D, {}, 0)
    assert float((X - x).norm()) == pytest.approx(0.5)
    assert torch.equal(NormalizedStep().step(X, torch.zeros(2), {}, 0)[0], X)


def test_reports_and_their_descent_agree() -> None:
    """Walking with rate η against one client's report lands on that client's model."""
    y, eta = torch.tensor([0.5, 5.0]), 0.25
    for report, rate in ((Difference(), 1.0), (PseudoGradient(), eta), (Model(), 1.0)):
        scale, share = report.affine(eta)
        u = scale * (y - X) + share * X
        assert torch.allclose(X - rate * report.descent(u, X), y)


def test_a_random_iterate_is_uniform_over_the_first_k() -> None:
    output, rounds, counts = RandomIterate(), 4, np.zeros(5)
    for seed in range(2000):
        kept = output.initial_state(first(torch.tensor([0.0]), rounds, seed))
        for k in range(rounds):
            kept = output.follow(kept, torch.tensor([k + 1.0]), k)
        counts[int(kept["model"])] += 1
    assert counts[4] == 0  # x_K itself is not among them
    assert np.all(np.abs(counts[:4] / 2000 - 0.25) < 0.05)


def test_last_iterate_and_moving_average() -> None:
    assert torch.equal(LastIterate().follow({"model": X}, D, 3)["model"], D)
    average = MovingAverage(0.5).follow({"model": X}, D, 100)["model"]
    assert torch.allclose(average, (X + D) / 2)
    early = MovingAverage(0.999).follow({"model": X}, D, 0)["model"]
    assert torch.allclose(early, 0.1 * X + 0.9 * D)


def test_wrong_numbers_are_refused() -> None:
    for make in (
        lambda: Momentum(momentum=1.0),
        lambda: MovingAverage(-0.1),
        lambda: Adam(floor=0),
    ):
        with pytest.raises(UserError):
            make()
