"""The lower bound that decides that noise is too weak is below every ε, and near enough."""

from __future__ import annotations

import math

import pytest

from fedveil.accounting import accountant, events
from fedveil.accounting.losses import LARGEST
from fedveil.accounting.lower_bound import lower_bound

GAUSSIAN = events.GaussianRelease
ROUNDS = [
    (events.PoissonSampled(1.0, GAUSSIAN(1.0)), 500),
    (events.PoissonSampled(0.5, GAUSSIAN(0.3)), 200),
    (events.PoissonSampled(0.1, GAUSSIAN(0.3)), 1500),
    (events.PoissonSampled(0.02, GAUSSIAN(0.2)), 5000),
    (events.SampledWithoutReplacement(30, 100, GAUSSIAN(0.5)), 1000),
    (events.ApproximateRelease(1.0, 1e-9), 800),
    (events.ApproximateRelease(0.1, 0.0), 50_000),
]


@pytest.mark.parametrize(("event", "rounds"), ROUNDS, ids=str)
def test_it_is_below_epsilon_for_every_delta_and_not_far_below(event, rounds) -> None:
    found = lower_bound(event, rounds)
    composed = events.Composed(event, rounds)
    for delta in (1e-12, 1e-5, 0.5, 1 - 1e-6):
        assert found <= accountant.epsilon(composed, delta)
    assert accountant.epsilon(composed, 0.5) > 200
    assert lower_bound(event, 20 * rounds) > LARGEST  # so no ε(½) above 20 times that has a grid


@pytest.mark.parametrize("rounds", [1, 10, 1000, 10**9])
@pytest.mark.parametrize("rate", [1e-100, 1e-6, 0.5, 1.0])
@pytest.mark.parametrize("ratio", [0.02, 1.0, 1e6])
def test_it_is_a_number_for_extreme_settings(ratio: float, rate: float, rounds: int) -> None:
    found = lower_bound(events.PoissonSampled(rate, GAUSSIAN(ratio)), rounds)
    assert -20 <= found < 1250 * rounds
    assert math.isfinite(found)


def test_little_noise_over_few_rounds_is_not_given_up() -> None:
    """The bound needs many tests that succeed; until then it says nothing."""
    assert lower_bound(events.PoissonSampled(0.5, GAUSSIAN(0.05)), 3) == -20
