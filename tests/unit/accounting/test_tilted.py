"""Compositions at tiny δ: against closed forms and direct convolution of positive terms."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import stats

from fedveil.accounting import events, sampled
from fedveil.accounting.accountant import _tilted as tilted
from fedveil.accounting.accountant import delta, epsilon
from fedveil.accounting.tilted import Tail, _largest

COUNT = 64


@functools.cache
def direct(ratio: float, rate: float, interval: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(losses, masses, the infinite one) of 64 removals: errors of sums are relative."""
    once = sampled.poisson(ratio, rate, interval)._pmf_remove
    masses = once._probs.astype(np.longdouble)
    for _ in range(6):
        masses = np.convolve(masses, masses)
    losses = (COUNT * once._lower_loss + np.arange(len(masses))) * interval
    return losses, masses, -math.expm1(COUNT * math.log1p(-once._infinity_mass))


def curve(ratio: float, eps: np.ndarray) -> np.ndarray:
    """δ of what comes first: nothing, or a Gaussian release."""
    if math.isinf(ratio):
        return np.maximum(-np.expm1(np.minimum(eps, 0.0)), 0.0)
    lost = np.exp(eps + stats.norm.logcdf(-0.5 / ratio - eps * ratio))
    return np.asarray(np.maximum(stats.norm.cdf(0.5 / ratio - eps * ratio) - lost, 0.0))


def exact(ratio: float, rate: float, interval: float, first: float, eps: float) -> float:
    losses, masses, infinite = direct(ratio, rate, interval)
    return float(infinite + masses @ curve(first, eps - losses))


SETTINGS = [(1.0, 0.01, 0.05), (2.0, 0.3, 0.02), (0.6, 1e-3, 0.05), (30.0, 1.0, 0.003)]


@pytest.mark.parametrize("first", [math.inf, 3.0])
@pytest.mark.parametrize(("ratio", "rate", "interval"), SETTINGS)
def test_delta_is_relative_to_the_tail_at_every_order(ratio, rate, interval, first) -> None:
    """Never below the exact one, at any θ, and close to it at the best of them."""
    once = sampled.poisson(ratio, rate, interval)._pmf_remove
    tails = [Tail.of(once, COUNT, first, theta) for theta in (0.5, 1, 2, 4, 8, 12, 16, 24, 40)]
    for eps in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0):
        true = exact(ratio, rate, interval, first, eps)
        found = [tail.delta(eps) for tail in tails]
        assert min(found) >= true * (1 - 1e-12)
        if true > 1e-25:
            assert min(found) <= true * (1 + 1e-6)


@pytest.mark.parametrize("first", [math.inf, 3.0])
def test_tiny_deltas_have_the_epsilon_of_the_exact_masses(first: float) -> None:
    loss = tilted(sampled.poisson(1.0, 0.01, 0.05), COUNT, first)
    for target in (1e-6, 1e-12, 1e-16):
        found = loss.get_epsilon_for_delta(target)
        assert exact(1.0, 0.01, 0.05, first, found) <= target * (1 + 1e-12)
        assert exact(1.0, 0.01, 0.05, first, found * 0.999) > target
        assert loss.get_delta_for_epsilon(found) == pytest.approx(target, rel=1e-5)


@pytest.mark.parametrize("first", [math.inf, 0.5, 2.0, 40.0])
@pytest.mark.parametrize("theta", [0.1, 1.0, 7.0, 100.0])
def test_no_weight_is_above_what_bounds_rounding(first: float, theta: float) -> None:
    once = sampled.poisson(2.0, 0.3, 0.02)._pmf_remove
    weights = Tail.of(once, 2, first, theta)._weights(np.linspace(-20, 900, 20_001))
    assert 0 <= weights.min() <= weights.max() <= _largest(theta) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "target", "true"),
    [
        (1e-5, 1.0, 10**5, 1e-12, 0.0243), (1e-4, 1.0, 10**4, 1e-12, 0.135),
        (1e-4, 1.0, 10**5, 1e-11, 0.25), (1e-3, 1.0, 10**4, 1e-12, 1.16),
    ],
)  # fmt: skip
def test_rounding_hides_no_tail(rate, ratio, rounds, target, true) -> None:
    """By moments alone these are 1.7 to 5 times as large."""
    sampled_round = events.PoissonSampled(rate, events.GaussianRelease(ratio))
    found = epsilon(events.Composed(sampled_round, rounds), target)
    assert true <= found <= 1.04 * true
    assert delta(events.Composed(sampled_round, rounds), found) <= target * (1 + 1e-6)


@pytest.mark.parametrize(
    ("mu", "rounds", "target"), [(1.0, 10**6, 1e-12), (3.0, 10**7, 1e-8), (5.0, 10**4, 1e-12)]
)
@pytest.mark.parametrize("first", [math.inf, 2.0])
def test_many_rounds_are_one_gaussian(mu, rounds, target, first) -> None:
    each = events.PoissonSampled(1.0, events.GaussianRelease(math.sqrt(rounds) / mu))
    before = None if math.isinf(first) else events.Dominated(events.GaussianRelease(first))
    true = epsilon(events.GaussianRelease((mu**2 + first**-2) ** -0.5), target)
    found = epsilon(events.Composed(each, rounds, before), target)
    assert true * (1 - 1e-7) <= found <= 1.002 * true


def test_infinite_losses_count_in_every_round() -> None:
    loss = tilted(sampled.approximate(0.1, 1e-9), 100, math.inf)
    assert loss.get_delta_for_epsilon(20.0) == pytest.approx(1e-7, rel=1e-6)
    assert loss.get_epsilon_for_delta(0.9e-7) == math.inf
