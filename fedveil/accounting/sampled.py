"""Gaussian releases of a random cohort, as privacy loss distributions on a grid.

dp-accounting has all of this. It computes curves, bounds of tails and ε point by point in Python,
which takes nearly all of the time of an ε. Here they are computed for all points at once, by the
same formulas (tests/unit/accounting/test_sampled.py compares them).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld import privacy_loss_mechanism as mechanism
from scipy import fft
from scipy.special import expit, log_ndtr, ndtr

Curve = Callable[[np.ndarray], np.ndarray]  # δ at each ε ≥ 0
SMALL = 0.1  # sensitivity in standard deviations at which the rule's error is below rounding
RULE = tuple(zip(*np.polynomial.legendre.leggauss(6), strict=True))
EXCESS = 1e-3  # of mass in a composition: more is no rounding


def poisson(ratio: float, rate: float, interval: float) -> Any:
    """The losses of a round that samples each unit with this rate: one is removed, or added."""
    low, high = losses(ratio, rate)
    removal = functools.partial(removal_curve, ratio, rate)
    addition = functools.partial(addition_curve, ratio, rate)
    removed = _connected(removal, addition, low, high, interval)
    if rate == 1.0:
        return pld.PrivacyLossDistribution(removed)
    added = _connected(addition, removal, -high, -low, interval)
    return pld.PrivacyLossDistribution(removed, added)


def without_replacement(ratio: float, rate: float, interval: float) -> Any:
    """The symmetric loss that dominates both directions of a replaced unit.

    Its hockey-stick curve is the larger of those of ((1−q)Q + qP, Q) and (P, (1−q)P + qQ):
    Zhu et al. 2022, Thm. 11 (subset sampling). That is the removal curve for ε ≥ 0.
    """
    _, high = losses(ratio, rate)
    curve = functools.partial(removal_curve, ratio, rate)
    return pld.PrivacyLossDistribution(_connected(curve, curve, -high, high, interval))


def approximate(epsilon: float, delta: float) -> Any:
    """P(ℓ = ±ε) = (1 − δ)/(1 + e^∓ε) and P(ℓ = ∞) = δ: the largest loss of an (ε, δ)-DP release.

    The grid is −ε, 0, ε, so that no loss is rounded.
    """
    masses = (1 - delta) * expit(np.array([-epsilon, -math.inf, epsilon]))
    return pld.PrivacyLossDistribution(Dense(epsilon, -1, masses, delta, True))


def removal_curve(ratio: float, rate: float, epsilons: np.ndarray) -> np.ndarray:
    """δ of ((1−q)Q + qP, Q) at each ε ≥ 0: q·H_{1+(e^ε−1)/q}(P‖Q).

    >>> float(removal_curve(1.0, 0.1, np.zeros(1))[0].round(6))  # q·(2Φ(½) − 1)
    0.038292
    """
    return rate * gaussian_curve(ratio, _unsampled(epsilons, rate))


def addition_curve(ratio: float, rate: float, epsilons: np.ndarray) -> np.ndarray:
    """δ of (Q, (1−q)Q + qP) at each ε ≥ 0: q·e^{ε+t}·H_{e^−t}(P‖Q), 1 + (e^{−ε} − 1)/q = e^t.

    0 from ε = −log(1−q) on, the largest loss of an addition.

    >>> float(addition_curve(1.0, 0.1, np.zeros(1))[0].round(6))
    0.038292
    """
    inner = _unsampled(-epsilons, rate)
    curve, possible = np.zeros(len(epsilons)), np.isfinite(inner)
    inner = inner[possible]
    curve[possible] = rate * np.exp(epsilons[possible] + inner) * gaussian_curve(ratio, -inner)
    return curve


def _unsampled(epsilons: np.ndarray, rate: float) -> np.ndarray:
    """log(1 + (e^ε − 1)/q): the loss without sampling at which the sampled one is ε."""
    with np.errstate(divide="ignore"):  # log 0 at the least loss
        small = np.log1p(np.maximum(np.expm1(np.minimum(epsilons, 1.0)) / rate, -1.0))
    high = np.maximum(epsilons, 1.0)
    large = high - math.log(rate) + np.log1p((rate - 1) * np.exp(-high))
    return np.asarray(np.where(epsilons <= 1, small, large))


def gaussian_curve(ratio: float, epsilons: np.ndarray) -> np.ndarray:
    """δ of a Gaussian release without sampling: Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ).

    Where a small μ makes both nearly equal: their difference is ∫φ − (e^ε − 1)·Φ(−μ/2 − ε/μ), with
    the integral from −μ/2 to μ/2, moved by −ε/μ, by Gauss and Legendre's rule.
    """
    mu, center = 1 / ratio, -epsilons * ratio
    if mu > SMALL:
        lost = np.exp(epsilons + log_ndtr(center - mu / 2))
        return np.asarray(np.maximum(ndtr(center + mu / 2) - lost, 0.0))
    density = sum(w * np.exp(-((center + mu / 2 * at) ** 2) / 2) for at, w in RULE)
    lost = np.expm1(np.minimum(epsilons, 700.0)) * ndtr(center - mu / 2)
    return np.asarray(np.maximum(mu / math.sqrt(8 * math.pi) * density - lost, 0.0))


@functools.lru_cache(maxsize=64)
def losses(ratio: float, rate: float) -> tuple[float, float]:
    """The least and the largest loss of a removal, up to a probability of e^−50."""
    kind = mechanism.AdjacencyType.REMOVE
    loss = mechanism.GaussianPrivacyLoss(ratio, sampling_prob=rate, adjacency_type=kind)
    bounds = loss.connect_dots_bounds()
    return float(bounds.epsilon_lower), float(bounds.epsilon_upper)


def _connected(
    curve: Curve, reverse: Curve, least: float, largest: float, interval: float
) -> Dense:
    """p_k = (Δδ_k − e^h·Δδ_{k−1})/(e^h − 1): connect-the-dots of δ(ε) on the grid k·h.

    Its curve is δ(ε) at the grid's points, and never below it. The operator is 0 on 1 and on e^ε,
    except at ε = 0. So it is applied to g = δ − (1 − e^ε)₊, which below 0 is e^ε·(the reverse
    curve at −ε): the rounding is relative to g, where 1 − e^ε would leave mass in every round.
    """
    low, high = math.floor(least / interval), math.ceil(largest / interval)
    below, above = np.arange(low, min(high + 1, 0)), np.arange(max(low, 0), high + 1)
    under = np.exp(below * interval) * reverse(-below * interval)
    g = np.concatenate([under, curve(above * interval)])
    rises, growth = np.diff(g), math.expm1(interval)
    masses = np.empty(len(g))
    masses[0] = rises[0] / growth - g[0]
    masses[1:-1] = (rises[1:] - rises[:-1] * math.exp(interval)) / growth
    masses[-1] = rises[-1] / math.expm1(-interval)
    masses[max(-low, 0)] += 1.0
    return Dense(interval, low, np.maximum(masses, 0.0), float(g[-1]), True)


class Dense(pld_pmf.DensePLDPmf):  # type: ignore[misc]
    """The library's distribution on a grid, composed and converted faster."""

    @classmethod
    def of(cls, pmf: Any) -> Dense:
        """The same distribution."""
        return cls(
            pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass,
            pmf._pessimistic_estimate,
        )  # fmt: skip

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> Dense:
        """The loss of `num_times` releases; the truncated tails count as infinite losses.

        Without mass beyond 1 the transform to the K is at most 1. More, or NaN, is no bound: ∞.
        """
        if not num_times * (self._probs.sum() + self._infinity_mass - 1) <= EXCESS:
            return type(self)(self._discretization, 0, np.zeros(1), 1.0, self._pessimistic_estimate)
        low, high = self._essential(num_times, tail_mass_truncation)
        size = fft.next_fast_len(max(high - low + 1, self.size), real=True)
        whole = fft.irfft(fft.rfft(self._probs, size) ** num_times, size)
        lost = tail_mass_truncation - math.expm1(num_times * math.log1p(-self._infinity_mass))
        return type(self)(
            self._discretization, num_times * self._lower_loss + low,
            np.roll(whole, -low)[: high - low + 1], lost, self._pessimistic_estimate,
        )  # fmt: skip

    def _essential(self, count: int, tail: float) -> tuple[int, int]:
        """The grid points between which a sum of `count` losses lies, but for the mass `tail`.

        Chernoff's bound at twenty exponents: 1/n, 2/n, … of a grid of n points, as the library has
        them, or smaller ones around the best exponent of a normal sum, where that is small.
        """
        margin, places = math.log(2 / tail), np.arange(self.size)
        variance = float(self._probs @ places**2 - (self._probs @ places) ** 2)
        best = math.sqrt(2 * margin / (count * variance)) if variance > 0 else math.inf
        step = min(1 / self.size, best / 4)
        tilts = np.full((20, self.size), np.exp(places * step))
        np.multiply.accumulate(tilts, axis=0, out=tilts)
        exponents = np.arange(1, 21) * step
        high = (count * np.log(tilts @ self._probs) + margin) / exponents
        low = -(count * np.log((1 / tilts) @ self._probs) + margin) / exponents
        return max(0, math.floor(low.max())), min((self.size - 1) * count, math.ceil(high.min()))

    def tilted(self, theta: float) -> tuple[float, float, Dense]:
        """(log M, its error, p·e^{θℓ}/M), M = Σ p·e^{θℓ} of the finite losses.

        The error, also that of each new mass, is relative, and below 2^−50 times 1 + |θℓ|.
        """
        exponents = theta * (self._lower_loss + np.arange(self.size)) * self._discretization
        largest = float(exponents[self._probs > 0].max())
        masses = self._probs * np.exp(np.minimum(exponents - largest, 0.0))
        total, error = float(masses.sum()), 2.0**-50 * (1 + float(np.abs(exponents).max()))
        tilted = type(self)(self._discretization, self._lower_loss, masses / total, 0.0, True)
        return largest + math.log(total), error, tilted

    def divergences(self, orders: np.ndarray) -> np.ndarray:
        """D_α = log(Σ p·e^{(α−1)ℓ})/(α − 1) of the finite losses ℓ, each rounded up.

        The error of a sum is below n·2^−52 of it. Σ p = 1 is not used: negative masses count as 0,
        so that Σ p may be larger, and D_α would be too small.
        """
        losses = (self._lower_loss + np.arange(self.size)) * self._discretization
        there = self._probs > 0
        losses, probs = losses[there], self._probs[there]
        with np.errstate(over="ignore"):
            moments = np.array([probs @ np.exp(below * losses) for below in orders - 1])
        logs = np.log(moments * (1 + self.size * 2.0**-52))
        return np.asarray(np.maximum(logs, 0.0) / (orders - 1))

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """∞mass + Σ p·(1 − e^{ε−ℓ})₊, from 0 to 1, and 1 where that is no number."""
        found = np.nan_to_num(super().get_delta_for_epsilon(epsilon), nan=1.0)
        return np.clip(found, 0.0, 1.0)

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The least ε ≥ 0 for which the distribution's δ is at most this one.

        Above the loss ℓ, δ(ε) = U − e^ε·L, with U the mass of larger losses and L its mass times
        e^−loss. So ε = log((U − δ)/L) for the first ℓ, from above, that this reaches.
        """
        if not (self._infinity_mass <= delta and math.isfinite(self._probs.sum())):
            return math.inf
        last = self._lower_loss + self.size - 1
        count = min(self.size, max(last, -1) + 1)  # of losses that are not negative
        losses = (last - np.arange(count)) * self._discretization
        masses = self._probs[::-1][:count]
        upper = np.cumsum(np.append(self._infinity_mass, masses)) - delta
        lower = np.cumsum(np.append(0.0, np.exp(-losses) * masses))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where((upper > 0) & (lower > 0), np.log(upper) - np.log(lower), -math.inf)
        met = np.append(found[:-1] >= losses, True)
        lost = np.append((upper[1:] >= 0) & (lower[1:] == 0), True)  # e^−loss is zero
        if np.argmax(lost) < np.argmax(met):
            return float(losses[np.argmax(lost)])
        return max(0.0, float(found[np.argmax(met)]))
