"""Expected noise of a round: E‖noise‖/r on the mean, for every noise part."""

from __future__ import annotations

import math

from fedveil.errors import UserError
from fedveil.recipe import Recipe


def noise_norm(
    recipe: Recipe, dim: int, population: int, rounds: int, present: float | None = None
) -> float | None:
    """√(d − ½)·σ/r, σ the standard deviation of a coordinate of the sum: E‖N(0, σ²I)‖ to O(1/d).

    For `present` participants. [default: as many as expected]  None if σ is not known.
    """
    found = _deviation(recipe, dim, population, rounds, present)
    return (
        None if found is None else math.sqrt(dim - 0.5) * found / recipe.cohort.expected(population)
    )


def deviation(recipe: Recipe, dim: int, population: int, rounds: int) -> float:
    """σ of one coordinate of a round's sum, with calibrated noise.

    For noise that is correlated over the rounds, σ of independent noise with the same sum.
    """
    found = _deviation(recipe, dim, population, rounds)
    if found is None:
        raise UserError(
            f"The noise {type(recipe.noise).__name__} does not give its standard deviation, which "
            "a pilot needs. Define its method deviation_of_sum, or leave the pilot out."
        )
    return found


def _deviation(
    recipe: Recipe, dim: int, population: int, rounds: int, present: float | None = None
) -> float | None:
    surplus = _surplus(recipe, population)
    messages = recipe.cohort.expected(population) if present is None else present
    return recipe.noise.deviation_of_run(recipe.message(dim), messages, surplus, rounds)


def _surplus(recipe: Recipe, population: int) -> float:
    """E max(arrivals/r, 1) ≈ 1 + √((1 − q)/(2πr)): clients above the mean add noise, too."""
    if recipe.cohort.fixed:
        return 1.0
    expected = recipe.cohort.expected(population)
    return 1 + math.sqrt((1 - expected / population) / (2 * math.pi * expected))
