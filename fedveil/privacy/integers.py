"""Integer noise against integer moves: how a whole vector of bounded moves shifts a product law.

Neighbours' messages differ by whole numbers Δ_1..Δ_d of which only norms are known. Every bound
here is of one form: a coordinate that moves by j costs c(j), so Σ c(|Δ_i|) is at most
Δ₁·max_j c(j)/j, and at most Δ₂²·max_j c(j)/j², with j from 1 to Δ∞.
"""

from __future__ import annotations

import math

import numpy as np

from fedveil.privacy.events import ORDERS
from fedveil.privacy.norms import Norms

FEW = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 30.0, 64.0, 256.0, 1024.0)  # for slow sums
ALPHAS = np.array(ORDERS)[:, None]  # against moves in a row


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
    """The chance that a moved message lies where the other one cannot.

    `masses` are those of noise on −m..m, in order.
    """
    reach = int(steps.linf)
    if reach >= len(masses):
        return 1.0
    top = np.cumsum(masses[::-1][:reach])
    if top[-1] >= 1:
        return 1.0
    return -math.expm1(-float(worst(-np.log1p(-top), steps)))


def laplace_divergences(alpha: float, normalizer: float, steps: Norms) -> np.ndarray:
    """Bounds on D_a over the common support of P(y) = e^{−α|y|}/Z and its moves, for each order a.

    Σ_y P(y)^a·P(y − j)^{1−a} over all whole y, of which the common support is a part, is three
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
    """D_a over the common support of noise with these masses on −m..m and its moves, summed up.

    Σ_y P(y)·(P(y)/P(y − j))^{a−1}, for the orders in FEW; ∞ at the others, which costs little.
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
    """The same for the law given that nothing escaped, which is `escape` away from the real one.

    D_a grows by a/(a − 1)·log(1/(1 − escape)).
    """
    orders = ALPHAS[:, 0]
    grown = values + orders / (orders - 1) * -math.log1p(-escape)
    return tuple(float(value) for value in grown)
