"""Sampled Gaussian rounds on a grid, against the library's own results, computed point by point."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from dp_accounting.pld import privacy_loss_distribution as pld

from fedveil.accounting import sampled
from fedveil.accounting.accountant import _interval
from fedveil.accounting.sampled import Dense
from fedveil.accounting.tilted import ROUNDING

KINDS = privacy_loss_mechanism.AdjacencyType
SAMPLED = [(1.0, 0.1), (0.5, 0.01), (3.3, 0.02), (0.02, 0.3), (0.7, 0.999), (100.0, 1e-6)]


def places(ratio: float, rate: float) -> np.ndarray:
    """Where curves are compared, also on both sides of the largest loss of an addition."""
    least = -math.log1p(-rate)
    return np.append(np.linspace(0, 0.5 / ratio**2 + 12 / ratio, 151), [0.5 * least, 2 * least])


@pytest.mark.parametrize(("ratio", "rate"), SAMPLED)
def test_the_curves_are_the_library_s(ratio: float, rate: float) -> None:
    epsilons = places(ratio, rate)
    for curve, kind in (
        (sampled.addition_curve, KINDS.ADD),
        (sampled.removal_curve, KINDS.REMOVE),
    ):
        wanted = privacy_loss_mechanism.GaussianPrivacyLoss(
            ratio, sampling_prob=rate, adjacency_type=kind
        ).get_delta_for_epsilon(epsilons)
        found = curve(ratio, rate, epsilons)
        assert found == pytest.approx(np.asarray(wanted), rel=1e-9, abs=1e-14)
        assert found.min() >= 0


def whole(mu: mpmath.mpf, eps: mpmath.mpf) -> mpmath.mpf:
    upper, lower = mpmath.ncdf(mu / 2 - eps / mu), mpmath.ncdf(-mu / 2 - eps / mu)
    return upper - mpmath.exp(eps) * lower


def removed(mu: mpmath.mpf, rate: mpmath.mpf, eps: mpmath.mpf) -> mpmath.mpf:
    """The exact δ of ((1−q)Q + qP, Q), for ε of either sign."""
    order = 1 + (mpmath.exp(eps) - 1) / rate
    return rate * whole(mu, mpmath.log(order)) if order > 0 else 1 - mpmath.exp(eps)


def added(mu: mpmath.mpf, rate: mpmath.mpf, eps: mpmath.mpf) -> mpmath.mpf:
    return 1 - mpmath.exp(eps) + mpmath.exp(eps) * removed(mu, rate, -eps)


def replaced(mu: mpmath.mpf, rate: mpmath.mpf, eps: mpmath.mpf) -> mpmath.mpf:
    return max(removed(mu, rate, eps), added(mu, rate, eps))


FINE = [
    (1.0, 1e-5),
    (0.95, 1e-5),
    (1.0, 0.1),
    (0.3, 0.01),
    (0.1, 0.3),
    (9.9, 0.2),
    (10.1, 0.2),
    (1e6, 0.5),
]


@pytest.mark.parametrize(("ratio", "rate"), FINE)
def test_masses_have_the_exact_curve_at_the_grid_and_no_lower_one_between(ratio, rate) -> None:
    """In 40 digits. Below ε = 0 in absolute terms: there the curve is almost 1 − e^ε."""
    interval = _interval(ratio, rate)
    both = sampled.poisson(ratio, rate, interval)
    fixed = sampled.without_replacement(ratio, rate, interval)
    given = mpmath.mpf(1 / ratio), mpmath.mpf(rate)
    pairs = (both._pmf_remove, removed), (both._pmf_add, added), (fixed._pmf_remove, replaced)
    with mpmath.workdps(40):
        for masses, curve in pairs:
            points = np.linspace(masses._lower_loss, masses._lower_loss + masses.size - 1, 24)
            for point in (*np.floor(points), *np.floor(points[:-1]) + 0.5, -1, 0, 1):
                eps = float(point * interval)
                true, slack = float(curve(*given, mpmath.mpf(eps))), 1e-15 if eps < 0 else 1e-22
                found = masses.get_delta_for_epsilon(eps)
                assert found >= true * (1 - 1e-11) - slack
                if point == np.floor(point):
                    assert found <= true * (1 + 1e-11) + slack


@pytest.mark.parametrize(("ratio", "rate"), [*FINE, (1e4, 0.5), (0.7, 1e-4), (2.0, 1e-9)])
def test_masses_sum_to_one(ratio: float, rate: float) -> None:
    """Mass beyond 1 grows with every round of a composition."""
    interval = _interval(ratio, rate)
    both = sampled.poisson(ratio, rate, interval)
    fixed = sampled.without_replacement(ratio, rate, interval)
    for masses in (both._pmf_remove, both._pmf_add, fixed._pmf_remove):
        assert abs(masses._probs.sum() + masses._infinity_mass - 1) <= 1e-14


@pytest.mark.parametrize("spurious", [1e-9, math.nan, math.inf])
def test_mass_beyond_one_and_no_numbers_have_no_finite_epsilon(spurious: float) -> None:
    once = sampled.without_replacement(1.0, 0.1, 1e-2)._pmf_remove
    once._probs[-3] += spurious
    whole = once.self_compose(10**7)
    assert whole.get_epsilon_for_delta(0.9) == math.inf
    assert whole.get_delta_for_epsilon(1.0) == 1.0
    if not spurious < 1:
        assert once.get_epsilon_for_delta(0.9) == math.inf
        assert once.get_delta_for_epsilon(0.0) == 1.0


def library(ratio: float, rate: float, interval: float) -> pld.PrivacyLossDistribution:
    return pld.from_gaussian_mechanism(
        ratio, sampling_prob=rate, value_discretization_interval=interval
    )


@pytest.mark.parametrize(
    ("ratio", "rate", "count", "interval"),
    [
        (2.7, 0.2, 200, 1e-3), (0.5, 0.003, 40_000, 1e-3), (0.3, 0.5, 8, 2e-3),
        (3.0, 1.0, 10, 1e-3), (0.1, 0.9, 2, 0.05), (40.0, 0.01, 1, 1e-5),
    ],
)  # fmt: skip
def test_compositions_are_the_library_s(ratio, rate, count, interval) -> None:
    """Up to the rounding of δ in a convolution, which the accountant adds (`ROUNDING`)."""
    wanted = library(ratio, rate, interval).self_compose(count)
    found = sampled.poisson(ratio, rate, interval).self_compose(count)
    assert isinstance(found._pmf_add, Dense)
    slack = 2 * count * ROUNDING + 1e-14
    for delta in (1e-9, 1e-5, 0.1, 0.9):
        epsilon = found.get_epsilon_for_delta(delta)
        least, most = (wanted.get_epsilon_for_delta(delta + s) for s in (slack, -slack))
        assert least - 1e-9 <= epsilon <= most + 1e-9
        assert found.get_delta_for_epsilon(min(epsilon, 500.0)) == pytest.approx(
            wanted.get_delta_for_epsilon(min(epsilon, 500.0)), rel=1e-6, abs=slack
        )


@pytest.mark.parametrize("infinite", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("lower", [-4, -2, 0, 3, 800_000])
@pytest.mark.parametrize("seed", range(4))
def test_epsilon_is_the_library_s_on_every_small_grid(seed, lower, infinite) -> None:
    """Also for losses of one sign, masses of zero, and e^−loss that is zero."""
    masses = np.random.default_rng(seed).dirichlet([0.3] * 5) * (1 - infinite)
    masses[seed] = 0.0
    slow = pld_pmf.DensePLDPmf(0.7, lower, masses, infinite, True)
    fast = Dense.of(slow)
    for delta in (0.0, 1e-9, 0.01, 0.2, 0.5, 0.7, 0.99, 1.0):
        wanted = slow.get_epsilon_for_delta(delta)
        assert fast.get_epsilon_for_delta(delta) == pytest.approx(wanted, rel=1e-9, abs=1e-9), delta


def test_the_tails_that_are_left_out_hold_no_more_mass_than_said() -> None:
    """Over all sums of three losses, and pessimistically: their mass counts as infinite."""
    masses = np.array([0.05, 0.1, 0.5, 0.25, 0.1])
    whole = np.convolve(np.convolve(masses, masses), masses)
    for tail in (1e-15, 0.01, 0.3):
        low, high = Dense(0.5, -2, masses, 0.0, True)._essential(3, tail)
        assert 0 <= low < high <= 12
        assert whole[:low].sum() + whole[high + 1 :].sum() <= tail
        found = Dense(0.5, -2, masses, 0.0, True).self_compose(3, tail)
        assert found._probs == pytest.approx(whole[low : high + 1], abs=1e-15 + tail)
        assert found._infinity_mass == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize(("ratio", "rate", "count"), [(30.0, 1.0, 10**6), (1e3, 0.5, 10**9)])
def test_a_long_composition_is_as_wide_as_its_losses(ratio, rate, count) -> None:
    """About 16 standard deviations; with exponents of the grid's width, K of them."""
    interval = rate / ratio / 10
    found = sampled.poisson(ratio, rate, interval).self_compose(count)._pmf_remove
    assert found.size < 200 * math.sqrt(count)
    mean = count * (rate / ratio) ** 2 / 2
    spread = math.sqrt(count) * rate / ratio
    losses = (found._lower_loss + np.arange(found.size)) * interval
    assert losses[0] < mean - 7 * spread
    assert losses[-1] > mean + 7 * spread


@pytest.mark.parametrize(("ratio", "rate"), [(2.0, 1.0), (1.0, 0.1), (0.5, 0.01), (0.3, 1e-9)])
def test_divergences_are_not_below_those_of_the_release(ratio: float, rate: float) -> None:
    """Also where rounding leaves masses that sum to more than 1, as in the last setting."""
    orders = np.array([2.0, 3.0])  # the tails that count as infinite hardly matter to them
    exact = []
    for order in orders.astype(int):  # Σ C(α, i)·(1−q)^(α−i)·q^i·e^{i(i−1)/(2ρ²)} − 1, term by term
        terms = [
            math.comb(order, i) * (1 - rate) ** (order - i) * rate**i
            * math.expm1(i * (i - 1) / (2 * ratio**2))
            for i in range(2, order + 1)
        ]  # fmt: skip
        exact.append(math.log1p(sum(terms)) / (order - 1))
    removed = sampled.poisson(ratio, rate, 1e-3 if rate > 1e-6 else 1e-4)._pmf_remove
    found = removed.divergences(orders)
    assert (found >= np.array(exact) * (1 - 1e-9)).all()
    assert found == pytest.approx(exact, rel=0.02, abs=1e-5)
