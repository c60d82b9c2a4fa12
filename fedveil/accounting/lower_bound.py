"""A lower bound on ε, within microseconds: noise that is too weak needs no grid."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr, ndtr, xlog1py, xlogy

from fedveil.accounting import events

SURE = 20.0  # the bound holds for δ up to 1 − 2e^−20
PLACES = np.array([0.5, 0.75, 1.0, 1.25, 1.5])  # thresholds of tests, in sensitivities


def lower_bound(event: events.Round, count: int) -> float:
    """K·kl(m‖b) − 20 with m = a·(1 − √(40/(K·a))): no ε below it is an upper bound.

    A test of one round has probability a with the unit and b ≤ m without it. S: at least K·m of K
    tests succeed. By Chernoff P(S) ≥ 1 − e^−20 and Q(S) ≤ e^(−K·kl(m‖b)). So for δ ≤ 1 − 2e^−20,
    e^ε ≥ (P(S) − δ)/Q(S) ≥ e^(K·kl(m‖b) − 20).

    >>> true = 500.0  # of one Gaussian release with μ = 10·√10
    >>> 90 < lower_bound(events.PoissonSampled(1.0, events.GaussianRelease(1.0)), 1000) < true
    True
    """
    a, log_b = _tests(event)
    m = a * (1 - np.sqrt(np.minimum(2 * SURE / (count * a), 1.0)))
    b = np.exp(log_b)
    kl = xlogy(m, m) - m * log_b + xlog1py(1 - m, -m) - xlog1py(1 - m, -b)
    return float(count * np.max(kl, initial=0.0, where=m > b)) - SURE


def _tests(event: events.Round) -> tuple[np.ndarray, np.ndarray]:
    """(a, log b) of tests of one round; of Gaussians, whether the noisy sum exceeds a place."""
    match event:
        case events.PoissonSampled(rate, events.GaussianRelease(ratio)):
            return _above(rate, ratio)
        case events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)):
            return _above(cohort / population, ratio)
        case events.ApproximateRelease(epsilon, delta) if delta < 1:
            log_b = math.log1p(-delta) - float(np.logaddexp(0.0, epsilon))
            return np.array([1 - math.exp(log_b)]), np.array([log_b])
        case _:
            return np.ones(0), np.ones(0)


def _above(rate: float, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """The unit, if drawn, moves the sum by the sensitivity."""
    log_b = log_ndtr(-PLACES / ratio)
    return (1 - rate) * np.exp(log_b) + rate * ndtr((1 - PLACES) / ratio), log_b
