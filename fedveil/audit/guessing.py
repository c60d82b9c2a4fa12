"""One-run auditing: fair coins include or exclude canaries, and the auditor guesses which.

Bounds the number of right guesses that a private mechanism allows: for (ε, δ), for a whole privacy
profile, and for a trade-off curve. Nothing else is assumed about the mechanism; canaries may affect
each other (docs/audit.md, "One run").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedveil.audit.bounds import ALPHA, DOUBT, largest_rejected

MOST = 50.0  # beyond this ε no number of guesses reveals more
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the canaries that may be guessed
TOLERANCE = 1e-6  # of the linear program's solution

Inverse = Callable[[float], float]
Profile = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Guesses:
    """Of `canaries` included by fair coins, `made` were guessed, `right` of them correctly.

    The number of guesses is fixed before anything is observed.
    """

    canaries: int
    made: int
    right: int


def guess(scores: np.ndarray, included: np.ndarray, made: int) -> Guesses:
    """Guess that the highest scores are included and that as many of the lowest are excluded."""
    order, half = np.argsort(scores, kind="stable"), made // 2
    ins, outs = order[len(order) - half :], order[:half]
    return Guesses(len(scores), 2 * half, int(included[ins].sum() + (~included[outs]).sum()))


def nothing_p(guesses: Guesses) -> float:
    """P(at least this many right guesses) if the release reveals nothing: a binomial tail."""
    from scipy.stats import binom

    return float(binom.sf(guesses.right - 1, guesses.made, 0.5))


def profile_p(guesses: Guesses, profile: Profile) -> float:
    """max P(at least this many right guesses) over all mechanisms that are (ε_j, δ_j)-DP for all j.

    Exact: a worst mechanism depends on the number of right guesses alone, so it solves a linear
    program of made + 1 unknowns. Never above Steinke et al. 2023, Thm. 5.2, where that is a bound.
    """
    from scipy.optimize import linprog

    r = guesses.made
    rows, limits = _constraints(guesses, profile)
    gain = np.zeros(rows.shape[1])
    gain[guesses.right : r + 1] = -1.0
    total = np.zeros((1, rows.shape[1]))
    total[0, : r + 1] = 1.0
    found = linprog(gain, rows, limits, total, [1.0], bounds=(0, None), method="highs")
    if not found.success:
        return 1.0
    return min(float(-found.fun) + TOLERANCE, 1.0)


def _constraints(guesses: Guesses, profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Σ_j (j·q_j − e^ε(r−j+1)·q_{j−1})₊ + Σ_j ((r−j)·q_j − e^ε(j+1)·q_{j+1})₊ ≤ m·δ, as rows.

    q_j is the probability of j right guesses. Each positive part is a column of its own.
    """
    from scipy.sparse import bmat, coo_matrix, csr_matrix, eye

    m, r = guesses.canaries, guesses.made
    j = np.arange(r)
    up = [coo_matrix((j + 1.0, (j, j + 1)), (r, r + 1)), coo_matrix((r - j, (j, j)), (r, r + 1))]
    blocks, limits = [], []
    for place, (epsilon, delta) in enumerate(profile):
        factor = math.exp(epsilon)
        moved = bmat([[up[0] - factor * up[1]], [up[1] - factor * up[0]]]) / m
        parts: list[object] = [None] * len(profile)
        sums: list[object] = [None] * len(profile)
        parts[place], sums[place] = -eye(2 * r), csr_matrix(np.ones((1, 2 * r)))
        blocks += [[moved, *parts], [csr_matrix((1, r + 1)), *sums]]
        limits += [np.zeros(2 * r), np.array([delta])]
    return bmat(blocks, format="csr"), np.concatenate(limits)


def one_run_epsilon(guesses: Guesses, delta: float, alpha: float = ALPHA) -> float:
    """The lower bound on ε at δ, for any mechanism; 0 if no leak cannot be ruled out."""
    if nothing_p(guesses) > DOUBT:
        return 0.0
    return largest_rejected(lambda e: profile_p(guesses, [(e, delta)]), alpha, MOST)


def gaussian_inverse(mu: float) -> Inverse:
    """x ↦ Φ(Φ⁻¹(x) − μ): the least mass in one world of an event with mass x in its neighbour."""
    from scipy.special import ndtr, ndtri

    return lambda mass: float(ndtr(ndtri(min(mass, 1.0)) - mu))


def profile_inverse(profile: Profile) -> Inverse:
    """x ↦ max_j (x − δ_j)·e^{−ε_j}: the same for any mechanism that is (ε_j, δ_j)-DP for all j."""
    epsilons, deltas = np.array(profile).T
    factors = np.exp(-epsilons)
    return lambda mass: max(float(np.max((mass - deltas) * factors)), 0.0)


def allowed(guesses: Guesses, chance: float, inverse: Inverse) -> bool:
    """Whether a trade-off curve allows this many right guesses with at least this probability.

    From the top down, the least mass that must lie at i right guesses follows from the mass above;
    a total above 1 is impossible.  Mahloujifar et al. 2024, Alg. 3.
    """
    m, r, v = guesses.canaries, guesses.made, guesses.right
    right, wrong = chance * v / m, chance * (r - v) / m
    for i in range(v - 1, -1, -1):
        needed = inverse(right)
        if needed <= wrong:
            break
        right += i / (r - i) * (needed - wrong)
        wrong = needed
    return right + wrong <= r / m


def trade_off_p(guesses: Guesses, inverse: Inverse) -> float:
    """A bound on P(at least this many right guesses) under a trade-off curve, to 0.1%."""
    if guesses.right == 0 or allowed(guesses, 1.0, inverse):
        return 1.0
    low, high = -60.0, 0.0  # log probabilities that are allowed, and not allowed
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(guesses, math.exp(middle), inverse) else (low, middle)
    return math.exp(high)


def trade_off_mu(guesses: Guesses, alpha: float = ALPHA) -> float:
    """The lower bound on μ of a mechanism whose trade-off curve is that of N(0, 1) and N(μ, 1)."""
    if nothing_p(guesses) > DOUBT:
        return 0.0
    return largest_rejected(lambda mu: trade_off_p(guesses, gaussian_inverse(mu)), alpha, MOST)


def number_of_guesses(canaries: int, mu: float) -> int:
    """The most promising even number of guesses if scores are N(0, 1) out and N(μ, 1) in.

    Depends on the claim and not on observations, so that bounds stay valid.
    """
    from scipy.special import ndtr

    hoped: dict[int, float] = {}
    for share in SHARES:
        made = max(2 * round(canaries * share / 2), 2)
        cut = _upper_quantile(share / 2, mu)
        inside, outside = float(ndtr(mu - cut)), float(ndtr(-cut))
        right = math.floor(made * inside / (inside + outside))
        hoped[made] = trade_off_mu(Guesses(canaries, made, right))
    return max(hoped, key=lambda made: (hoped[made], made))


def _upper_quantile(share: float, mu: float) -> float:
    """The point above which an even mixture of N(0, 1) and N(μ, 1) has this share."""
    from scipy.special import ndtr

    low, high = -10.0, mu + 10.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        above = 0.5 * float(ndtr(-middle)) + 0.5 * float(ndtr(mu - middle))
        low, high = (middle, high) if above > share else (low, middle)
    return low
