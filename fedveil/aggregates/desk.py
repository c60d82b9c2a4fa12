"""The desk: the only place where sums of private contributions leave with noise.

It checks that each unit's contribution is short enough, adds rounded Gaussian noise to integer
sums, and refuses to spend more than its allowance (docs/privacy.md, "Statistics").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedveil.aggregates.allowance import Allowance
from fedveil.errors import UserError
from fedveil.parts.statistics import Statistics
from fedveil.random.samplers import rounded_gaussian

LONGEST = 2.0  # larger weights are refused before they are squared as whole numbers
GRID = 2**16  # steps per unit: contributions are truncated to the grid, so they never get longer


@dataclass(frozen=True, eq=False)
class Contributions:
    """Sparse vectors, one per unit: `weight` of `unit` in `cell`.  Σ_cell weight² ≤ 1 per unit."""

    unit: np.ndarray  # int64 [entries], codes from 0
    cell: np.ndarray  # int64 [entries]
    weight: np.ndarray  # float64 [entries]

    def whole(self) -> np.ndarray:
        """The weights in steps of the grid, truncated toward zero, int64."""
        if not (np.abs(self.weight) <= LONGEST).all():  # also for NaN
            raise UserError("A contribution to a statistic is longer than 1. Scale it down.")
        steps: np.ndarray = np.trunc(self.weight * GRID).astype(np.int64)
        squares = np.zeros(int(self.unit.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(squares, self.unit, steps * steps)
        if (squares > GRID * GRID).any():
            raise UserError("A contribution to a statistic is longer than 1. Scale it down.")
        return steps


@dataclass(eq=False)
class Desk:
    """Releases noisy sums until its allowance is used up."""

    allowance: Allowance
    rng: np.random.Generator
    precision: float = 0.0  # spent so far
    escape: float = 0.0  # spent so far

    def sums(self, given: Contributions, cells: int, precision: float) -> np.ndarray:
        """Σ_unit weights + N(0, 1/precision) per cell, in steps of the grid, int64 [cells].

        One unit moves the sums by at most GRID steps in ℓ2, and the noise has a standard deviation
        of GRID/√precision steps, so this is a Gaussian release with ratio 1/√precision.
        """
        self._spend(precision, 0.0)
        found = np.zeros(cells, dtype=np.int64)
        np.add.at(found, given.cell, given.whole())
        found += rounded_gaussian(GRID / math.sqrt(precision), cells, self.rng)
        return found

    def set_aside(self, escape: float) -> None:
        """Spend a probability of releasing what only one unit has."""
        self._spend(0.0, escape)

    def spent(self) -> Statistics | None:
        """The whole allowance, as the accounting sees it; None if nothing was released.

        How much of it is used may depend on what was released, so all of it counts.
        """
        if not self.precision:
            return None
        return Statistics(1 / math.sqrt(self.allowance.precision), self.allowance.escape)

    def _spend(self, precision: float, escape: float) -> None:
        more, aside = self.precision + precision, self.escape + escape
        slack = 1 + 1e-9  # shares are sums of floats
        if more > slack * self.allowance.precision or aside > slack * self.allowance.escape:
            raise UserError("The statistics would cost more than their share of epsilon.")
        self.precision, self.escape = more, aside


def deviation(precision: float) -> float:
    """The standard deviation of a released sum, in units of one whole contribution.

    >>> deviation(0.25)
    2.0
    """
    return 1 / math.sqrt(precision)
