"""A unit moves a table of outcomes by at most 1, and intervals cover the truth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
)

from fedveil.aggregates import outcomes
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import GRID, Contributions, Desk
from fedveil.aggregates.outcomes import Outcomes, Table
from fedveil.errors import UserError

ANY = st.floats(allow_nan=True, allow_infinity=True)
ODD = (0.0, 0.3, 1.0, 1e300, -1.0, math.inf, -math.inf, math.nan)
CLASSES = 3
MAKERS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Outcomes]] = {
    "split": lambda value, target, answer: outcomes.split(value),
    "by class": lambda value, target, answer: outcomes.by_class(target, answer, CLASSES),
    "by score": lambda value, target, answer: outcomes.by_score(target, value),
    "moments": lambda value, target, answer: outcomes.moments(value, value - target),
}


def dense(given: Contributions, units: int, cells: int) -> np.ndarray:
    """[units, cells] in steps of the grid; every entry at its own place."""
    found = np.zeros((units, cells), dtype=np.int64)
    np.add.at(found, (given.unit, given.cell), given.whole())
    return found


def length(steps: np.ndarray) -> float:
    return math.sqrt(sum(int(step) ** 2 for step in steps.ravel()))


def check_short(kind: str, value: np.ndarray, target: np.ndarray, answer: np.ndarray) -> None:
    """One unit with these examples: its contribution is not longer than 1, nor negative."""
    made = MAKERS[kind](value, target, answer)
    found = dense(made.shares(np.zeros(len(value), np.int64)), 1, made.cells)
    assert (found >= 0).all()
    assert length(found) <= GRID
    assert int(found.sum()) >= GRID - made.cells  # all of it counts, up to truncation


def test_an_answer_that_is_no_class_stays_with_its_unit() -> None:
    target, answer = np.array([0, 0, 1, 1]), np.array([5, 2, 1, 1])
    made = outcomes.by_class(target, answer, 2)
    both = dense(made.shares(np.array([0, 0, 1, 1])), 2, made.cells) / GRID
    assert both.tolist() == [[0, 0, 0.5, 0, 0, 0.5], [0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("kind", MAKERS)
def test_no_small_unit_is_longer_than_one(kind: str) -> None:
    """All units of up to two examples, over odd values, classes and answers."""
    single = list(itertools.product(ODD, range(CLASSES), range(CLASSES)))
    for count in (1, 2):
        for rows in itertools.combinations_with_replacement(single, count):
            value, target, answer = (np.array(column) for column in zip(*rows, strict=True))
            check_short(kind, value.astype(float), target, answer)


def test_the_longest_contribution_of_every_table_is_one() -> None:
    """Else it has more noise than it needs. All pairs of an error and a target, one or two."""
    grid = (0.0, 0.25, 0.5, 1.0)
    rows = list(itertools.product(grid, grid))
    longest = 0.0
    for unit in [*itertools.combinations(rows, 1), *itertools.combinations(rows, 2)]:
        made = outcomes.moments(*np.array(unit).T)
        found = length(dense(made.shares(np.zeros(len(unit), np.int64)), 1, 6))
        assert found <= GRID
        longest = max(longest, found)
    assert longest > GRID - 6
    for kind in ("split", "by class", "by score"):
        made = MAKERS[kind](np.ones(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
        assert length(dense(made.shares(np.zeros(1, np.int64)), 1, made.cells)) == GRID


def test_a_table_of_moments_has_the_noise_of_its_longest_contribution() -> None:
    made = outcomes.moments(np.full(500, 0.5), np.full(500, 0.5))
    rng = np.random.default_rng(0)
    tables = [
        outcomes.tabulated(Desk(Allowance(1.0, 0.0), rng), np.arange(500), made, 1.0)
        for _ in range(300)
    ]
    cells = np.array([table.cells for table in tables])
    assert tables[0].sigma == pytest.approx(1 / math.sqrt(3))
    assert cells.std(0).mean() == pytest.approx(tables[0].sigma, rel=0.1)
    assert cells.sum(1).mean() == pytest.approx(500, abs=0.5)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 30), st.sampled_from(sorted(MAKERS)))
def test_a_unit_moves_only_its_own_contribution(data: st.DataObject, rows: int, kind: str) -> None:
    """Whatever a unit's examples become, the others' contributions stay, and its own is short."""
    units = np.array(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    columns = [
        np.array(data.draw(st.lists(kind_, min_size=rows, max_size=rows)))
        for kind_ in (ANY, st.integers(0, 2), st.integers(0, 2))
    ]
    changed = [column.copy() for column in columns]
    mine = units == 0
    for column, kind_ in zip(changed, (ANY, st.integers(0, 2), st.integers(0, 2)), strict=True):
        count = int(mine.sum())
        column[mine] = data.draw(st.lists(kind_, min_size=count, max_size=count))
    before, after = (
        dense(made.shares(units), 4, made.cells)
        for made in (MAKERS[kind](*columns), MAKERS[kind](*changed))
    )
    assert (before[1:] == after[1:]).all()
    assert max(length(before[0]), length(after[0])) <= GRID
    assert length(before[0] - after[0]) <= math.sqrt(2) * GRID
    without = MAKERS[kind](*(column[~mine] for column in columns))
    rest = dense(without.shares(units[~mine]), 4, without.cells)
    assert length(before.sum(0) - rest.sum(0)) <= GRID


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 2.0**50])
def test_a_desk_refuses_what_is_no_number(weight: float) -> None:
    """As whole numbers, NaN and huge weights overflow; their square may be 0."""
    given = Contributions(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([weight]))
    with pytest.raises(UserError, match="longer than 1"):
        Desk(Allowance(1.0, 0.0), np.random.default_rng(0)).sums(given, 1, 1.0)


def quiet(made: Outcomes, units: np.ndarray) -> Table:
    """The table with next to no noise."""
    desk = Desk(Allowance(1e8, 0.0), np.random.default_rng(0))
    return outcomes.tabulated(desk, units, made, 1e8)


def test_without_noise_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    target, answer = rng.integers(0, 3, 3000), rng.integers(0, 3, 3000)
    answer = np.where(rng.random(3000) < 0.5, target, answer)
    table, every = quiet(outcomes.by_class(target, answer, 3), np.arange(3000)), np.arange(3)
    found = outcomes.measured(table, outcomes.recall(every)).value
    assert found == pytest.approx(recall_score(target, answer, average="macro"), abs=1e-3)
    found = outcomes.measured(table, outcomes.f1(every)).value
    assert found == pytest.approx(f1_score(target, answer, average="macro"), abs=1e-3)
    assert outcomes.largest_class(table) == pytest.approx(
        np.bincount(target).max() / 3000, abs=1e-3
    )
    score = 1 / (1 + np.exp(-(rng.standard_normal(3000) + 1.5 * (target > 0))))
    table = quiet(outcomes.by_score(target, score), np.arange(3000))
    exact = roc_auc_score(target > 0, score)
    assert outcomes.measured(table, outcomes.auc).value == pytest.approx(exact, abs=5e-3)
    hit = (target == answer).astype(float)
    assert outcomes.share(quiet(outcomes.split(hit), np.arange(3000))).value == pytest.approx(
        hit.mean(), abs=1e-3
    )


def test_without_noise_numbers_and_rankings_are_those_of_scikit_learn() -> None:
    """Up to the bins of the score, which are half a logit wide, and to errors above the range."""
    rng = np.random.default_rng(0)
    target = (rng.random(20_000) < 0.2).astype(np.int64)
    score = 1 / (1 + np.exp(-(rng.standard_normal(len(target)) + 1.5 * target)))
    table = quiet(outcomes.by_score(target, score), np.arange(len(target)))
    exact = average_precision_score(target, score)
    assert outcomes.ranked(table).value == pytest.approx(exact, abs=0.015)
    y = rng.random(2000)
    answers = np.clip(y + 0.2 * rng.standard_normal(2000), 0, 1)
    error = np.abs(answers - y)
    table = quiet(outcomes.moments(error, y), np.arange(2000))
    assert outcomes.measured(table, outcomes.r2, -1.0).value == pytest.approx(
        r2_score(y, answers), abs=1e-3
    )
    squares = outcomes.share(quiet(outcomes.split(error**2), np.arange(2000)))
    assert outcomes.root(squares).value == pytest.approx(
        root_mean_squared_error(y, answers), abs=1e-3
    )


def test_a_bad_model_has_a_negative_r2() -> None:
    y = np.linspace(0, 1, 500)
    table = quiet(outcomes.moments(np.abs(1 - 2 * y), y), np.arange(500))  # answers 1 − y
    assert outcomes.measured(table, outcomes.r2, -10.0).value == pytest.approx(-3.0, abs=0.02)
    assert outcomes.measured(table, outcomes.r2, -1.0).value == -1.0


def test_units_count_once() -> None:
    """A unit with many examples weighs as much as one with a single one."""
    units, right = np.array([0] * 9 + [1]), np.array([1.0] * 9 + [0.0])
    assert outcomes.share(quiet(outcomes.split(right), units)).value == pytest.approx(0.5, abs=1e-3)


def covered(units: int, precision: float, mean: float, seed: int, draws: int) -> float:
    """How often the interval has the true mean, over fresh units, examples and noise."""
    rng, hits = np.random.default_rng(seed), 0
    desk = Desk(Allowance(precision * draws, 0.0), rng)
    owner = np.repeat(np.arange(units), 2)
    for _ in range(draws):
        own = (rng.random(units) < mean).astype(float)  # all examples of a unit alike: the worst
        found = outcomes.share(
            outcomes.tabulated(desk, owner, outcomes.split(own[owner]), precision)
        )
        hits += found.low <= mean <= found.high
    return hits / draws


@pytest.mark.parametrize(
    ("units", "precision", "mean"),
    [(200, 0.04, 0.8), (200, 25.0, 0.8), (2000, 0.0004, 0.9), (30, 0.04, 0.5), (2000, 25.0, 0.99)],
)
def test_intervals_cover_the_true_mean(units: int, precision: float, mean: float) -> None:
    """At 95% of 400 draws the count has σ = 4.4: 92% is 2.7 σ below. Noise alone would cover less.

    The first and the fourth have as much noise as sampling, the second and fifth hardly any noise,
    the third a noise far above sampling.
    """
    assert covered(units, precision, mean, 1, 400) >= 0.92


def scored(law: np.random.Generator, units: int) -> Outcomes:
    """Scores of two classes, one standard deviation apart, a third of the second."""
    target = (law.random(units) < 1 / 3).astype(np.int64)
    score = 1 / (1 + np.exp(-(law.standard_normal(units) + target)))
    return outcomes.by_score(target, score)


def regressed(law: np.random.Generator, units: int) -> Outcomes:
    """Answers that explain about two thirds of the variance of the targets."""
    y = law.random(units)
    return outcomes.moments(np.abs(0.17 * law.standard_normal(units)), y)


@pytest.mark.parametrize("kind", ["average precision", "r2"])
def test_intervals_of_rankings_and_numbers_cover_the_truth(kind: str) -> None:
    """At 95% of 200 draws the count has σ = 3.1: 91% is 2.6 σ below."""
    make = scored if kind == "average precision" else regressed
    metric = outcomes.average_precision if kind == "average precision" else outcomes.r2
    law, units, hits = np.random.default_rng(3), 1500, 0
    desk = Desk(Allowance(1e3, 0.0), np.random.default_rng(2))
    truth = metric(quiet(make(law, 100_000), np.arange(100_000)).cells)
    for _ in range(200):
        table = outcomes.tabulated(desk, np.arange(units), make(law, units), 0.05)
        by_gradient = make is regressed
        found = outcomes.measured(table, metric, -1.0) if by_gradient else outcomes.ranked(table)
        hits += found.low <= truth <= found.high
    assert hits / 200 >= 0.91


@pytest.mark.parametrize("kind", ["auc", "recall"])
def test_intervals_of_tables_cover_the_truth(kind: str) -> None:
    rng, hits, units = np.random.default_rng(2), 0, 1500
    desk = Desk(Allowance(1e3, 0.0), rng)
    law = np.random.default_rng(3)
    for _ in range(200):
        target = law.integers(0, 2, units)
        if kind == "auc":
            score = 1 / (1 + np.exp(-(law.standard_normal(units) + target)))
            table = outcomes.tabulated(
                desk, np.arange(units), outcomes.by_score(target, score), 0.02
            )
            found, truth = outcomes.measured(table, outcomes.auc), 0.7602
        else:
            answer = np.where(law.random(units) < 0.8, target, 1 - target)
            made = outcomes.by_class(target, answer, 2)
            table = outcomes.tabulated(desk, np.arange(units), made, 0.02)
            found, truth = outcomes.measured(table, outcomes.recall(np.arange(2))), 0.8
        hits += found.low <= truth <= found.high
    assert hits / 200 >= 0.91


def test_noise_alone_is_not_taken_for_a_result() -> None:
    """Without any unit, nothing is measured, or the interval says that nothing is known."""
    rng = np.random.default_rng(0)
    desk = Desk(Allowance(1e3, 0.0), rng)
    none = np.zeros(0, dtype=np.int64)
    for _ in range(20):
        split = outcomes.tabulated(desk, none, outcomes.split(np.zeros(0)), 0.01)
        found = outcomes.share(split)
        assert math.isnan(found.value) or found.high - found.low > 0.5
        table = outcomes.tabulated(desk, none, outcomes.by_class(none, none, 3), 0.01)
        assert math.isnan(outcomes.measured(table, outcomes.recall(np.arange(3))).value)
        assert outcomes.largest_class(table) is None
