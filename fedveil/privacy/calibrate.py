"""Choose the noise for a budget: the least level that keeps ε, to 0.5%, never on the wrong side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedveil.errors import UserError
from fedveil.privacy import accounting
from fedveil.recipe import Recipe, View

TOLERANCE = 0.005


@dataclass(frozen=True)
class Budget:
    """(ε, δ): what a run may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        accounting.check_epsilon(self.epsilon)
        accounting.check_delta(self.delta)


def settle(
    recipe: Recipe,
    budget: Budget,
    rounds: int,
    dim: int,
    population: int,
    view: View = "models",
) -> Recipe:
    """The recipe with the least noise that spends at most the budget in all rounds.

    Truncated noise may use up half of δ for leaving its support.
    """
    truncation = budget.delta / (2 * max(rounds, 1))

    def at(level: float) -> Recipe:
        return recipe.with_noise(level, dim, truncation)

    def excess(level: float) -> float:
        spent = at(level).spent(dim, population, rounds, view)
        return accounting.epsilon(spent, budget.delta) - budget.epsilon

    return at(least_level(excess))


def least_level(excess: Callable[[float], float]) -> float:
    """The least level with excess ≤ 0, for an excess that falls as the level grows.

    >>> 2.0 <= least_level(lambda level: 2.0 - level) <= 2.0 * (1 + TOLERANCE)
    True
    """
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > 2.0**40:
            raise UserError(
                "No amount of noise meets this budget; allow a larger epsilon or delta."
            )
    low = high / 2
    while high > 2.0**-20 and excess(low) <= 0:
        low, high = low / 2, low
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(middle) <= 0 else (middle, high)
    return high
