"""Frequent values: a value of one unit passes the threshold with probability at most δ."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedveil.accounting.accountant import delta
from fedveil.aggregates import frequent
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import GRID, Desk
from fedveil.aggregates.frequent import frequent_values
from fedveil.parts.statistics import Statistics


def passing(precision: float, escape: float, most: int, values: int, rows: list[int]) -> float:
    """The exact probability that any value of a single unit is released, from its weights."""
    unit = np.zeros(len(rows), np.int64)
    given = frequent.spread(unit, np.array(rows), most)
    least = math.ceil(frequent.threshold(precision, escape, most) * GRID) + 1
    sigma = GRID / math.sqrt(precision)
    weights = np.zeros(values)
    np.add.at(weights, given.cell, given.whole())
    there = np.zeros(values, dtype=bool)
    there[given.cell] = True
    each = stats.norm.sf((least - 0.5 - weights[there]) / sigma)  # of a rounded Gaussian
    return float(-np.expm1(np.log1p(-each).sum()))


@pytest.mark.parametrize("precision", [4.0, 0.04, 0.0004])
@pytest.mark.parametrize("escape", [1e-2, 1e-6])
@pytest.mark.parametrize("most", [1, 3])
def test_no_table_of_one_unit_passes_more_often_than_stated(
    precision: float, escape: float, most: int
) -> None:
    """By enumeration of all its tables of up to four rows over four values."""
    worst = 0.0
    for length in range(1, 5):
        for table in itertools.product(range(4), repeat=length):
            worst = max(worst, passing(precision, escape, most, 4, list(table)))
    assert worst <= escape
    assert worst > 0.5 * escape  # no more noise is added than needed


def test_a_lower_threshold_would_be_found_out() -> None:
    least = frequent.threshold(0.04, 1e-3, 1)
    assert stats.norm.sf((least - 1) / 5) <= 1e-3 * (1 + 1e-9)
    assert stats.norm.sf((0.97 * least - 1) / 5) > 1e-3


def test_values_of_many_are_found_and_values_of_few_are_not() -> None:
    units = np.arange(3000)
    values = np.array(["red"] * 2000 + ["blue"] * 900 + [f"own {i}" for i in range(100)])
    desk = Desk(Allowance(0.01, 1e-6), np.random.default_rng(0))
    found = frequent_values(desk, units, values, 0.01, 1e-6)
    assert [each.value for each in found] == ["red", "blue"]
    assert found[0].weight == pytest.approx(2000, abs=50)


def test_no_rows_have_no_frequent_values() -> None:
    desk = Desk(Allowance(1.0, 1e-6), np.random.default_rng(0))
    nothing = np.array([], dtype=np.int64)
    assert frequent_values(desk, nothing, nothing.astype(str), 1.0, 1e-6) == ()


def released(monkeypatch: pytest.MonkeyPatch, tables: list[list[int]], escape: float) -> np.ndarray:
    """The exact law of the released sums of values 0, 1, 2, where 0 stands for not released."""
    units = np.concatenate([np.full(len(rows), u) for u, rows in enumerate(tables)])
    given = frequent.spread(
        units.astype(np.int64), np.concatenate([np.array(r) for r in tables]), 2
    )
    sums, there = np.zeros(3, np.int64), np.zeros(3, dtype=bool)
    np.add.at(sums, given.cell, given.whole())
    there[given.cell] = True
    least = math.ceil(frequent.threshold(1.0, escape, 2) * SMALL) + 1
    seen = np.arange(least, least + 60)
    law = np.ones(())
    for value in range(3):
        edges = (np.append(seen, seen[-1] + 1) - 0.5 - sums[value]) / SMALL
        mass = np.diff(stats.norm.cdf(edges))
        mass[-1] += stats.norm.sf(edges[-1])
        mine = np.concatenate([[1 - mass.sum()], mass]) if there[value] else np.eye(1, 61)[0]
        law = np.multiply.outer(law, mine)
    return law


SMALL = 8  # steps per unit, instead of 2^16, so that all outputs can be enumerated


def test_small_tables_are_within_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hockey-stick divergence of whole releases, for a client present, absent or replaced."""
    monkeypatch.setattr("fedveil.aggregates.desk.GRID", SMALL)
    monkeypatch.setattr("fedveil.aggregates.frequent.GRID", SMALL)
    rest, escape = [[0, 0], [0, 1]], 0.02
    tables = [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2, 2]]
    laws = [released(monkeypatch, [*rest, table], escape) for table in tables]
    absent = released(monkeypatch, rest, escape)
    statistics, closest = Statistics(1.0, escape), 0.0
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        for adjacency, others in (("add-remove", [absent]), ("replace-one", laws)):
            claim = delta(statistics.event(adjacency), epsilon)  # type: ignore[arg-type]
            for one, two in itertools.product(laws, others):
                for p, q in ((one, two), (two, one)):
                    found = float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
                    assert found <= claim + 1e-12
                    closest = max(closest, found / claim)
    assert closest > 0.4  # and a claim of half as much would be found out
