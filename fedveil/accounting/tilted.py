"""Compositions at a δ that is not far above the rounding of a convolution.

A convolution of K rounds errs in δ by about K·1e-16, whatever δ is. With masses that are tilted
towards the tail, the error is relative to a Rényi bound on δ, and so to δ itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedveil.accounting.events import ORDERS
from fedveil.accounting.losses import Renyi, _least_epsilon
from fedveil.accounting.sampled import Dense, gaussian_curve

ROUNDING = 1e-15  # of δ per round of a composition: four times the largest error observed
CURVE = 1e-9  # relative error of a curve, and of what one round's masses make of it


@dataclass(frozen=True)
class Tilted:
    """`count` rounds with these losses in either direction, after a Gaussian release.

    Never above the Rényi bound `bound`, whose best order is the one that the masses are tilted by.
    """

    once: tuple[Dense, ...]
    count: int
    first: float  # the ratio of the Gaussian release; ∞ without one
    bound: Renyi

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """The larger one of both directions."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        _, order = compute_delta(ORDERS, self.bound.divergences, epsilon)
        return min(self._at(order, epsilon), self.bound.get_delta_for_epsilon(epsilon))

    def get_epsilon_for_delta(self, delta: float) -> float:
        """By bisection, at the order that is best for this δ."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        rough = self.bound.get_epsilon_for_delta(delta)
        if not 0 < rough < math.inf:
            return rough
        left = delta - self.bound.escape
        _, order = compute_epsilon(ORDERS, self.bound.divergences, left)
        tails = self._tails(order)
        return min(rough, _least_epsilon(lambda at: max(one.delta(at) for one in tails), delta))

    def _at(self, order: float, epsilon: float) -> float:
        return max(one.delta(epsilon) for one in self._tails(order))

    def _tails(self, order: float) -> list[Tail]:
        once = dict.fromkeys(self.once)
        return [Tail.of(masses, self.count, self.first, order - 1) for masses in once]


@dataclass(frozen=True)
class Tail:
    """δ(ε) = m_∞ + M^K·e^{−θε}·Σ_ℓ p_θ*ᴷ(ℓ)·e^{θ(ε−ℓ)}·δ₁(ε − ℓ), p_θ = p·e^{θℓ}/M, M = Σ p·e^{θℓ}.

    δ₁ is the curve of the first release, or (1 − e^y)₊. Its product with e^{θy} is at most C(θ) =
    θ^θ/(1+θ)^{1+θ} times the release's moment: an error of Σ p_θ*ᴷ is relative to a Rényi bound.
    """

    masses: Dense
    theta: float
    scale: float  # log of M^K and of the moment of the first release, rounded up
    before: float  # log of the moment of the first release
    slack: float
    infinite: float
    first: float

    @classmethod
    def of(cls, once: Dense, count: int, first: float, theta: float) -> Tail:
        """`count` rounds with these losses."""
        moment, error, tilted = once.tilted(theta)
        whole, before = tilted.self_compose(count), theta * (theta + 1) / (2 * first**2)
        slack = (2 * (count + 1) * ROUNDING + whole._infinity_mass) * _largest(theta)
        infinite = -math.expm1(count * math.log1p(-once._infinity_mass))
        scale = count * (moment + error) + before + CURVE
        return cls(whole, theta, scale, before, slack, infinite, first)

    def delta(self, epsilon: float) -> float:
        """The sum, and what rounding and the tails that are left out may have taken from it."""
        losses = (
            self.masses._lower_loss + np.arange(self.masses.size)
        ) * self.masses._discretization
        found = max(float(self.masses._probs @ self._weights(epsilon - losses)), 0.0)
        scale = math.exp(min(self.scale - self.theta * epsilon, 700.0))
        return self.infinite + scale * (found + self.slack)

    def _weights(self, at: np.ndarray) -> np.ndarray:
        """e^{θy}·δ₁(y) over the moment of the first release; its largest value where e^{θy} is."""
        exponents = self.theta * at - self.before
        if math.isinf(self.first):
            curve = -np.expm1(np.minimum(at, 0.0))
        else:
            curve = gaussian_curve(self.first, at)
        weights = np.exp(np.minimum(exponents, 600.0)) * curve
        return np.where((exponents > 600) & (curve > 0), _largest(self.theta), weights)


def _largest(theta: float) -> float:
    """θ^θ/(1+θ)^{1+θ}, the largest value of e^{−θx}·(1 − e^{−x}).

    >>> round(_largest(1.0), 6)
    0.25
    """
    return math.exp(theta * math.log(theta) - (1 + theta) * math.log1p(theta))
