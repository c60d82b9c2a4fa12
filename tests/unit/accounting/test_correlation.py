"""Sensitivity of correlated noise by enumeration, and its errors against dense matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.linalg import toeplitz

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.correlation import (
    Column,
    energy,
    largest_row,
    optimized,
    prefix_errors,
    square_root,
)
from fedveil.errors import UserError

BUFFERED = Column(weights=(0.2, 0.5), decays=(0.4, 0.9))
COLUMNS = [square_root(1), square_root(2), square_root(4), square_root(12), BUFFERED]
ROWS = 12
LIMITS = [(1, None), (1, 2), (2, None), (3, 2), (4, 3), (5, None)]


def matrix(column: Column, rows: int = ROWS) -> np.ndarray:
    return np.asarray(toeplitz(column.first(rows), np.eye(1, rows)[0]))


def patterns(rows: int, separation: int, most: int | None) -> Iterator[tuple[int, ...]]:
    """Every set of rounds in which a unit may take part."""
    for count in range(1, min(rows, most or rows) + 1):
        for found in itertools.combinations(range(rows), count):
            if all(b - a >= separation for a, b in itertools.pairwise(found)):
                yield found


@pytest.mark.parametrize("column", COLUMNS, ids=["one", "two", "four", "all", "buffered"])
@pytest.mark.parametrize(("separation", "most"), LIMITS)
def test_sensitivity_is_that_of_the_worst_pattern(
    column: Column, separation: int, most: int | None
) -> None:
    """From the first row on, and from any later one: exactly the largest of all patterns."""
    c = matrix(column)
    for first in (0, 1, 4, 11):
        worst = max(
            float((c[first:, list(pattern)].sum(axis=1) ** 2).sum())
            for pattern in patterns(ROWS, separation, most)
        )
        assert energy(column, ROWS, separation, most, first) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize("column", COLUMNS, ids=["one", "two", "four", "all", "buffered"])
def test_no_directions_of_messages_are_worse_than_equal_ones(column: Column) -> None:
    c, rng = matrix(column), np.random.default_rng(0)
    for pattern in patterns(ROWS, 3, None):
        messages = rng.normal(size=(len(pattern), 3))
        messages /= np.linalg.norm(messages, axis=1, keepdims=True)
        moved = float(((c[:, list(pattern)] @ messages) ** 2).sum())
        assert moved <= energy(column, ROWS, 3, None) * (1 + 1e-12)


def test_few_bands_cost_the_square_root_of_the_participations() -> None:
    c = square_root(5)
    norm = float(np.linalg.norm(c.coefficients))
    assert math.sqrt(energy(c, 40, 8, None)) == pytest.approx(math.sqrt(5) * norm)
    assert math.sqrt(energy(c, 40, 8, 3)) == pytest.approx(math.sqrt(3) * norm)


@pytest.mark.parametrize("column", COLUMNS, ids=["one", "two", "four", "all", "buffered"])
def test_lost_rounds_cost_no_more_than_is_charged(column: Column) -> None:
    """Every history: rounds kept, rounds lost after them, and all rounds from there on again.

    Both the kept and lost rounds and the kept and new ones are patterns that the cohort allows.
    """
    rows = 7
    event = events.Correlated(1.0, column, separation=2, most=3)
    c, found = matrix(column, rows), list(patterns(rows, 2, 3))
    for kept, lost in itertools.product(range(rows), range(1, 4)):
        if kept + lost > rows:
            continue
        worst = 0.0
        for old, new in itertools.product(found, repeat=2):
            if {t for t in old if t < kept} != {t for t in new if t < kept}:
                continue
            gone = (c[kept : kept + lost, list(old)].sum(axis=1) ** 2).sum()
            worst = max(worst, float(gone + (c[:, list(new)].sum(axis=1) ** 2).sum()))
        charged = events.Correlated(1.0, column, 2, 3, lost=lost).whole(rows + lost)
        assert charged.ratio**-2 >= worst * (1 - 1e-12)
        assert charged.ratio < event.whole(rows).ratio


def test_a_row_moves_by_its_sum() -> None:
    for column, (separation, most) in itertools.product(COLUMNS, LIMITS):
        c = matrix(column)
        worst = max(float(c[:, list(p)].sum(axis=1).max()) for p in patterns(12, separation, most))
        assert largest_row(column, ROWS, separation, most) == pytest.approx(worst)


@pytest.mark.parametrize("column", COLUMNS, ids=["one", "two", "four", "all", "buffered"])
def test_inverse_and_prefix_errors_are_those_of_the_matrix(column: Column) -> None:
    inverse = np.linalg.inv(matrix(column))
    assert column.inverse(ROWS) == pytest.approx(inverse[:, 0])
    squares = ((np.tril(np.ones((ROWS, ROWS))) @ inverse) ** 2).sum(axis=1)
    found = prefix_errors(column, ROWS)
    assert found == pytest.approx((math.sqrt(squares.mean()), math.sqrt(squares[-1])))


def test_the_square_root_is_one() -> None:
    c = matrix(square_root(ROWS))
    assert c @ c == pytest.approx(np.tril(np.ones((ROWS, ROWS))))


def error(column: Column, rounds: int, separation: int, most: int | None = None) -> float:
    return math.sqrt(energy(column, rounds, separation, most)) * prefix_errors(column, rounds)[0]


@pytest.mark.parametrize(("rounds", "separation"), [(100, 10), (60, 1), (64, 64)])
def test_optimized_buffers_are_about_as_good_as_bands(rounds: int, separation: int) -> None:
    buffers = error(optimized(3, rounds, separation, None), rounds, separation)
    banded = min(error(square_root(b), rounds, separation) for b in (separation, rounds))
    assert buffers <= 1.06 * banded
    assert buffers <= error(square_root(1), rounds, separation) * (1 + 1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"coefficients": (1.0, 0.5, 0.6)},
        {"coefficients": (2.0, 1.0)},
        {"coefficients": (1.0, -0.5)},
        {"weights": (0.8, 0.4), "decays": (0.5, 0.6)},
        {"weights": (0.8, -0.4), "decays": (0.5, 0.6)},
        {"weights": (0.5,), "decays": (1.0,)},
        {"weights": (0.5,), "decays": (0.5, 0.6)},
    ],
    ids=str,
)
def test_a_column_for_which_nothing_is_proved_is_refused(wrong: dict[str, tuple[float]]) -> None:
    with pytest.raises(UserError):
        Column(**wrong)


# Accounting


def test_a_run_is_one_gaussian_release() -> None:
    """ε of 8 rounds is the library's for a Gaussian with the sensitivity of the whole matrix."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    event = events.Correlated(3.0, square_root(4), separation=2)
    ratio = 3.0 / math.sqrt(energy(square_root(4), 8, 2, None))
    library = pld.from_gaussian_mechanism(ratio, value_discretization_interval=1e-4)
    found = accounting.epsilon(events.Composed(event, 8), 1e-5)
    assert found == pytest.approx(library.get_epsilon_for_delta(1e-5), rel=1e-3)


def test_a_stopped_run_is_priced_by_the_leading_submatrix() -> None:
    event = events.Correlated(3.0, square_root(4), separation=3)
    prices = [accounting.epsilon(events.Composed(event, n), 1e-5) for n in range(13)]
    assert prices[0] == 0
    assert all(less <= more for less, more in itertools.pairwise(prices))
    ratio = 3.0 / math.sqrt(energy(square_root(4), 5, 3, None))
    alone = events.Composed(events.GaussianRelease(ratio), 1)
    assert prices[5] == pytest.approx(accounting.epsilon(alone, 1e-5))
    assert prices[5] < prices[12]


def test_one_band_is_independent_noise() -> None:
    event = events.Correlated(3.0, square_root(1), separation=1)
    alone = events.Composed(events.GaussianRelease(3.0), 9)
    composed = accounting.epsilon(events.Composed(event, 9), 1e-5)
    assert composed == pytest.approx(accounting.epsilon(alone, 1e-5), rel=1e-6)


def test_turns_are_sampled_releases() -> None:
    """⌈7/3⌉ sampled releases of the norm of a column; without sampling after lost rounds."""
    inner = events.Correlated(3.0, square_root(2), separation=3)
    event = events.CyclicSampled(0.1, inner)
    once = events.PoissonSampled(0.1, events.GaussianRelease(3.0 / math.sqrt(1.25)))
    found = accounting.epsilon(events.Composed(event, 7), 1e-5)
    assert found == pytest.approx(accounting.epsilon(events.Composed(once, 3), 1e-5))
    lost = events.Correlated(3.0, square_root(2), separation=3, lost=1)
    bare = accounting.epsilon(events.Composed(lost, 8), 1e-5)
    sampled = events.Composed(events.CyclicSampled(0.1, lost), 8)
    assert accounting.epsilon(sampled, 1e-5) == bare > found


def test_the_loss_of_turns_is_that_of_the_mechanism() -> None:
    """δ of two cycles of one unit, over its coins, by integration: never above the accounted one.

    With two bands and turns two rounds apart, what the unit does to the whitened releases is
    (B₁·c, B₂·c), so the likelihood ratio is a product over the cycles.
    """
    from scipy.stats import norm

    rate, ratio = 0.3, 1.2
    event = events.CyclicSampled(rate, events.Correlated(ratio, square_root(2), separation=2))
    mu = math.sqrt(1.25) / ratio
    grid = np.linspace(-9, 9, 1501)
    weight = norm.pdf(grid) * (grid[1] - grid[0])
    one = 1 - rate + rate * np.exp(mu * grid - mu**2 / 2)
    joint, ratios = np.outer(weight, weight), np.outer(one, one)
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        add = float((joint * np.maximum(ratios - math.exp(epsilon), 0)).sum())
        remove = float((joint * np.maximum(1 - math.exp(epsilon) * ratios, 0)).sum())
        allowed = accounting.delta(events.Composed(event, 4), epsilon)
        assert max(add, remove) <= allowed * (1 + 1e-3) + 1e-9
        assert allowed <= 1.02 * max(add, remove) + 1e-6
