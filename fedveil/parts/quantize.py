"""quantize: put a message on a grid, so that it fits a finite number of bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.checks import count
from fedveil.privacy.norms import Norms


class Quantize(Protocol):
    """A map of bounded messages to messages, and what it does to their norms."""

    @property
    def rows_needed(self) -> bool:
        """Whether each message must be known, or their sum is enough."""

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Quantize each row; `bound` is what each row can be at most."""

    def norms(self, bound: Norms) -> Norms:
        """What a quantized message can be at most."""


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
        count(self, "levels", self.levels)

    def grid(self, bound: Norms) -> float:
        """g = C/s."""
        return bound.linf / self.levels

    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        """Round up or down at random, without bias; |q_j| ≤ C."""
        grid = self.grid(bound)
        uniform = torch.from_numpy(rng.random(rows.shape))
        levels = torch.floor(rows.double() / grid + uniform).clamp_(-self.levels, self.levels)
        return levels.mul_(grid)

    def norms(self, bound: Norms) -> Norms:
        """The grid's and the bound's triangle inequality."""
        grid, dim = self.grid(bound), bound.dim
        return Norms(
            dim,
            l1=bound.l1 + grid * dim,
            l2=bound.l2 + grid * math.sqrt(dim),
            linf=bound.linf,
            grid=grid,
        )
