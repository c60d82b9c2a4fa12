"""Choose the noise for a budget: the least level that keeps ε, to 0.5%, never on the wrong side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedveil.errors import UserError
from fedveil.privacy import accounting
from fedveil.privacy.statement import guarantee
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


def settled(
    recipe: Recipe, budget: Budget | None, rounds: int, dim: int, population: int
) -> Recipe:
    """The recipe with its noise settled: calibrated to the budget, or as it is and within it."""
    if budget is None:
        if not recipe.noise.settled:
            raise UserError(
                f"{recipe.name} is private but has no noise yet; give epsilon (and delta), "
                "or the amount of noise."
            )
        return recipe
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise, so it cannot keep epsilon = {budget.epsilon}; "
            "use a private algorithm such as dp_fedavg, or leave epsilon out."
        )
    if recipe.noise.settled:
        return _within(recipe, budget, rounds, dim, population)
    return settle(recipe, budget, rounds, dim, population)


def _within(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """Noise that is settled already is kept if it keeps the budget."""
    spent = guarantee(recipe, dim, population, rounds, budget.delta)
    if not spent.private:
        raise UserError(
            f"{recipe.name} cannot keep epsilon = {budget.epsilon:.3g}, since {spent.reason}; "
            "leave epsilon out, or use another algorithm."
        )
    if spent.epsilon > budget.epsilon:
        raise UserError(
            f"{recipe.name} with the noise it was given spends epsilon = {spent.epsilon:.3g} in "
            f"{rounds} rounds, over the budget of {budget.epsilon:.3g}; leave the amount of noise "
            "out to have it calibrated, or play fewer rounds."
        )
    return recipe


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


def sensible_delta(population: int) -> float:
    """1e-5, or a tenth of 1/population where that is smaller.

    >>> sensible_delta(3000), sensible_delta(60_000)
    (1e-05, 1.6666666666666667e-06)
    """
    return min(1e-5, 0.1 / population)
