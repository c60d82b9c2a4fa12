"""quantize: round a message to a grid, so that it fits in a finite number of bits.

On a grid, a message is an integer vector of multiples of the grid step, from the client to the sum.
Sums of integers are exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.parts.checks import check, count
from fedveil.parts.part import Part, foreign

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

MOST_LEVELS = 2**30  # squares of steps and their sums stay within int64
RETRIES = 40  # of a rounding with too large a norm, before it is rounded towards zero


class Quantize(Part, ABC):
    """A map from bounded messages to quantized messages, and its effect on their norms."""

    claims: ClassVar = ("rounding_variance", "on_grid")

    rows_needed: bool = True  # whether it needs each message, or only their sum

    @abstractmethod
    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Each row on the grid, as int64 steps; `bound` has the maximum norms of a row."""

    @abstractmethod
    def norms(self, bound: Norms) -> Norms:
        """The maximum norms of a quantized message, and its grid."""

    def rounding_variance(self, message: Norms) -> float:
        """E‖q − b‖² of random rounding, as far as it is known."""
        return 0.0

    def on_grid(self) -> Quantize:
        """The quantization for integer noise."""
        return self

    def misfit(self, recipe: Recipe) -> str | None:
        """It needs a bounded value."""
        if self.rows_needed and not recipe.bound.norms(1).bounded:
            return (
                f"bound {type(recipe.bound).__name__} and quantize {type(self).__name__} do not "
                "fit: a grid needs a largest value. Use Clip, Normalize or SmoothNormalize."
            )
        return None


def by_message(quantize: Quantize) -> bool:
    """Whether each message passes through it: always, if it is from outside fedveil."""
    return quantize.rows_needed or foreign(quantize)


@dataclass(frozen=True)
class NoQuantization(Quantize):
    """q = b."""

    rows_needed = False

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """No change."""
        return rows

    def norms(self, bound: Norms) -> Norms:
        """No change."""
        return bound

    def on_grid(self) -> Quantize:
        """Rounding towards zero on a fine grid, which increases no norm."""
        return TowardZero()


@dataclass(frozen=True)
class StochasticRound(Quantize):
    """q_j = ⌊b_j/g + uniform⌋·g with g = C/s, so E[q] = b.  Das et al. 2021, Alg. 1, line 3.

    ‖q‖∞ ≤ C, ‖q‖₂ ≤ C + g√d and ‖q‖₁ ≤ C√d + g·d, because each coordinate changes by less than g.
    """

    levels: int

    def __post_init__(self) -> None:
        _check_levels(self, self.levels)

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Round up or down at random, without bias; |q_j| ≤ C."""
        uniform = torch.from_numpy(rng.random(rows.shape))
        return _rounded(_in_steps(rows, bound, self.levels), uniform, self.levels)

    def norms(self, bound: Norms) -> Norms:
        """The triangle inequality for the bound and the rounding error."""
        grid, dim = bound.linf / self.levels, bound.dim
        return Norms(
            dim,
            l1=bound.l1 + grid * dim,
            l2=bound.l2 + grid * math.sqrt(dim),
            linf=bound.linf,
            grid=grid,
        )

    def rounding_variance(self, message: Norms) -> float:
        """d·g²/6, averaged over coordinates of any size."""
        return _stochastic_variance(message)


@dataclass(frozen=True)
class ConditionalRound(Quantize):
    """Stochastic rounding, drawn again until ‖q‖₂ ≤ √(C² + g²d/4 + g·(C + g√d/2)).

    Kairouz et al. 2021, Alg. 1 with β = e^(−1/2): a draw satisfies the bound with probability at
    least 1 − β, and in high dimension ‖q‖₂ is far below StochasticRound's C + g√d. The default
    number of levels is 2√d, for which ‖q‖₂ exceeds C by a few percent.
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None:
            _check_levels(self, self.levels)

    def levels_for(self, dim: int) -> int:
        """s, for the grid C/s."""
        return self.levels or math.ceil(2 * math.sqrt(dim))

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Round, and redraw a row that is too long from its own seed, whatever the grouping."""
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
        """The bound that every draw satisfies, and the norms that follow from it."""
        grid, root = bound.linf / self.levels_for(bound.dim), math.sqrt(bound.dim)
        spread = grid * (bound.l2 + grid * root / 2)
        l2 = math.sqrt(bound.l2**2 + grid**2 * bound.dim / 4 + spread)
        return Norms(bound.dim, l1=l2 * root, l2=l2, linf=bound.linf, grid=grid)

    def rounding_variance(self, message: Norms) -> float:
        """d·g²/6, averaged over coordinates of any size."""
        return _stochastic_variance(message)


@dataclass(frozen=True)
class TowardZero(Quantize):
    """q_j = trunc(b_j/g)·g with g = C/s: |q_j| ≤ |b_j|, so no norm increases.

    The bias is less than g per coordinate. It is meant for grids about as fine as float32.
    """

    levels: int = 2**24

    def __post_init__(self) -> None:
        _check_levels(self, self.levels)

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Truncate to the grid, without randomness."""
        return torch.trunc(_in_steps(rows, bound, self.levels)).long()

    def norms(self, bound: Norms) -> Norms:
        """The norms of the bound, on a grid."""
        return replace(bound, grid=bound.linf / self.levels)


def _check_levels(quantize: object, levels: int) -> None:
    count(quantize, "levels", levels)
    check(quantize, "levels", levels, levels <= MOST_LEVELS, "at most 2^30")


def _stochastic_variance(message: Norms) -> float:
    return message.dim * (message.grid or 0.0) ** 2 / 6


def _in_steps(rows: Tensor, bound: Norms, levels: int) -> Tensor:
    return rows.double() * (levels / bound.linf)


def _rounded(exact: Tensor, uniform: Tensor, levels: int) -> Tensor:
    return torch.floor(exact + uniform).clamp_(-levels, levels).long()


def _again(exact: Tensor, levels: int, longest: float, seed: int) -> Tensor:
    """One row, redrawn until its norm is within the bound, finally rounded towards zero."""
    rng = np.random.Generator(np.random.Philox(seed))
    for _ in range(RETRIES):
        steps = _rounded(exact, torch.from_numpy(rng.random(len(exact))), levels)
        if not bool(_too_long(steps[None], longest)):
            return steps
    return torch.trunc(exact).long()


def _too_long(steps: Tensor, longest: float) -> Tensor:
    return (steps * steps).sum(dim=1) > longest**2
