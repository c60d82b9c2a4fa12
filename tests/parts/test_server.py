"""Servers and outputs, against the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil.errors import UserError
from fedveil.parts.report import Difference, GradientScale, Model
from fedveil.parts.schedule import Constant, Decay
from fedveil.parts.server import (
    Adam,
    LastIterate,
    Momentum,
    MovingAverage,
    NormalizedStep,
    RandomIterate,
    Step,
)

X, D = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


def test_step_uses_the_round_s_rate() -> None:
    assert torch.equal(Step(Decay(1.0, 0.5)).step(X, D, {}, 1)[0], X - 0.5 * D)


def test_momentum_is_torch_s_sgd() -> None:
    server, x, state = Momentum(Constant(0.1), 0.8), X.clone(), Momentum().start(X)
    leaf = X.clone().requires_grad_()
    reference = torch.optim.SGD([leaf], lr=0.1, momentum=0.8)
    for k in range(4):
        x, state = server.step(x, D * (k + 1), state, k)
        leaf.grad = D * (k + 1)
        reference.step()
    assert torch.allclose(x, leaf.detach())


def test_adam_is_torch_s_adam() -> None:
    server = Adam(Constant(0.1), 0.9, 0.99, 1e-3)
    x, state = X.clone(), server.start(X)
    leaf = X.clone().requires_grad_()
    reference = torch.optim.Adam([leaf], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for k in range(4):
        x, state = server.step(x, D * (k - 1.5), state, k)
        leaf.grad = D * (k - 1.5)
        reference.step()
    assert torch.allclose(x, leaf.detach(), atol=1e-6)


def test_normalized_step_has_length_eta_and_stays_at_zero() -> None:
    x, _ = NormalizedStep(Constant(0.5)).step(X, D, {}, 0)
    assert float((X - x).norm()) == pytest.approx(0.5)
    assert torch.equal(NormalizedStep().step(X, torch.zeros(2), {}, 0)[0], X)


def test_reports_and_their_descent_agree() -> None:
    """Walking with rate η against one client's report lands on that client's model."""
    y, eta = torch.tensor([0.5, 5.0]), 0.25
    for report, rate in ((Difference(), 1.0), (GradientScale(), eta), (Model(), 1.0)):
        scale, share = report.affine(eta)
        u = scale * (y - X) + share * X
        assert torch.allclose(X - rate * report.descent(u, X), y)


def test_a_random_iterate_is_uniform_over_the_first_k() -> None:
    output, rounds, counts = RandomIterate(), 4, np.zeros(5)
    for seed in range(2000):
        kept = output.start(torch.tensor([0.0]), rounds, np.random.default_rng(seed))
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
