"""Norm bounds on one message, and the sensitivity of the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fedveil.errors import UserError, told

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


class Limits(NamedTuple):
    """The norms that each message of a round is held to, after the bound and as it is sent."""

    bounded: Norms
    message: Norms


def declared(part: object, norms: Norms, dim: int) -> Norms:
    """The norms that a part declares for a vector in R^dim, as plain numbers.

    >>> declared("a bound", Norms(1, l1=2, l2=1, linf=1), dim=4)
    Norms(dim=4, l1=2.0, l2=1.0, linf=1.0, grid=None)
    """
    if not isinstance(norms, Norms):
        raise UserError(
            f"{type(part).__name__} declares {told(norms)} as its norms. Return Norms(dim, l1, l2, "
            "linf)."
        )
    l1, l2, linf = float(norms.l1), float(norms.l2), float(norms.linf)
    grid = None if norms.grid is None else float(norms.grid)
    if not all(size >= 0 for size in (l1, l2, linf, grid or 0.0)):
        raise UserError(
            f"{type(part).__name__} declares {norms!r}. Norms and their grid must be numbers of at "
            "least 0."
        )
    return Norms(dim, l1, l2, linf, grid)
