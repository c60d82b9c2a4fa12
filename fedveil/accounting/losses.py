"""Privacy losses without a class in dp-accounting: mixtures over observed coins, Rényi bounds.

Each has the two methods of the library's PrivacyLossDistribution: ε for a δ, and δ for an ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedveil.accounting.events import ORDERS

LARGEST = 2000.0  # a larger ε counts as no guarantee
SMALL = 0.01  # a share of δ that rounding may take before another bound is computed


class PrivacyLoss(Protocol):
    """An upper bound on the hockey-stick divergence between neighbours."""

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The least ε for this δ, or an upper bound on it."""

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The least δ for this ε, or an upper bound on it."""


@dataclass(frozen=True)
class InfiniteLoss:
    """No guarantee: ε = ∞ and δ = 1."""

    def get_epsilon_for_delta(self, delta: float) -> float:
        """None is finite."""
        return math.inf

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """Everything may be lost."""
        return 1.0


@dataclass(frozen=True)
class Best:
    """Several bounds on one divergence: the smallest one holds."""

    losses: tuple[PrivacyLoss, ...]

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The smallest of them; ∞ without any."""
        return min(
            (float(loss.get_epsilon_for_delta(delta)) for loss in self.losses), default=math.inf
        )

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The smallest of them; 1 without any."""
        return min(
            (float(loss.get_delta_for_epsilon(epsilon)) for loss in self.losses), default=1.0
        )


@dataclass(frozen=True)
class Worst:
    """Bounds on the divergences of several pairs of neighbours: the largest one holds for all."""

    losses: tuple[PrivacyLoss, ...]

    def get_epsilon_for_delta(self, delta: float) -> float:
        """The largest of them."""
        return max(float(loss.get_epsilon_for_delta(delta)) for loss in self.losses)

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The largest of them."""
        return max(float(loss.get_delta_for_epsilon(epsilon)) for loss in self.losses)


@dataclass(frozen=True)
class Rounded:
    """A loss whose δ is computed up to `slack`: float64 rounding in a long convolution.

    Where the slack is more than a hundredth of δ, the smaller one of this and another bound holds.
    """

    loss: PrivacyLoss
    slack: float
    other: Callable[[], PrivacyLoss]

    def get_epsilon_for_delta(self, delta: float) -> float:
        """At δ minus the slack, or by the other bound."""
        left = delta - self.slack
        found = float(self.loss.get_epsilon_for_delta(left)) if left > 0 else math.inf
        if self.slack < SMALL * delta:
            return found
        return min(found, float(self.other().get_epsilon_for_delta(delta)))

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The computed δ plus the slack, or that of the other bound."""
        found = min(float(self.loss.get_delta_for_epsilon(epsilon)) + self.slack, 1.0)
        if self.slack < SMALL * found:
            return found
        return min(found, float(self.other().get_delta_for_epsilon(epsilon)))


@dataclass(frozen=True)
class AfterGaussian:
    """A Gaussian release of this ratio before losses on a grid, in either direction.

    δ(ε) = m_∞ + Σ_j p_j·δ_G(ε − ℓ_j), with δ_G the curve of the Gaussian: it has no grid.
    """

    ratio: float
    masses: tuple[Any, ...]

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The larger one of both directions."""
        return max(self._delta(one, epsilon) for one in dict.fromkeys(self.masses))

    def _delta(self, masses: Any, epsilon: float) -> float:
        from fedveil.accounting.sampled import gaussian_curve

        losses = (masses._lower_loss + np.arange(masses.size)) * masses._discretization
        curve = gaussian_curve(self.ratio, epsilon - losses)
        return float(masses._infinity_mass + masses._probs @ curve)

    def get_epsilon_for_delta(self, delta: float) -> float:
        """By bisection."""
        return least_epsilon(self.get_delta_for_epsilon, delta)


@dataclass(frozen=True)
class Renyi:
    """D_α ≤ divergences at ORDERS, up to `escape` on one side and `distance` on both.

    δ(ε) = δ_Rényi(ε) + escape + (1 + e^ε)·distance.
    """

    divergences: np.ndarray
    escape: float
    distance: float

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The library's conversion, plus escape and distance."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        converted, _ = compute_delta(ORDERS, self.divergences, epsilon)
        return min(float(converted) + _aside(epsilon, self.escape, self.distance), 1.0)

    def get_epsilon_for_delta(self, delta: float) -> float:
        """Increase ε until it covers escape and distance at that same ε."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        def converted(left: float) -> float:
            return float(compute_epsilon(ORDERS, self.divergences, left)[0])

        return _paid(converted, delta, self.escape, self.distance)

    @staticmethod
    def mixed(divergences: np.ndarray, times: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """(1/(α − 1))·log Σ_j chance_j·e^{(α − 1)·j·D_α}: both worlds have the same coins."""
        from scipy.special import logsumexp

        below = np.array(ORDERS) - 1
        taken = np.where(times > 0, times, 1)[None, :]  # avoids ∞·0
        powers = np.where(times > 0, below[:, None] * divergences[:, None] * taken, 0.0)
        mixed = logsumexp(powers, b=chances[None, :], axis=1) / below
        return np.asarray(np.maximum(mixed, 0.0))


@dataclass(frozen=True)
class Aside:
    """A loss up to `escape` on one side and `distance` on both.

    δ(ε) = δ_loss(ε) + escape + (1 + e^ε)·distance.
    """

    loss: PrivacyLoss
    escape: float
    distance: float

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The loss's own δ, plus escape and distance."""
        aside = _aside(epsilon, self.escape, self.distance)
        return min(float(self.loss.get_delta_for_epsilon(epsilon)) + aside, 1.0)

    def get_epsilon_for_delta(self, delta: float) -> float:
        """Increase ε until it covers escape and distance at that same ε."""
        return _paid(self.loss.get_epsilon_for_delta, delta, self.escape, self.distance)


@dataclass(frozen=True)
class GaussianMixture:
    """A Gaussian release `times[j]` times with probability `chances[j]`; the count is observed.

    δ(ε) = Σ_j chance_j·[Φ(μ_j/2 − ε/μ_j) − e^ε·Φ(−μ_j/2 − ε/μ_j)] with μ_j = √times_j/ratio.
    Balle and Wang 2018, Thm. 8, for each j.
    """

    ratio: float
    times: np.ndarray
    chances: np.ndarray

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The sum over counts of at least one."""
        from scipy.special import log_ndtr, ndtr

        some = self.times > 0
        mu = np.sqrt(self.times[some]) / self.ratio
        lost = np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return float(self.chances[some] @ np.maximum(ndtr(mu / 2 - epsilon / mu) - lost, 0.0))

    def get_epsilon_for_delta(self, delta: float) -> float:
        """By bisection."""
        return least_epsilon(self.get_delta_for_epsilon, delta)

    @classmethod
    def once(cls, ratio: float) -> GaussianMixture:
        """A single Gaussian release."""
        return cls(ratio, np.ones(1), np.ones(1))


@dataclass(frozen=True)
class Weighted:
    """One of several losses, chosen by an observed coin: δ(ε) = Σ_j chance_j·δ_j(ε)."""

    chances: np.ndarray
    losses: tuple[PrivacyLoss, ...]

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The sum."""
        pairs = zip(self.chances, self.losses, strict=True)
        return float(sum(c * float(loss.get_delta_for_epsilon(epsilon)) for c, loss in pairs))

    def get_epsilon_for_delta(self, delta: float) -> float:
        """By bisection."""
        return least_epsilon(self.get_delta_for_epsilon, delta)


def _aside(epsilon: float, escape: float, distance: float) -> float:
    return escape + (1 + math.exp(min(epsilon, 700.0))) * distance


def _paid(
    epsilon_of: Callable[[float], float], delta: float, escape: float, distance: float
) -> float:
    """The least ε found with ε(δ − aside(ε)) ≤ ε; ∞ if the aside uses up δ."""
    epsilon = 0.0
    for _ in range(50):
        left = delta - _aside(epsilon, escape, distance)
        if left <= 0:
            return math.inf
        needed = float(epsilon_of(left))
        if needed <= epsilon or not math.isfinite(needed):
            return max(needed, epsilon)
        epsilon = needed * (1 + 1e-9)
    return math.inf


def least_epsilon(delta_of: Callable[[float], float], delta: float) -> float:
    """The least ε with δ(ε) ≤ δ, to one part in 10⁹ and never below it.

    >>> round(least_epsilon(lambda epsilon: math.exp(-epsilon), math.exp(-3)), 6)
    3.0
    """
    low, high = 0.0, 1.0
    if delta_of(low) <= delta:
        return low
    while not delta_of(high) <= delta:
        high *= 2
        if high > LARGEST:
            return math.inf
    low = _root(delta_of, delta, low, high) * (1 + 1e-9)
    if delta_of(low) <= delta:
        return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle) <= delta else (middle, high)
    return high


def _root(delta_of: Callable[[float], float], delta: float, low: float, high: float) -> float:
    """About the ε with δ(ε) = δ, by Brent's method on log δ(ε)."""
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        return math.log(max(delta_of(epsilon), 1e-300) / delta)

    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-10))
