"""DP-LSGD: the number of local steps K, by Theorem 2's bound, Theorem 1's order and measured B/c.

The paper's T is the number of rounds, its β-smoothness is L here, and its σ²d is the squared norm
of the noise on the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS = (1, 2, 4, 8, 16, 25)  # the paper observes divergence beyond 25 (its Remark 2)


@dataclass(frozen=True)
class LSGDProblem:
    """Constants of Theorem 2."""

    smoothness: float  # L
    loss: float  # F(x_0), with losses of at least 0
    variance: float  # τ ≥ E‖∇F − ∇f_i‖²
    rate: float  # q
    cohort: float  # nq
    noise: float  # the norm of the noise on the mean
    rounds: int  # T
    clip: float  # c


@dataclass(frozen=True)
class StepChoice:
    """One K: the learning rate that Theorem 2 allows, the bias B/c there, and its bound."""

    steps: int
    learning_rate: float
    bias: float
    bound: float


def largest_rate(smoothness: float, steps: int) -> float:
    """η < 1/(20L), 1/(4LK) and, as its proof needs, 1/(√24·LK): DP-LSGD, Thm. 4."""
    return min(1 / (20 * smoothness), 1 / (5 * smoothness * steps))


def bound(problem: LSGDProblem, steps: int, learning_rate: float, second_moment: float) -> float:
    """4F/(TKη) + 16η²τL²K²/(nq) + 4(1 + Lη)(B²/q + σ²d)/(η²K).  DP-LSGD, Thm. 2."""
    length, eta = problem.smoothness, learning_rate
    perturbed = second_moment / problem.rate + problem.noise**2
    return (
        4 * problem.loss / (problem.rounds * steps * eta)
        + 16 * (eta * length * steps) ** 2 * problem.variance / problem.cohort
        + 4 * (1 + length * eta) * perturbed / (eta**2 * steps)
    )


def candidates(
    problem: LSGDProblem,
    second_moment: Callable[[int, float], float],
    among: Sequence[int] = STEPS,
) -> list[StepChoice]:
    """Every K with K² ≤ nq (Theorem 1's condition), at its largest rate."""
    found = []
    for steps in among:
        if steps > 1 and steps**2 > problem.cohort:
            continue
        eta = largest_rate(problem.smoothness, steps)
        square = second_moment(steps, eta)
        bias = math.sqrt(square) / problem.clip
        found.append(StepChoice(steps, eta, bias, bound(problem, steps, eta, square)))
    return found


def best(choices: Sequence[StepChoice]) -> StepChoice:
    """The K with the smallest bound."""
    return min(choices, key=lambda one: one.bound)


def order(rounds: int, dim: int, population: int, epsilon: float) -> float:
    """K = T·d/(nε)²: the order of K that is optimal without clipping bias.  DP-LSGD, Thm. 1.

    The theorem omits constants and logarithms, so this is only an order of magnitude.
    """
    return rounds * dim / (population * epsilon) ** 2
