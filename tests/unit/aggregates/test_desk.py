"""The desk bounds every unit's contribution, and never spends more than its allowance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting.accountant import delta
from fedveil.aggregates import frequent, histogram
from fedveil.aggregates.allowance import ASIDE, SHARE, Allowance, largest_mu
from fedveil.aggregates.desk import GRID, Contributions, Desk, deviation
from fedveil.errors import UserError
from fedveil.parts.statistics import Statistics


def desk(precision: float = 1.0, escape: float = 1e-6, seed: int = 0) -> Desk:
    return Desk(Allowance(precision, escape), np.random.default_rng(seed))


def one(weight: float) -> Contributions:
    return Contributions(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([weight]))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_statistics_alone_cost_what_they_say(epsilon: float) -> None:
    granted = Allowance.alone(epsilon, 1e-5)
    event = Statistics(granted.precision**-0.5, granted.escape).event("zero-out")
    assert 0.999e-5 < delta(event, epsilon) <= 1e-5


def test_a_share_is_what_a_gaussian_training_leaves() -> None:
    granted = Allowance.share(4.0, 1e-5)
    training = largest_mu(4.0 * (1 - SHARE), (1 - ASIDE) * 1e-5) ** 2
    whole = Statistics((granted.precision + training) ** -0.5, granted.escape)
    assert 0.999e-5 < delta(whole.event("zero-out"), 4.0) <= 1e-5
    assert Allowance.alone(0.2, 1e-5).precision < granted.precision < 0.2 * training


@pytest.mark.parametrize(("epsilon", "at"), [(0.0, 1e-5), (300.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_allowances_are_refused(epsilon: float, at: float) -> None:
    with pytest.raises(UserError):
        Allowance.alone(epsilon, at)


def test_a_desk_refuses_to_overspend() -> None:
    open_ = desk(1.0)
    open_.sums(one(1.0), 1, 0.6)
    with pytest.raises(UserError, match="more than their share"):
        open_.sums(one(1.0), 1, 0.6)
    open_.sums(one(1.0), 1, 0.4)
    open_.set_aside(1e-6)
    with pytest.raises(UserError, match="more than their share"):
        open_.set_aside(1e-7)


def test_what_is_charged_does_not_depend_on_what_was_asked() -> None:
    """How much is asked may follow from earlier answers, so the whole allowance is charged."""
    open_ = desk(0.25, 1e-6)
    assert open_.spent() is None
    open_.sums(one(1.0), 1, 0.01)
    assert open_.spent() == Statistics(2.0, 1e-6)


@pytest.mark.parametrize("weights", [[1.01], [0.8, 0.7], [-1.2]])
def test_a_long_contribution_is_refused(weights: list[float]) -> None:
    unit, cell = np.zeros(len(weights), np.int64), np.arange(len(weights))
    with pytest.raises(UserError, match="longer than 1"):
        desk().sums(Contributions(unit, cell, np.array(weights)), 2, 0.1)


rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60)


@given(rows, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_unit_contributes_more_than_one(table: list[tuple[int, int]], most: int) -> None:
    """In ℓ2; contributions are not negative, so replacing one moves the sums by at most √2."""
    units, cells = np.array(table, dtype=np.int64).reshape(-1, 2).T
    for given_ in (histogram.shares(units, cells, 31), frequent.spread(units, cells, most)):
        vectors = np.zeros((5, 31), dtype=np.int64)
        np.add.at(vectors, (given_.unit, given_.cell), given_.whole())
        assert (vectors >= 0).all()
        assert ((vectors**2).sum(axis=1) <= GRID**2).all()
        apart = vectors[:, None] - vectors[None]
        assert ((apart**2).sum(axis=-1) <= 2 * GRID**2).all()


def test_one_unit_changes_only_its_own_contribution() -> None:
    rng = np.random.default_rng(1)
    units = np.concatenate([rng.integers(0, 6, 200), np.full(100, 3)])
    cells = rng.integers(0, 9, 300)
    rest = units != 3
    for make in (histogram.shares, lambda u, c, n: frequent.spread(u, c, 4)):
        whole, without = make(units, cells, 9), make(units[rest], cells[rest], 9)
        kept = whole.unit != 3
        assert np.array_equal(whole.unit[kept], without.unit)
        assert np.array_equal(whole.cell[kept], without.cell)
        assert np.array_equal(whole.weight[kept], without.weight)


def test_noise_has_the_stated_deviation() -> None:
    """40,000 draws: a correct program fails with probability 1e-5; 3 % too little is noticed."""
    noise = desk(0.04).sums(one(0.0), 40_000, 0.04) / GRID
    assert deviation(0.04) == 5
    assert noise.std() == pytest.approx(5, rel=4.5 / math.sqrt(2 * 40_000))
    assert abs(noise.mean()) < 4.5 * 5 / 200
