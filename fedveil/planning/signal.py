"""The signal of a round before it is played: ‖Σ b_i‖/r of bounded updates b_i, from two numbers.

With m = ‖mean of b_i over all n clients‖ and e = mean of ‖b_i‖², a drawn cohort of r has

    E‖Σ_{i∈S} b_i / r‖² = m² + (1 − r/n)·e/r                        Poisson
                          m² + (1 − r/n)·(e − m²)/r · n/(n−1)       fixed size
                          m²                                        everyone

Only m is direction; the rest is chance, and shrinks as the cohort grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Bound, Clip, Normalize, Unbounded
from fedveil.parts.checks import check, positive
from fedveil.parts.cohort import Cohort
from fedveil.parts.quantize import ConditionalRound, StochasticRound
from fedveil.recipe import Recipe


@dataclass(frozen=True)
class Spread:
    """m² and e of a population's bounded updates."""

    mean: float  # ‖mean of b_i‖²
    square: float  # mean of ‖b_i‖²

    @classmethod
    def seen(cls, signal: float, square: float, cohort: Cohort, population: int) -> Spread:
        """From a round of a population: its signal without what the draw adds on average.

        Of one round it may come out below 0: cut there, the mean of many would be too large.
        """
        chance, weight = draw_noise(cohort, population)
        own = (signal**2 - chance * square) / (1 - chance * weight)
        return cls(min(own, square), square)

    @property
    def cosine(self) -> float:
        """m²/e: of two clients' updates on average, weighted by their lengths."""
        return self.mean / self.square if self.square > 0 else 0.0

    def on_the_mean(self, recipe: Recipe, dim: int, population: int) -> float:
        """√E‖Σ messages/r‖² for the recipe's cohort; rounding to a grid adds its variance."""
        chance, weight = draw_noise(recipe.cohort, population)
        drawn = chance * (self.square - weight * self.mean)
        added = rounding(recipe, dim) / recipe.cohort.expected(population)
        return math.sqrt(max(self.mean + drawn + added, 0.0))


def draw_noise(cohort: Cohort, population: int) -> tuple[float, float]:
    """(c, w) such that a draw adds c·(e − w·m²) to the signal's square."""
    expected = cohort.expected(population)
    chance = (1 - expected / population) / expected
    if not cohort.fixed:
        return chance, 0.0
    return chance * population / max(population - 1, 1), 1.0


def rounding(recipe: Recipe, dim: int) -> float:
    """d·g²/6: what stochastic rounding to a grid g adds to E‖b‖², at coordinates of any size."""
    if not isinstance(recipe.quantize, StochasticRound | ConditionalRound):
        return 0.0
    grid = recipe.message(dim).grid or 0.0
    return dim * grid**2 / 6


class Updates(Protocol):
    """What is assumed or was seen of the updates before they are bounded."""

    def spreads(self, bound: Bound, dim: int) -> Sequence[Spread]:
        """Of the updates after this bound: one for all rounds, or one for each."""

    def told(self) -> str:
        """Where the numbers come from, in a sentence."""


@dataclass(frozen=True)
class Assumed:
    """Updates of one length whose pairs have one cosine, in every round.

    Without a length they are taken to be longer than any bound.
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

    def told(self) -> str:
        """The guess."""
        length = "longer than the bound" if self.norm is None else f"of length {self.norm:g}"
        return (
            f"assumed {length}, two of them at a cosine of {self.cosine:g}; a --pilot measures it, "
            "or say --cosine and --norm"
        )


@dataclass(frozen=True, eq=False)
class Seen:
    """Norms before the bound and the cosine after it, round by round, from a pilot."""

    norms: tuple[
        Tensor, ...
    ]  # of one threshold: those of an adaptive bound are scaled to its first
    cosines: tuple[float, ...]
    source: str

    def spreads(self, bound: Bound, dim: int) -> Sequence[Spread]:
        """E‖b‖² by the bound at hand; the cosine is taken to be that of the pilot's own bound."""
        squares = [_mean_square(norms, bound) for norms in self.norms]
        return [
            Spread(cosine * square, square)
            for cosine, square in zip(self.cosines, squares, strict=True)
        ]

    @property
    def norm(self) -> float:
        """The mean length before the bound."""
        return float(torch.cat(self.norms).mean())

    @property
    def cosine(self) -> float:
        """The mean over rounds."""
        return sum(self.cosines) / len(self.cosines)

    def told(self) -> str:
        """What was played."""
        return (
            f"{self.source}: updates of length {self.norm:.3g} on average, two of them at a cosine "
            f"of {self.cosine:.2g}"
        )


def _mean_square(norms: Tensor, bound: Bound) -> float:
    return float((bound.scale(norms) * norms).square().mean()) if len(norms) else 0.0


def _bounded(norm: float | None, bound: Bound, dim: int) -> float:
    if norm is not None:
        length = torch.tensor([norm], dtype=torch.float64)
        return float(bound.scale(length) * length)
    if isinstance(bound, Unbounded):
        raise UserError("Nothing bounds the updates; say how long they are with --norm.")
    return bound.norms(dim).l2


def stretched(bound: Bound, factor: float) -> Bound | None:
    """The bound with C times a factor; None where there is no C."""
    if isinstance(bound, Clip | Normalize):
        return replace(bound, norm=bound.norm * factor)
    if isinstance(bound, AdaptiveClip):
        return replace(bound, start=bound.start * factor)
    return None
