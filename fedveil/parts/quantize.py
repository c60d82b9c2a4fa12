"""quantize: put a message on a grid, so that it fits a finite number of bits.

On a grid a message is whole numbers, the multiples of the grid step that it stands for, from the
client to the sum; sums of whole numbers are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.checks import check, count
from fedveil.privacy.norms import Norms

MOST_LEVELS = 2**30  # squares of steps and their sums stay within int64
RETRIES = 40  # of a rounding that came out too long, before it is cut towards zero


class Quantize(Protocol):
    """A map of bounded messages to messages, and what it does to their norms."""

    @property
    def rows_needed(self) -> bool:
        """Whether each message must be known, or their sum is enough."""

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Each row on the grid, as whole numbers (int64); `bound` is what a row can be at most."""

    def norms(self, bound: Norms) -> Norms:
        """What a quantized message can be at most, and its grid."""


@dataclass(frozen=True)
class Exact:
    """q = b."""

    rows_needed = False

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Nothing changes."""
        return rows

    def norms(self, bound: Norms) -> Norms:
        """Nothing changes."""
        return bound


@dataclass(frozen=True)
class StochasticRound:
    """q_j = ⌊b_j/g + uniform⌋·g with g = C/s, so E[q] = b.  Das et al. 2021, Alg. 1, line 3.

    ‖q‖∞ ≤ C, ‖q‖₂ ≤ C + g√d and ‖q‖₁ ≤ C√d + g·d: each coordinate moves by less than g.
    """

    levels: int
    rows_needed = True

    def __post_init__(self) -> None:
        _check_levels(self, self.levels)

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Round up or down at random, without bias; |q_j| ≤ C."""
        uniform = torch.from_numpy(rng.random(rows.shape))
        return _rounded(_in_steps(rows, bound, self.levels), uniform, self.levels)

    def norms(self, bound: Norms) -> Norms:
        """The grid's and the bound's triangle inequality."""
        grid, dim = bound.linf / self.levels, bound.dim
        return Norms(
            dim,
            l1=bound.l1 + grid * dim,
            l2=bound.l2 + grid * math.sqrt(dim),
            linf=bound.linf,
            grid=grid,
        )


@dataclass(frozen=True)
class ConditionalRound:
    """Stochastic rounding, drawn again until ‖q‖₂ ≤ √(C² + g²d/4 + g·(C + g√d/2)).

    Kairouz et al. 2021, Alg. 1 with β = e^(−1/2): a draw is short enough with a chance
    of at least 1 − β, and in high dimension ‖q‖₂ is far below StochasticRound's C + g√d. Without
    a number of levels it is 2√d, for which ‖q‖₂ exceeds C by a few percent.
    """

    levels: int | None = None
    rows_needed = True

    def __post_init__(self) -> None:
        if self.levels is not None:
            _check_levels(self, self.levels)

    def levels_for(self, dim: int) -> int:
        """s, of a grid C/s."""
        return self.levels or math.ceil(2 * math.sqrt(dim))

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Round; a row that is too long again, from its own seed, so that grouping is no matter."""
        uniform = torch.from_numpy(rng.random((len(rows), rows.shape[1] + 1)))
        levels = self.levels_for(bound.dim)
        exact = _in_steps(rows, bound, levels)
        steps = _rounded(exact, uniform[:, :-1], levels)
        longest = self.norms(bound).steps.l2
        for row in torch.nonzero(_too_long(steps, longest)).flatten().tolist():
            seed = int(float(uniform[row, -1]) * 2**53)
            steps[row] = _again(exact[row], levels, longest, seed)
        return steps

    def norms(self, bound: Norms) -> Norms:
        """The bound that a draw is held to; the other norms follow from it."""
        grid, root = bound.linf / self.levels_for(bound.dim), math.sqrt(bound.dim)
        spread = grid * (bound.l2 + grid * root / 2)
        l2 = math.sqrt(bound.l2**2 + grid**2 * bound.dim / 4 + spread)
        return Norms(bound.dim, l1=l2 * root, l2=l2, linf=bound.linf, grid=grid)


@dataclass(frozen=True)
class TowardZero:
    """q_j = trunc(b_j/g)·g with g = C/s: |q_j| ≤ |b_j|, so no norm grows.

    Biased by less than g a coordinate; meant for grids about as fine as float32.
    """

    levels: int = 2**24
    rows_needed = True

    def __post_init__(self) -> None:
        _check_levels(self, self.levels)

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Cut what is below the grid; no randomness is used."""
        return torch.trunc(_in_steps(rows, bound, self.levels)).long()

    def norms(self, bound: Norms) -> Norms:
        """As before, on a grid."""
        return replace(bound, grid=bound.linf / self.levels)


def _check_levels(quantize: object, levels: int) -> None:
    count(quantize, "levels", levels)
    check(quantize, "levels", levels, levels <= MOST_LEVELS, "at most 2^30")


def _in_steps(rows: Tensor, bound: Norms, levels: int) -> Tensor:
    return rows.double() * (levels / bound.linf)


def _rounded(exact: Tensor, uniform: Tensor, levels: int) -> Tensor:
    return torch.floor(exact + uniform).clamp_(-levels, levels).long()


def _again(exact: Tensor, levels: int, longest: float, seed: int) -> Tensor:
    """One row, drawn until it is short enough; cut towards zero in the end."""
    rng = np.random.Generator(np.random.Philox(seed))
    for _ in range(RETRIES):
        steps = _rounded(exact, torch.from_numpy(rng.random(len(exact))), levels)
        if not bool(_too_long(steps[None], longest)):
            return steps
    return torch.trunc(exact).long()


def _too_long(steps: Tensor, longest: float) -> Tensor:
    return (steps * steps).sum(dim=1) > longest**2
