"""The noise of a round before it is drawn: E‖noise‖/r on the mean, for every kind of noise."""

from __future__ import annotations

import math

import numpy as np

from fedveil.errors import UserError
from fedveil.parts.discrete import Binomial, DiscreteGaussian, TruncatedDiscreteLaplace
from fedveil.parts.noise import Gaussian, RoundedGaussian, Silent, grid_of, settled_amount
from fedveil.recipe import Recipe


def noise_norm(recipe: Recipe, dim: int, population: int) -> float:
    """√(d − ½)·σ/r with σ the deviation of a coordinate of the sum: E‖N(0, σ²I)‖ to O(1/d)."""
    expected = recipe.cohort.expected(population)
    return math.sqrt(dim - 0.5) * deviation(recipe, dim, population) / expected


def deviation(recipe: Recipe, dim: int, population: int) -> float:
    """σ of one coordinate of a round's sum, with settled noise."""
    noise, message = recipe.noise, recipe.message(dim)
    match noise:
        case Silent():
            return 0.0
        case Gaussian():
            return noise.deviation(message) * math.sqrt(_shares(recipe, population))
        case RoundedGaussian():
            return math.hypot(noise.deviation(message), grid_of(message) / math.sqrt(12))
        case TruncatedDiscreteLaplace():
            each = noise.variance(message)
        case Binomial():
            each = noise.variance()
        case DiscreteGaussian():
            each = _cut_variance(
                settled_amount(noise, noise.sigma), settled_amount(noise, noise.support)
            )
        case _:
            raise UserError(f"A plan does not know how large noise of {type(noise).__name__} is.")
    return grid_of(message) * math.sqrt(each * recipe.cohort.expected(population))


def _shares(recipe: Recipe, population: int) -> float:
    """E max(arrivals/r, 1) ≈ 1 + √((1 − q)/(2πr)): clients above the mean bring noise as well."""
    if recipe.noise.at == "server" or recipe.cohort.fixed:
        return 1.0
    expected = recipe.cohort.expected(population)
    return 1 + math.sqrt((1 - expected / population) / (2 * math.pi * expected))


def _cut_variance(sigma: float, support: int) -> float:
    """Σ y²·P(y) of exp(−y²/(2σ²)) on −m..m."""
    y = np.arange(-support, support + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (y / sigma) ** 2)
    return float((weights * y**2).sum() / weights.sum())
