"""Integer noise against integer moves: privacy of a vector of bounded moves.

Neighbours' messages differ by whole numbers Δ_1..Δ_d of which only norms are known. Every bound
here has one form: a coordinate that moves by j costs c(j), so Σ c(|Δ_i|) is at most
Δ₁·max_j c(j)/j, and at most Δ₂²·max_j c(j)/j², with j from 1 to Δ∞. Costs are logarithms of
moments, logarithms of probabilities not to escape, or squared distances of the normal
distributions that dominate a move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedveil.accounting.events import ORDERS
from fedveil.accounting.norms import Norms

FEW = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 30.0, 64.0, 256.0, 1024.0)  # for slow sums
ALPHAS = np.array(ORDERS)[:, None]  # against moves in a row
LEAST_TAIL = 2.0**-190  # scipy's normal quantile has been verified down to it
MOST_VALUES = 2**20  # of a distribution whose steps are examined individually
MILLS = 1.26  # above Φ(z)/φ(z) for z ≤ 0
ERROR = 2.0**-46  # of a log mass per value of a distribution, and of a normal quantile
ESCAPES = (1e-20, 1e-14, 1e-9)  # probabilities given up to omit the steps of the tails
BETTER = 1.002  # factor by which a ratio must improve to justify a larger escape


def moves(steps: Norms) -> np.ndarray:
    """1..Δ∞ for a sensitivity in grid steps."""
    return np.arange(1, int(steps.linf) + 1)


def worst(costs: np.ndarray, steps: Norms) -> np.ndarray:
    """max Σ c(|Δ_i|) over moves within the norms, from c(1), …, c(Δ∞) in the last axis.

    >>> float(worst(np.array([1.0, 4.0]), Norms(9, l1=6, l2=3, linf=2, grid=1.0)))
    9.0
    """
    j = moves(steps)
    by_sum = steps.l1 * np.max(costs / j, axis=-1)
    by_squares = steps.l2**2 * np.max(costs / j**2, axis=-1)
    return np.asarray(np.maximum(np.minimum(by_sum, by_squares), 0.0))


def escape(masses: np.ndarray, steps: Norms) -> float:
    """The probability that a moved message lies where the other one cannot.

    `masses` are those of noise on −m..m, in order.
    """
    reach = int(steps.linf)
    if reach >= len(masses):
        return 1.0
    return _any_escape(np.cumsum(masses[::-1][:reach]) * _rounded_up(len(masses)), steps)


def _rounded_up(values: int = 0) -> float:
    """A factor that turns a computed sum of masses into an upper bound, for `values` values.

    The probability that any coordinate escapes grows by no larger factor than that of one of them.
    """
    return 1 + (values + 100) * ERROR


def _any_escape(chances: np.ndarray, steps: Norms) -> float:
    """The probability that any coordinate escapes; one that moves by j has chances[j−1]."""
    if chances.max(initial=0.0) >= 1:
        return 1.0
    found = -math.expm1(-float(worst(-np.log1p(-chances), steps)))
    return min(found * _rounded_up(), 1.0)


def laplace_divergences(alpha: float, normalizer: float, steps: Norms) -> np.ndarray:
    """Bounds on D_a over the common support of P(y) = e^{−α|y|}/Z and its moves, for each order a.

    Σ_y P(y)^a·P(y − j)^{1−a} over all whole y, which include the common support, is three
    geometric sums: y ≤ 0, 0 < y < j, y ≥ j.
    """
    j = moves(steps)[None, :]
    outer = 1 / -math.expm1(-alpha)
    low, high = -alpha * (1 - ALPHAS) * j, -alpha * ALPHAS * j
    slope = -alpha * (2 * ALPHAS - 1)
    between = np.exp(slope) * np.expm1(slope * (j - 1)) / np.expm1(slope)
    logs = low + np.log(outer * (1 + np.exp(high - low)) + between) - math.log(normalizer)
    return np.asarray(worst(logs, steps) / (ALPHAS[:, 0] - 1))


def divergences(masses: np.ndarray, steps: Norms) -> np.ndarray:
    """D_a over the common support of noise with these masses on −m..m and its moves, by summation.

    Σ_y P(y)·(P(y)/P(y − j))^{a−1}, for the orders in FEW; ∞ at the others, which loses little.
    """
    logs, few = np.log(masses), [ORDERS.index(order) for order in FEW]
    powers = np.array(FEW)[:, None] - 1
    costs = np.full((len(FEW), int(steps.linf)), np.inf)
    for j in moves(steps)[: len(masses) - 1]:
        growth = powers * (logs[j:] - logs[:-j])
        largest = growth.max(axis=1)
        costs[:, j - 1] = largest + np.log(np.exp(growth - largest[:, None]) @ masses[j:])
    values = np.full(len(ORDERS), np.inf)
    values[few] = worst(costs, steps) / powers[:, 0]
    return values


def conditioned(values: np.ndarray, escape: float) -> tuple[float, ...]:
    """The divergences given that nothing escaped, a law at distance `escape` from the actual one.

    D_a grows by a/(a − 1)·log(1/(1 − escape)).
    """
    orders = ALPHAS[:, 0]
    grown = values + orders / (orders - 1) * -math.log1p(-escape)
    return tuple(float(value) for value in grown)


class NormalSteps(NamedTuple):
    """A symmetric integer distribution as a stepped normal: Z(k − ½) = Φ⁻¹(P(Y < k)).

    `tails` are P(Y ≥ k) for k = 1, 2, …, rounded up. `steepest` is the largest Z(x) − Z(x − 1) over
    all x within k − ½ of zero. `whole` says whether the distribution ends where the tails do.
    """

    tails: np.ndarray
    steepest: np.ndarray
    whole: bool


def steps_of(logs: np.ndarray, whole: bool, rough: float = 0.0) -> NormalSteps | None:
    """The steps of a distribution with log weights `logs` at 0, 1, …, mirrored at −1, −2, ….

    Weights within a factor e^±rough of the true ones give steps not below the true ones. None if
    there are too many values to examine.
    """
    from scipy.special import ndtri

    if len(logs) > MOST_VALUES or not math.isfinite(rough):
        return None
    weights = np.exp(logs)
    beyond = np.cumsum(weights[:0:-1])[::-1]  # of the values from k on, smallest added first
    tails = beyond / (weights[0] + 2 * beyond[0])
    seen = tails >= LEAST_TAIL
    z = -ndtri(tails[seen])
    if not len(z):
        return None
    rises = np.append(2 * z[:1], np.diff(z)) + 2 * MILLS * rough
    slack = 2 * (MILLS * (len(logs) + 100) + 1) * ERROR
    steepest = np.maximum.accumulate(rises + slack)
    above = tails[seen] * (math.exp(rough) * _rounded_up(len(logs)))
    return NormalSteps(above, steepest, whole and bool(seen.all()))


class Normal(NamedTuple):
    """A Gaussian release of this ratio dominates, except with probability `escape`."""

    ratio: float
    escape: float


def dominating(
    law: NormalSteps | None, steps: Norms, cores: Iterable[int] = ()
) -> tuple[Normal, ...]:
    """Gaussian releases that dominate the law against moves within the norms, least escape first.

    One for each core, the values −m..m whose steps count. Without any, the smallest cores that
    respect ESCAPES. A larger escape must improve the ratio.
    """
    if law is None:
        return ()
    found: list[Normal] = []
    for core in sorted(cores or _cores(law, steps), reverse=True):
        escape = core_escape(law, steps, core)
        ratio = 1 / (float(law.steepest[core - 1]) * steps.l2)
        if escape < 1 and (not found or ratio > BETTER * found[-1].ratio):
            found.append(Normal(ratio, escape))
    return tuple(found)


def even_core(law: NormalSteps | None) -> tuple[int, ...]:
    """The largest core whose steps are hardly steeper than the step at zero."""
    if law is None:
        return ()
    return (int(np.searchsorted(law.steepest, 1.01 * law.steepest[0], side="right")),)


def core_escape(law: NormalSteps, steps: Norms, core: int) -> float:
    """1 − Π(1 − P(Y > core − |Δ_i|)), at most."""
    reach = int(steps.linf)
    return 1.0 if reach > core else _any_escape(law.tails[core - reach : core][::-1], steps)


def _cores(law: NormalSteps, steps: Norms) -> set[int]:
    """The smallest cores that respect ESCAPES, or the whole of a distribution that ends before."""
    last, found = len(law.tails), set()
    for most in ESCAPES:
        low, high = 0, last
        while high - low > 1:
            middle = (low + high) // 2
            enough = core_escape(law, steps, middle) <= most
            low, high = (low, middle) if enough else (middle, high)
        if law.whole or core_escape(law, steps, high) <= most:
            found.add(high)
    return found
