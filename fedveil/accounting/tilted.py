"""Compositions at a δ that is not far above the rounding of a convolution.

A convolution of K rounds errs in δ by about K·1e-16, whatever δ is. With masses that are tilted
towards the tail, the error is relative to a Rényi bound on δ, and so to δ itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.accounting.events import ORDERS
from fedveil.accounting.losses import Renyi, least_epsilon
from fedveil.accounting.sampled import Dense, gaussian_curve

THETAS = np.array(ORDERS) - 1
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
        """The larger one of both directions, at the order with the smallest Rényi bound on δ."""
        bounds = THETAS * (self.bound.divergences - epsilon) + np.log(_largest(THETAS))
        found = self._curve(float(THETAS[np.argmin(bounds)]))(epsilon)
        return min(found, self.bound.get_delta_for_epsilon(epsilon))

    def get_epsilon_for_delta(self, delta: float) -> float:
        """By bisection, at the order with the smallest Rényi bound on ε."""
        rough = self.bound.get_epsilon_for_delta(delta)
        if not 0 < rough < math.inf:
            return rough
        room = np.log(_largest(THETAS)) - math.log(delta - self.bound.escape)
        theta = float(THETAS[np.argmin(self.bound.divergences + room / THETAS)])
        return min(rough, least_epsilon(self._curve(theta), delta))

    def _curve(self, theta: float) -> Callable[[float], float]:
        once = dict.fromkeys(self.once)
        tails = [Tail.of(masses, self.count, self.first, theta) for masses in once]
        return lambda epsilon: max(tail.delta(epsilon) for tail in tails)


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
        slack = (2 * (count + 1) * ROUNDING + whole._infinity_mass) * float(_largest(theta))
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
        return np.asarray(np.where((exponents > 600) & (curve > 0), _largest(self.theta), weights))


def _largest(theta: Any) -> Any:
    """θ^θ/(1+θ)^{1+θ}, the largest value of e^{−θx}·(1 − e^{−x}).

    >>> round(float(_largest(1.0)), 6)
    0.25
    """
    return np.exp(theta * np.log(theta) - (1 + theta) * np.log1p(theta))
