"""Learns classes, ranges, dates and categories of a table with noise, from the training rows.

A client moves each noisy sum by at most 1 in ℓ2, whatever its rows contain (`aggregates`). All that
is decided here about a column (its type, its range, its values) is computed from noisy sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.aggregates.desk import GRID, Desk, deviation
from fedveil.aggregates.frequent import frequent_values
from fedveil.aggregates.histogram import (
    COARSE,
    FINE,
    SURE,
    NoisyHistogram,
    binned,
    histogram,
    refined,
    shares,
)
from fedveil.data.cells import cells_of, days_of
from fedveil.data.declared import MAX_CATEGORIES, Declared, listed
from fedveil.data.encoding import (
    KNOTS,
    RANGE_KNOTS,
    CategoryColumn,
    Column,
    DateColumn,
    PublicColumn,
    TableEncoder,
    numbers_of,
)
from fedveil.errors import UserError

if TYPE_CHECKING:
    import polars as pl

LABEL = 4.0  # share of the label in the precision, where each input column has 1
FIRST = 0.3  # share of a column's precision for its type and coarse range
LOW, HIGH = 0.05, 0.95  # quantiles between which a column's knots lie
YEARS = np.arange(-25567.0, 47482.0, 1826.25)  # edges of date bins: five years, 1900 to 2099


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The training rows of a table, and the code of each row's client."""

    frame: pl.DataFrame
    units: np.ndarray


@dataclass(frozen=True)
class BudgetShares:
    """How the allowance is divided: by `columns` input columns, and the label if it is learned."""

    columns: int
    label: bool

    def precision(self, desk: Desk, weight: float = 1.0) -> float:
        """The precision of a column with this weight."""
        return desk.allowance.precision * weight / (self.columns + LABEL * self.label)

    def escape(self, desk: Desk) -> float:
        """The escape of any column."""
        return desk.allowance.escape / (self.columns + self.label)


def learned_classes(
    desk: Desk, units: np.ndarray, labels: Sequence[str], share: BudgetShares, label: str
) -> tuple[str, ...]:
    """The labels that enough clients have.

    The error for too few of them does not name any: nothing is charged yet.
    """
    found = frequent_values(
        desk, units, np.array(labels, dtype=str), share.precision(desk, LABEL), share.escape(desk)
    )
    if len(found) < 2:
        raise UserError(
            f"With this much noise, fewer than two classes of '{label}' were found: too few "
            "clients have the others. Declare the classes if they are public (--data "
            "classes=no,yes), or give more to statistics (--stats-epsilon)."
        )
    return tuple(each.value for each in found[:MAX_CATEGORIES])


def learned(
    desk: Desk, rows: TrainingRows, declared: Declared, share: BudgetShares
) -> tuple[TableEncoder, list[str]]:
    """The encoder of declared columns, and of the others as their statistics suggest; and notes."""
    declared.check(rows.frame)
    columns: list[Column] = []
    gone: list[str] = []
    for name in declared.inputs(rows.frame):
        column = declared.column(name) or _learned_column(desk, rows, name, share, declared.buckets)
        columns.append(column) if column else gone.append(name)
    notes = [*declared.set_aside(rows.frame), *_unshared(gone)]
    return declared.encoder(columns, inferred=False), notes


def _unshared(names: list[str]) -> list[str]:
    if not names:
        return []
    return [
        f"Left out {listed(names)}: text of which no value is shared by enough clients, as of "
        "identifiers. To use it, declare its categories."
    ]


def _learned_column(
    desk: Desk, rows: TrainingRows, name: str, share: BudgetShares, buckets: int
) -> Column | None:
    """Numbers, dates or text, whichever has the most weight; fixed public bins if none stands out.

    None for text without a frequent value.
    """
    cells, precision = cells_of(rows.frame[name]), share.precision(desk)
    numbers, days = numbers_of(cells), days_of(rows.frame[name]).fill_null(np.nan).to_numpy()
    words = np.flatnonzero(np.isnan(numbers) & np.isnan(days) & cells.is_not_null().to_numpy())
    first = _profile(desk, rows.units, numbers, days, words, FIRST * precision)
    kinds = {"number": _weight(first.numbers), "date": _weight(first.dates), "text": first.text}
    kind = max(kinds, key=lambda each: kinds[each])
    rest = (1 - FIRST) * precision
    if kinds[kind] <= SURE * first.numbers.sigma:
        return PublicColumn(name, KNOTS, buckets)
    if kind == "text":
        told = np.array(cells.gather(words).to_list(), dtype=str)
        found = frequent_values(desk, rows.units[words], told, rest, share.escape(desk))
        values = tuple(sorted(each.value for each in found[:MAX_CATEGORIES]))
        return CategoryColumn(name, values, missing=True) if values else None
    if kind == "date":
        return DateColumn(name, _knots(desk, rows.units, days, first.dates, rest))
    return PublicColumn(name, _knots(desk, rows.units, numbers, first.numbers, rest), 0)


@dataclass(frozen=True, eq=False)
class _Profile:
    """One noisy histogram over the coarse bins of numbers, those of dates, and all text."""

    numbers: NoisyHistogram
    dates: NoisyHistogram
    text: float


def _profile(
    desk: Desk,
    units: np.ndarray,
    numbers: np.ndarray,
    days: np.ndarray,
    words: np.ndarray,
    precision: float,
) -> _Profile:
    """The shares of a client's cells: a single release, since they sum to at most 1."""
    wide, long = len(COARSE) - 1, len(YEARS) - 1
    cell = np.full(len(units), -1)
    cell[words] = wide + long
    dated, number = ~np.isnan(days), ~np.isnan(numbers)
    cell[dated] = wide + binned(days[dated], YEARS)
    cell[number] = binned(numbers[number], COARSE)
    there = cell >= 0
    given = shares(units[there], cell[there], wide + long + 1)
    noisy = desk.sums(given, wide + long + 1, precision) / GRID
    sigma = deviation(precision)
    return _Profile(
        NoisyHistogram(COARSE, noisy[:wide], sigma),
        NoisyHistogram(YEARS, noisy[wide:-1], sigma),
        float(noisy[-1]),
    )


def _weight(found: NoisyHistogram) -> float:
    """The weight in the bins of its range."""
    span = found.range()
    return 0.0 if span is None else float(found.weights[span[0] : span[1] + 1].sum())


def _knots(
    desk: Desk, units: np.ndarray, values: np.ndarray, coarse: NoisyHistogram, precision: float
) -> tuple[float, ...]:
    """Knots over the middle nine tenths of a column, and an eighth of that on both sides."""
    edges = refined(coarse)
    assert edges is not None  # a column without a range has no weight
    there = ~np.isnan(values)
    fine = histogram(desk, units[there], values[there], edges, precision)
    low, high = fine.quantile(LOW), fine.quantile(HIGH)
    if not low < high:
        low, high = float(edges[0]), float(edges[-1])
    if edges[1] - edges[0] < 0.9 * (edges[-1] - edges[0]) / FINE and low > 0:
        return tuple(np.geomspace(low, high, RANGE_KNOTS).tolist())
    more = (high - low) / 8
    return tuple(np.linspace(low - more, high + more, RANGE_KNOTS).tolist())
