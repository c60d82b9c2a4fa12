"""Expected signal of a round: ‖Σ b_i‖/r of bounded updates b_i, from two numbers.

With m = ‖mean of b_i over all n clients‖ and e = mean of ‖b_i‖², a sampled cohort of r has

    E‖Σ_{i∈S} b_i / r‖² = m² + (1 − r/n)·e/r                        Poisson
                          m² + (1 − r/n)·(e − m²)/r · n/(n−1)       fixed size
                          m²                                        everyone

Only m is a common direction. The rest is sampling variance and shrinks as the cohort grows.
If only a < r take part, because others have reached their cap, r is a here and the norm a/r of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedveil.accounting.rounding import short
from fedveil.errors import UserError
from fedveil.parts.bound import Bound
from fedveil.parts.checks import check, positive
from fedveil.parts.cohort import Cohort
from fedveil.recipe import Recipe


@dataclass(frozen=True)
class Spread:
    """m² and e of a population's bounded updates."""

    mean: float  # ‖mean of b_i‖²
    square: float  # mean of ‖b_i‖²

    @classmethod
    def measured(cls, signal: float, square: float, cohort: Cohort, population: int) -> Spread:
        """Estimate m² from a round: the squared signal minus the expected sampling variance.

        The estimate of one round may be negative: cutting it at 0 would bias the mean of many.
        """
        chance, weight = sampling_variance(cohort, population)
        own = (signal**2 - chance * square) / (1 - chance * weight)
        return cls(min(own, square), square)

    @property
    def cosine(self) -> float:
        """m²/e: mean cosine of two clients' updates, weighted by their norms."""
        return self.mean / self.square if self.square > 0 else 0.0

    def signal(
        self, recipe: Recipe, dim: int, population: int, present: float | None = None
    ) -> float:
        """√E‖Σ messages/r‖² for the recipe's cohort, with the variance of rounding to a grid.

        For `present` participants. [default: r, as many as expected]
        """
        expected = recipe.cohort.expected(population)
        present = expected if present is None else present
        chance, weight = sampling_variance(recipe.cohort, population, present)
        drawn = chance * (self.square - weight * self.mean)
        added = rounding(recipe, dim) / present
        return present / expected * math.sqrt(max(self.mean + drawn + added, 0.0))


def sampling_variance(
    cohort: Cohort, population: int, present: float | None = None
) -> tuple[float, float]:
    """(c, w) such that sampling adds c·(e − w·m²) to the squared norm of the mean update."""
    present = cohort.expected(population) if present is None else present
    chance = (1 - present / population) / present
    if not cohort.fixed:
        return chance, 0.0
    return chance * population / max(population - 1, 1), 1.0


def rounding(recipe: Recipe, dim: int) -> float:
    """What stochastic rounding adds to E‖b‖²."""
    return recipe.quantize.rounding_variance(recipe.message(dim))


class UpdateModel(Protocol):
    """Updates before the bound: assumed, or measured by a pilot."""

    def spreads(self, bound: Bound, dim: int) -> Sequence[Spread]:
        """m² and e after this bound: one for all rounds, or one per round."""

    def describe(self) -> str:
        """Where the numbers come from."""


@dataclass(frozen=True)
class AssumedUpdates:
    """Updates of equal norm with equal pairwise cosines, in every round.

    Without a norm they are assumed to be longer than any bound.
    """

    cosine: float
    norm: float | None = None

    def __post_init__(self) -> None:
        check("The plan", "cosine", self.cosine, 0 < self.cosine <= 1, "above 0 and at most 1")
        if self.norm is not None:
            positive("The plan", "norm", self.norm)

    def spreads(self, bound: Bound, dim: int) -> Sequence[Spread]:
        """E‖b‖² = ‖b‖² and ‖E b‖² = cosine·‖b‖²."""
        square = _bounded(self.norm, bound, dim) ** 2
        return (Spread(self.cosine * square, square),)

    def describe(self) -> str:
        """The assumption."""
        length = "norms above the bound" if self.norm is None else f"norm {short(self.norm)}"
        return (
            f"assumed: {length}, cosine {short(self.cosine)} between clients. Measure both with "
            "--pilot, or set --cosine and --norm"
        )


@dataclass(frozen=True, eq=False)
class MeasuredUpdates:
    """Norms before the bound and cosines after it, per round, from a pilot."""

    # Norms under an adaptive bound are rescaled to its first threshold.
    norms: tuple[Tensor, ...]
    cosines: tuple[float, ...]
    source: str

    def spreads(self, bound: Bound, dim: int) -> Sequence[Spread]:
        """E‖b‖² for the given bound, with the cosine measured under the pilot's own bound."""
        squares = [_mean_square(norms, bound, dim) for norms in self.norms]
        return [
            Spread(cosine * square, square)
            for cosine, square in zip(self.cosines, squares, strict=True)
        ]

    @property
    def norm(self) -> float:
        """The mean norm before the bound."""
        return float(torch.cat(self.norms).mean())

    @property
    def cosine(self) -> float:
        """The mean over rounds."""
        return sum(self.cosines) / len(self.cosines)

    def describe(self) -> str:
        """The pilot and its means."""
        return (
            f"measured by {self.source}: mean norm {short(self.norm, 3)}, mean cosine "
            f"{short(self.cosine, 2)} between two clients"
        )


def _mean_square(norms: Tensor, bound: Bound, dim: int) -> float:
    return float(_lengths(norms, bound, dim).square().mean()) if len(norms) else 0.0


def _lengths(norms: Tensor, bound: Bound, dim: int) -> Tensor:
    """‖b‖ of updates with these norms; for a non-radial bound, an upper limit."""
    if bound.radial:
        return bound.scale(norms) * norms
    return norms.clamp_max(bound.norms(dim).l2)


def _bounded(norm: float | None, bound: Bound, dim: int) -> float:
    if norm is not None:
        length = torch.tensor([norm], dtype=torch.float64)
        return float(_lengths(length, bound, dim))
    norms = bound.norms(dim)
    if not norms.bounded:
        raise UserError("This algorithm does not bound updates. Give their norm with --norm.")
    return norms.l2
