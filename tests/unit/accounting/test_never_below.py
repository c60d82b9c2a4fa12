"""ε is never below the truth, and seldom far above it: fixed random settings."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from fedveil.accounting import events
from fedveil.accounting.accountant import epsilon

EXACT = mpmath.MPContext()
EXACT.dps = 60


def exact_delta(rate: float, ratio: float, epsilon: float, fixed_size: bool) -> float:
    """δ of one round, in 60 digits."""
    mp, q, mu = EXACT, EXACT.mpf(rate), 1 / EXACT.mpf(ratio)

    def removed(at):  # type: ignore[no-untyped-def]
        if mp.expm1(at) <= -q:
            return -mp.expm1(at)
        t = mp.log(1 + mp.expm1(at) / q)
        return q * (mp.ncdf(mu / 2 - t / mu) - mp.exp(t) * mp.ncdf(-mu / 2 - t / mu))

    at = mp.mpf(epsilon)
    added = mp.exp(at) * removed(-at) - mp.expm1(at)
    return float(removed(at) if fixed_size else max(removed(at), added))


@pytest.mark.parametrize("fixed_size", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_single_rounds_against_sixty_digits(seed: int, fixed_size: bool) -> None:
    rng = np.random.default_rng(seed)
    cohort, ratio = max(1, round(10 ** rng.uniform(0, 9))), float(10 ** rng.uniform(-1.3, 3))
    delta = float(10 ** rng.uniform(-12, -0.5))
    rate, release = cohort / 10**9, events.GaussianRelease(ratio)
    poisson = events.PoissonSampled(rate, release)
    drawn = events.SampledWithoutReplacement(cohort, 10**9, release)
    found = epsilon(drawn if fixed_size else poisson, delta)
    assert exact_delta(rate, ratio, found, fixed_size) <= delta * (1 + 1e-9)
    if found > 1e-3:  # a smaller ε is above the truth by less than that
        assert exact_delta(rate, ratio, found / 1.05 - 1e-4, fixed_size) > delta


def from_below(rate: float, ratio: float, rounds: int, delta: float) -> tuple[float, float]:
    """The library's ε with losses rounded down, and up, on a fine grid."""
    deviation = rate * math.sqrt(math.expm1(ratio**-2))
    grid = min(1e-3, deviation / (30 * math.sqrt(rounds)))
    found = []
    for pessimistic in (False, True):
        once = pld.from_gaussian_mechanism(
            ratio, sampling_prob=rate, value_discretization_interval=grid,
            pessimistic_estimate=pessimistic, use_connect_dots=pessimistic,
        )  # fmt: skip
        found.append(once.self_compose(rounds).get_epsilon_for_delta(delta))
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(6))
def test_many_rounds_against_the_library_from_below_and_above(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    rate, ratio = float(10 ** rng.uniform(-4, -0.3)), float(10 ** rng.uniform(-0.2, 1))
    rounds, delta = int(10 ** rng.uniform(0.5, 2)), float(10 ** rng.uniform(-9, -2))
    below, above = from_below(rate, ratio, rounds, delta)
    sampled = events.PoissonSampled(rate, events.GaussianRelease(ratio))
    found = epsilon(events.Composed(sampled, rounds), delta)
    assert below * (1 - 1e-9) <= found <= 1.03 * above + 1e-5


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta", "true"),
    [
        (1.2621e-06, 1.147, 17588, 4.597e-06, 2.809e-4),
        (2.85585e-6, 1.97304, 26981, 1.73982e-8, 8.8434e-4),
        (4.9206e-05, 1.47663, 23627, 1.66052e-10, 0.029994),
        (9.278766671891943e-06, 15.946224970536226, 68483, 3.1952e-06, 2.5057e-4),
    ],
)
def test_tiny_rates_have_a_grid_as_fine_as_their_losses(rate, ratio, rounds, delta, true) -> None:
    """Values of a PRV accountant, of which the grid of unsampled losses gave up to 7 times."""
    sampled = events.PoissonSampled(rate, events.GaussianRelease(ratio))
    assert true <= epsilon(events.Composed(sampled, rounds), delta) <= 1.01 * true
