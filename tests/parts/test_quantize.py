"""Stochastic rounding: on the grid, unbiased, within its norms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.quantize import Exact, StochasticRound


def test_rounding_is_unbiased() -> None:
    values = torch.tensor([0.0, 0.1, 0.333, -0.777, 0.9999, -1.0, 1.0]).repeat(20_000, 1)
    rounded = StochasticRound(4)(values, within(1.0, 7), np.random.default_rng(0))
    error = (rounded.mean(dim=0) - values[0]).abs()
    # A grid step of 1/4 has a standard deviation of at most 1/8; five standard errors.
    assert (error < 5 * 0.125 / math.sqrt(20_000)).all()


def test_a_biased_rounding_would_be_noticed() -> None:
    values = torch.full((20_000, 1), 0.1)
    nearest = torch.round(values * 4) / 4
    assert abs(float(nearest.mean()) - 0.1) > 5 * 0.125 / math.sqrt(20_000)


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=8),
    levels=st.integers(1, 300),
    norm=st.sampled_from([1.0, 0.37, 62.5]),
    seed=st.integers(0, 10),
)
def test_messages_lie_on_the_grid_within_the_norms(
    row: list[float], levels: int, norm: float, seed: int
) -> None:
    vector = torch.tensor(row, dtype=torch.float64)
    vector = norm * vector / max(1.0, float(vector.norm()))
    bound = within(norm, len(row))
    quantize = StochasticRound(levels)
    message = quantize(vector[None], bound, np.random.default_rng(seed))[0]
    steps = message / quantize.grid(bound)
    assert torch.allclose(steps, steps.round(), atol=1e-9)
    allowed = quantize.norms(bound)
    assert float(message.abs().max()) <= allowed.linf * (1 + 1e-12)
    assert float(message.norm()) <= allowed.l2 * (1 + 1e-12)
    assert float(message.abs().sum()) <= allowed.l1 * (1 + 1e-12)


def test_sensitivities_of_a_rounded_unit_vector_in_grid_steps() -> None:
    """Δ₂ ≤ 2s + 2√d, Δ₁ ≤ 2s√d + 2d, Δ∞ ≤ 2s for any two inputs."""
    levels, dim = 64, 100
    change = StochasticRound(levels).norms(within(1.0, dim)).sensitivity("replace-one")
    assert change.grid == 1 / levels
    assert change.l2 * levels == pytest.approx(2 * levels + 2 * math.sqrt(dim))
    assert change.l1 * levels == pytest.approx(2 * levels * math.sqrt(dim) + 2 * dim)
    assert change.linf * levels == pytest.approx(2 * levels)


def test_exact_changes_nothing() -> None:
    rows = torch.randn(3, 4)
    assert Exact()(rows, within(1.0, 4), np.random.default_rng(0)) is rows
    assert Exact().norms(within(1.0, 4)) == within(1.0, 4)


@pytest.mark.parametrize("wrong", [0, -3, 1.5])
def test_levels_are_a_whole_number(wrong: int) -> None:
    with pytest.raises(UserError, match="whole number"):
        StochasticRound(wrong)
