"""Norm bounds on one message, and the sensitivity of the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Adjacency = Literal["add-remove", "zero-out", "replace-one"]


@dataclass(frozen=True)
class Norms:
    """Bounds on a vector in R^dim: ‖·‖₁ ≤ l1, ‖·‖₂ ≤ l2, ‖·‖∞ ≤ linf; on multiples of grid."""

    dim: int
    l1: float
    l2: float
    linf: float
    grid: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether a message has a finite bound."""
        return math.isfinite(self.l2)

    @property
    def steps(self) -> Norms:
        """The same in grid steps; ‖·‖∞ is whole, since moves are."""
        grid = self.grid or 1.0
        linf = math.ceil(self.linf / grid * (1 - 1e-12))
        return Norms(self.dim, self.l1 / grid, self.l2 / grid, linf, 1.0)

    def sensitivity(self, adjacency: Adjacency) -> Norms:
        """Bounds on the change of the sum between neighbours.

        Add-remove and zero-out change the sum by one message, replace-one by two.
        """
        if adjacency != "replace-one":
            return self
        return replace(self, l1=2 * self.l1, l2=2 * self.l2, linf=2 * self.linf)
