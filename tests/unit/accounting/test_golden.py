"""ε(δ) against two accountants of others: prv-accountant's error interval, Rényi from above.

prv-accountant takes minutes over this grid, so `scripts/golden` wrote its bounds to golden.csv.
"""

from __future__ import annotations

import csv
import math
import runpy
from pathlib import Path
from typing import NamedTuple

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from fedveil.accounting import events
from fedveil.accounting.accountant import INTERVAL, epsilon

pytestmark = pytest.mark.statistics  # two accountants, over 58 settings
HERE = Path(__file__).resolve().parent
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
POPULATION = 3000


class Golden(NamedTuple):
    """One row: a Poisson-sampled Gaussian under add-remove, and what prv-accountant says of it."""

    kind: str
    rate: float
    ratio: float
    rounds: int
    delta: float
    lower: float
    estimate: float
    upper: float

    @property
    def name(self) -> str:
        return f"q={self.rate:g} z={self.ratio:g} K={self.rounds} delta={self.delta:g}"


def rows(kind: str) -> list[Golden]:
    with (HERE / "golden.csv").open(newline="") as file:
        read = [row for row in csv.reader(file) if row[0] == kind]
    return [
        Golden(kind, float(row[1]), float(row[2]), int(row[3]), *map(float, row[4:]))
        for row in read
    ]


USUAL, SMALL = rows("usual"), rows("small")
LIVE = [row for row in USUAL if row.rounds == 50 and row.rate in (0.05, 0.2)][::2]


def ours(row: Golden, noise: float = 1.0, rate: float = 1.0) -> float:
    """Our ε of the row, with its noise and its rate multiplied by these."""
    release = events.GaussianRelease(row.ratio * noise)
    sampled = events.PoissonSampled(row.rate * rate, release)
    return epsilon(events.Composed(sampled, row.rounds), row.delta)


def renyi(row: Golden) -> float:
    round = dp_accounting.PoissonSampledDpEvent(row.rate, dp_accounting.GaussianDpEvent(row.ratio))
    return float(RdpAccountant().compose(round, row.rounds).get_epsilon(row.delta))


def test_the_grid_is_fifty_different_settings_with_narrow_intervals() -> None:
    assert len({row[1:5] for row in USUAL}) == len(USUAL) == 50
    assert all(0.05 < row.lower < row.estimate < row.upper < 50 for row in USUAL)
    assert all(row.upper - row.lower < 0.012 * row.estimate for row in USUAL + SMALL)


@pytest.mark.parametrize("row", USUAL, ids=lambda row: row.name)
def test_epsilon_lies_in_the_interval_of_prv_accountant_and_below_renyi(row: Golden) -> None:
    found = ours(row)
    assert row.lower <= found <= row.upper
    assert found <= renyi(row)


@pytest.mark.parametrize("row", [*USUAL[::5], SMALL[0]], ids=lambda row: row.name)
def test_two_percent_of_the_noise_leave_the_interval(row: Golden) -> None:
    """So the test above has power on both sides: in every fifth setting, and so in the others.

    ε falls by more than its share as noise grows, and no interval is wider than 1.2% of ε.
    """
    assert ours(row, noise=1.02) < row.lower
    assert ours(row, noise=1 / 1.02) > row.upper


def test_two_percent_of_the_rate_leave_most_intervals() -> None:
    """All but those of a few rounds with large ε, which is about log q + const there."""
    assert sum(ours(row, rate=0.98) < row.lower for row in USUAL[::5]) >= 9


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_losses_far_below_the_usual_grid_lie_in_the_interval_too(row: Golden) -> None:
    """A round's loss deviates by less than INTERVAL there, so it is rounded to a finer grid."""
    assert row.rate * math.sqrt(math.expm1(row.ratio**-2)) < 10 * INTERVAL
    assert row.lower <= ours(row) <= row.upper


@pytest.mark.parametrize("row", LIVE, ids=lambda row: row.name)
def test_the_stored_bounds_are_those_of_prv_accountant(row: Golden) -> None:
    bounds = runpy.run_path(str(HERE.parents[2] / "scripts" / "golden"))["bounds"]
    assert bounds(*row[1:5]) == pytest.approx(row[5:], rel=1e-6)


FIXED = [
    (3, 0.6, 200, 1e-5),
    (30, 0.6, 50, 1e-6),
    (30, 1.0, 1000, 1e-5),
    (30, 2.0, 5000, 1e-8),
    (150, 1.0, 200, 1e-6),
    (150, 2.0, 1000, 1e-5),
    (150, 6.0, 5000, 1e-6),
    (600, 2.0, 50, 1e-8),
    (600, 6.0, 1000, 1e-5),
    (600, 20.0, 5000, 1e-6),
]


def fixed_size(cohort: int, ratio: float, rounds: int, delta: float) -> float:
    release = events.GaussianRelease(ratio)
    sampled = events.SampledWithoutReplacement(cohort, POPULATION, release)
    return epsilon(events.Composed(sampled, rounds), delta)


def fixed_size_renyi(cohort: int, ratio: float, rounds: int, delta: float) -> float:
    """Wang, Balle and Kasiviswanathan 2019, Thm. 27, as dp-accounting has it.

    The library uses α/(2·multiplier²) as the divergence of the unsampled release, and that is the
    one between replaced neighbours only if the multiplier is σ/(2C), our ratio. Its own σ/C of
    add-remove would halve the sensitivity.
    """
    round = dp_accounting.SampledWithoutReplacementDpEvent(
        POPULATION, cohort, dp_accounting.GaussianDpEvent(ratio)
    )
    accountant = RdpAccountant(neighboring_relation=REPLACE_ONE)
    return float(accountant.compose(round, rounds).get_epsilon(delta))


def poisson(cohort: int, ratio: float, rounds: int, delta: float) -> float:
    sampled = events.PoissonSampled(cohort / POPULATION, events.GaussianRelease(ratio))
    return epsilon(events.Composed(sampled, rounds), delta)


@pytest.mark.parametrize("setting", FIXED, ids=str)
def test_fixed_size_epsilon_lies_between_poisson_and_renyi(
    setting: tuple[int, float, int, float],
) -> None:
    """Poisson's directions are the pieces whose larger one is composed here, so it lies below."""
    assert poisson(*setting) <= fixed_size(*setting) <= fixed_size_renyi(*setting)


@pytest.mark.parametrize("setting", FIXED, ids=str)
def test_half_the_sensitivity_is_noticed(setting: tuple[int, float, int, float]) -> None:
    """Accounting replaced units by σ/C, the ratio of added ones, falls out of the bracket."""
    cohort, ratio, rounds, delta = setting
    assert fixed_size(cohort, 2 * ratio, rounds, delta) < poisson(*setting)
