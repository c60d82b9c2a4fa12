"""A unit's contribution to a mean is as long as the noise is scaled for, and never longer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedveil.aggregates import moments
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import GRID, Contributions, Desk

ODD = (-1e300, -5.0, 0.0, 0.3, 1.0, 7.0, 1e300)


class Watching(Desk):
    """A desk that keeps what it was given."""

    seen: Contributions

    def sums(self, given: Contributions, cells: int, precision: float) -> np.ndarray:
        self.seen = given
        return super().sums(given, cells, precision)


def desk(precision: float) -> Watching:
    return Watching(Allowance(precision, 0.0), np.random.default_rng(0))


@pytest.mark.parametrize("limits", [(0.0, 1.0), (-3.0, 5.0), (1e16, 1e16 + 2), (0.1, 0.1 + 1e-16)])
def test_no_small_unit_is_longer_than_one_and_the_longest_is(limits: tuple[float, float]) -> None:
    """All units of up to two rows over odd values, and limits between which floats are rare."""
    longest = 0.0
    values = (*ODD, *limits)
    for count in (1, 2):
        for rows in itertools.combinations_with_replacement(values, count):
            watching = desk(1.0)
            moments.mean(watching, np.zeros(count, np.int64), np.array(rows), limits, 1.0)
            steps = [int(step) for step in watching.seen.whole()]
            longest = max(longest, math.hypot(*steps))
    assert GRID - 3 < longest <= GRID


def test_the_noise_of_a_mean_is_that_of_its_longest_contribution() -> None:
    """σ of the mean of n units at the center of the limits: width·√1.25/(n·√precision)."""
    units = np.arange(1000)
    found = [
        moments.mean(
            Watching(Allowance(1.0, 0.0), np.random.default_rng(seed)),
            units, np.full(1000, 0.5), (0.0, 1.0), 1.0,
        )
        for seed in range(400)
    ]  # fmt: skip
    spread = np.std([one.value for one in found])
    assert spread == pytest.approx(math.sqrt(1.25) / 1000, rel=0.15)
    assert found[0].error == pytest.approx(1.96 * spread, rel=0.2)
