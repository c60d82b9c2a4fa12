"""Lower bounds on ε from inverted tests, and the fixed-variance Gaussian bound of client canaries.

`p(level)` is the probability of evidence this strong if privacy were no worse than `level`; the
bound is the largest rejected level. Each test's docstring states its assumptions; docs/audit.md
proves its validity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.05  # a bound is wrong in at most this share of runs
DOUBT = 1e-4  # a p-value of "no leak" above it gives the bound 0
LARGEST = 1000.0  # levels above it are not searched
CAP = 8.0  # deviations that one round may count towards a leak: the limit of float64

PValue = Callable[[float], float]


def largest_rejected(p_value: PValue, alpha: float = ALPHA, most: float = LARGEST) -> float:
    """sup{level: p(level) ≤ α} for a p-value that increases with the level; 0 if there is none.

    >>> round(largest_rejected(lambda level: math.exp(level - 10), 0.05), 3)
    7.004
    """
    if p_value(0.0) > alpha:
        return 0.0
    low, high = 0.0, 1.0
    while high < most and p_value(high) <= alpha:
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= alpha else (low, middle)
    return low


def _solve(reached: Callable[[float], bool]) -> float:
    """The largest number that has not `reached` yet, to one part in 10⁹."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return low


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), of N(0, 1) against N(μ, 1)."""
    from scipy.special import log_ndtr, ndtr

    if mu <= 0:
        return 0.0
    lost = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
    return max(float(ndtr(mu / 2 - epsilon / mu)) - lost, 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε of N(0, 1) against N(μ, 1) at δ, rounded down.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3), gaussian_epsilon(0.0, 1e-5)
    (4.377, 0.0)
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return _solve(lambda epsilon: gaussian_delta(mu, epsilon) <= delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose ε at δ is at most this.

    >>> round(gaussian_mu(4.377, 1e-5), 3)
    1.0
    """
    return _solve(lambda mu: gaussian_epsilon(mu, delta) > epsilon)


@dataclass(frozen=True)
class Aligned:
    """Alignment of a release y with its canaries' sum Σc = length·e: t = √(d−1)·⟨e, y⟩/‖y_⊥‖.

    `length` is in units of one canary's message. If everything else in y is independent of the
    direction e, t is Student's t with d − 1 degrees of freedom, shifted by the canaries.
    """

    length: float
    t: float
    dim: int

    @classmethod
    def of(cls, canaries: np.ndarray, release: np.ndarray) -> list[Aligned]:
        """From the sum of canaries of length 1; empty if there is nothing to compare."""
        length, size = float(np.linalg.norm(canaries)), float(np.linalg.norm(release))
        if length == 0 or size == 0 or len(release) < 2:
            return []
        along = float(canaries @ release) / length
        across = math.sqrt(max(size**2 - along**2, (1e-9 * size) ** 2))
        return [cls(length, math.sqrt(len(release) - 1) * along / across, len(release))]


def alignment_p(rounds: Sequence[Aligned], mu: float) -> float:
    """P(canaries at least this visible) if a canary's μ = length/noise is at most this per round.

    Assumes isotropic Gaussian noise, and new directions per round, uniform on the sphere (Andrew
    et al. 2023). Exact in every dimension, whatever other clients send and however it depends on
    earlier rounds: given the past, t is at most a noncentral t.
    """
    from scipy.special import nctdtr, ndtr, ndtri

    if not rounds:
        return 1.0
    lengths, t, dims = np.array([(seen.length, seen.t, seen.dim) for seen in rounds]).T
    scores = np.minimum(ndtri(nctdtr(dims - 1, mu * lengths, t)), CAP)
    return float(ndtr(-(lengths @ scores) / np.linalg.norm(lengths)))


def alignment_mu(rounds: Sequence[Aligned], alpha: float = ALPHA) -> float:
    """The lower bound on μ of one canary in one round; 0 if no leak cannot be ruled out."""
    if alignment_p(rounds, 0.0) > DOUBT:
        return 0.0
    return largest_rejected(lambda mu: alignment_p(rounds, mu), alpha)


def estimated_mu(rounds: Sequence[Aligned]) -> float:
    """Σ length·t / Σ length²: approximately √d times a canary's mean cosine with its release."""
    if not rounds:
        return 0.0
    weights = sum(seen.length**2 for seen in rounds)
    return max(sum(seen.length * seen.t for seen in rounds) / weights, 0.0)


def chance_at_least(hits: int, trials: int, alpha: float) -> float:
    """An exact lower bound on a probability.  Clopper and Pearson 1934."""
    from scipy.special import betaincinv

    return float(betaincinv(hits, trials - hits + 1, alpha)) if hits else 0.0


def chance_at_most(hits: int, trials: int, alpha: float) -> float:
    """An exact upper bound on a probability.  Clopper and Pearson 1934."""
    from scipy.special import betaincinv

    return float(betaincinv(hits + 1, trials - hits, 1 - alpha)) if hits < trials else 1.0
