"""Which columns of a table are inputs, and how each is encoded: as declared, or fitted.

By default (`public`) an input is a fixed function of its own cell and of public settings, so no row
changes how another row is encoded. `fitted` computes means, deviations, categories and types from
all training rows without noise. No ε covers these; `taken` lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.cells import cells_of, days_of, distinct, words_of
from fedveil.data.encoding import (
    BUCKETS,
    KNOTS,
    LARGEST,
    MAX_BUCKETS,
    RANGE_KNOTS,
    SMALLEST,
    CategoryColumn,
    Column,
    DateColumn,
    NumericColumn,
    PublicColumn,
    TableEncoder,
    check_column,
    numbers_of,
)
from fedveil.errors import UserError, told

if TYPE_CHECKING:
    import polars as pl

MAX_CATEGORIES = 100
NAMED = 5  # columns that a phrase lists by name before it counts the rest
Ranges = Mapping[str, tuple[float, float]]
Categories = Mapping[str, tuple[str, ...]]
Dates = Mapping[str, tuple[str, str]]
IDENTIFIER = re.compile(
    r"(^|[_\W])(id|ids|uuid|guid|mrn|ssn|email|e_mail|phone|telephone|iban|name|surname)$"
    r"|^(first|last|full|user)_?name$|[a-z](Id|ID|Uuid|UUID)$",
)
UNIQUE, ENOUGH = 0.9, 20  # share of different values, and rows, from which a text is an identifier


@dataclass(frozen=True)
class Declared:
    """Public declarations about a table: its columns and the values they can hold."""

    client: str
    label: str
    class_names: tuple[str, ...]
    ranges: Ranges
    categories: Categories
    buckets: int = BUCKETS
    dates: Dates = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # the only inputs, if any are named
    drop: tuple[str, ...] = ()

    def inputs(self, frame: pl.DataFrame) -> list[str]:
        """The named columns, or all but client, label, dropped ones and named identifiers."""
        apart = {self.client, self.label, *self.drop}
        if self.columns:
            return [name for name in self.columns if name not in apart]
        return [n for n in frame.columns if n not in apart and not self.identifier(n)]

    def identifier(self, name: str) -> bool:
        """Whether a column has the name of an identifier and nothing is declared about it.

        >>> Declared("who", "y", (), {}, {}).identifier("visit_id")
        True
        """
        known = (*self.ranges, *self.categories, *self.dates, *self.columns, self.client)
        return name not in (*known, self.label) and IDENTIFIER.search(name) is not None

    def column(self, name: str) -> Column | None:
        """The encoding of a column with a declared range or categories."""
        if name in self.categories:
            values = tuple(value.strip() for value in self.categories[name])
            return CategoryColumn(name, values, missing=True)
        if name in self.ranges:
            knots = np.linspace(*self.ranges[name], RANGE_KNOTS)
            return PublicColumn(name, tuple(knots.tolist()), 0)
        if name in self.dates:
            return DateColumn(name, tuple(np.linspace(*self._days(name), RANGE_KNOTS).tolist()))
        return None

    def _days(self, name: str) -> tuple[float, float]:
        import polars as pl

        first, last = days_of(pl.Series([str(day) for day in self.dates[name]])).to_list()
        if first is None or last is None or not first < last:
            raise UserError(
                f"The dates of '{name}' are {' to '.join(map(str, self.dates[name]))}. Give the "
                "first and the last day, such as 2015-01-01 and 2025-12-31."
            )
        return first, last

    def check(self, frame: pl.DataFrame) -> None:
        """Refuse declarations that do not match the table's header, or that declare nothing."""
        self._check_inputs(frame)
        self._check_names(frame)
        for name, limits in self.ranges.items():
            _check_range(name, limits)
        for name, values in self.categories.items():
            if not values or not distinct(values):
                raise UserError(
                    f"The categories of '{name}' are empty or repeat a value. List each value once."
                )
        if not 1 <= self.buckets <= MAX_BUCKETS:
            raise UserError(f"buckets is {self.buckets}. Give a number from 1 to {MAX_BUCKETS:,}.")

    def _check_inputs(self, frame: pl.DataFrame) -> None:
        for name in (*self.columns, *self.drop):
            check_column(frame, name, "column")
        if both := set(self.columns) & {*self.drop, self.client, self.label}:
            raise UserError(
                f"'{min(both)}' is named as an input and also dropped, or the client or label "
                "column. Name it once."
            )

    def _check_names(self, frame: pl.DataFrame) -> None:
        """Each declared column is an input of the table, with one declaration."""
        for name in (*self.ranges, *self.categories, *self.dates):
            what = "a range" if name in self.ranges else "categories"
            check_column(frame, name, f"column for {what}")
            if name in (self.client, self.label):
                raise UserError(
                    f"'{name}' is the client or label column. Declare input columns only."
                )
            if sum(name in each for each in (self.ranges, self.categories, self.dates)) > 1:
                raise UserError(
                    f"'{name}' has two of a range, categories and dates. Declare only one of them."
                )

    def set_aside(self, frame: pl.DataFrame) -> list[str]:
        """A note on columns that have the name of an identifier, if any: the header is public."""
        gone = [n for n in frame.columns if n not in self.drop and self.identifier(n)]
        if not gone or self.columns:
            return []
        return [
            f"Left out {listed(gone)}: the name is that of an identifier. To use it, name the "
            "inputs with --columns, or declare its range or categories."
        ]

    def encoder(self, columns: list[Column], inferred: bool) -> TableEncoder:
        """An encoder of these columns."""
        if not columns:
            raise UserError(
                f"No column besides '{self.client}' and '{self.label}' can be an input. Add one."
            )
        names = (self.client, self.label, self.class_names)
        return TableEncoder(tuple(columns), *names, inferred)


def _check_range(name: str, limits: object) -> None:
    """A range is two finite numbers, the lower one first."""
    if not (isinstance(limits, tuple | list) and len(limits) == 2):
        raise UserError(f"The range of '{name}' is {limits!r}. Give (low, high).")
    low, high = limits
    if not all(isinstance(end, int | float) for end in limits):
        raise UserError(f"The range of '{name}' is {told(limits)}. Give two numbers.")
    if not -LARGEST < low < high < LARGEST:
        raise UserError(f"The range of '{name}' is {low} to {high}. Give low < high.")


def public(frame: pl.DataFrame, declared: Declared) -> tuple[TableEncoder, list[str]]:
    """The encoder of public declarations, and notes on it.

    A single cell can change a column's type, so the type decides nothing: each cell may be a number
    or text.
    """
    declared.check(frame)
    columns: list[Column] = [
        declared.column(name) or PublicColumn(name, KNOTS, declared.buckets)
        for name in declared.inputs(frame)
    ]
    notes = declared.set_aside(frame)
    open_ = [column.name for column in columns if declared.column(column.name) is None]
    if open_:
        notes.append(
            f"Encoded in fixed public bins: {listed(open_)}. For a finer encoding, declare public "
            f"ranges or categories: --data ranges='{{{_key(open_[0])}=[0,100]}}' or --data "
            f'categories=\'{{{_key(open_[0])}=["a","b"]}}\', or [data.ranges] in TOML.'
        )
    for name in declared.ranges:
        if np.isnan(numbers_of(cells_of(frame[name]))).all():
            notes.append(f"'{name}' has a declared range, but none of its cells is a number.")
    return declared.encoder(columns, inferred=False), notes


def _ignored(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"Ignored columns (nested values or no values): {', '.join(names)}."]


def fitted(
    frame: pl.DataFrame, training: np.ndarray, declared: Declared
) -> tuple[TableEncoder, list[str]]:
    """An encoder fitted to the training rows, and notes; `taken` lists what it read."""
    declared.check(frame)
    rows = frame.filter(training)
    columns: list[Column] = []
    ignored: list[str] = []
    notes = declared.set_aside(frame)
    for name in declared.inputs(rows):
        column = declared.column(name)
        if column is None and _unique(rows[name]):
            notes.append(f"Left out '{name}': nearly every row has a value of its own.")
            continue
        column = column or _fit_column(rows[name], notes)
        columns.append(column) if column else ignored.append(name)
    return declared.encoder(columns, inferred=True), notes + _ignored(ignored)


def _unique(column: pl.Series) -> bool:
    """Whether nearly every row has text of its own, as identifiers do."""
    import polars as pl

    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        return False
    words = words_of(column).drop_nulls()
    return len(words) >= ENOUGH and words.n_unique() > UNIQUE * len(words)


def taken(encoder: TableEncoder, declared: Declared) -> tuple[str, ...]:
    """What a fitted encoder computed from the data, as noun phrases."""
    open_ = [column for column in encoder.columns if declared.column(column.name) is None]
    numeric = [c.name for c in open_ if isinstance(c, NumericColumn) and c.standardized]
    category = [c.name for c in open_ if isinstance(c, CategoryColumn)]
    dates = [c.name for c in open_ if isinstance(c, DateColumn)]
    phrases = ["the column types"]
    if numeric:
        phrases.append(f"the means and deviations of {listed(numeric)}")
    if category:
        phrases.append(f"the categories of {listed(category)}")
    if dates:
        phrases.append(f"the first and last dates of {listed(dates)}")
    return tuple(phrases)


def listed(names: list[str]) -> str:
    """Join names into one phrase.

    >>> listed(["age", "bmi"]), listed(list("abcdefg"))
    ('age and bmi', 'a, b, c, d, e and 2 more')
    """
    if len(names) > NAMED + 1:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _fit_column(column: pl.Series, notes: list[str]) -> Column | None:
    import polars as pl

    if column.null_count() == len(column):
        return None
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return _fit_numeric(column)
    if column.dtype in (pl.String, pl.Categorical, pl.Enum):
        return _fit_category(column, notes)
    if column.dtype in (pl.Date, pl.Datetime):
        return _fit_dates(column)
    return None


def _fit_numeric(column: pl.Series) -> NumericColumn | None:
    import polars as pl

    values = numbers_of(column)
    known = values[np.abs(values) <= LARGEST]
    missing = len(known) < len(values)
    if column.dtype == pl.Boolean:
        return NumericColumn(column.name, 0.0, 1.0, 0.5, missing, clip=False)
    if len(known) == 0:
        return None
    mean, deviation = float(known.mean()), float(known.std())
    scale = deviation if deviation > SMALLEST else 1.0
    return NumericColumn(column.name, mean, scale, mean, missing, clip=False)


def _fit_dates(column: pl.Series) -> DateColumn:
    days = days_of(column).drop_nulls().to_numpy()
    low, high = float(days.min()), float(days.max())
    knots = np.linspace(low, max(high, low + RANGE_KNOTS), RANGE_KNOTS)
    return DateColumn(column.name, tuple(knots.tolist()))


def _fit_category(column: pl.Series, notes: list[str]) -> CategoryColumn:
    words = words_of(column).rename("word")
    found = words.drop_nulls().value_counts(name="times")
    frequent = found.sort(["times", "word"], descending=[True, False]).head(MAX_CATEGORIES)
    if found.height > MAX_CATEGORIES:
        notes.append(
            f"'{column.name}' has {found.height} categories. The {MAX_CATEGORIES} most frequent "
            "are kept; all others are encoded as 'other'."
        )
    values = tuple(sorted(frequent["word"].to_list()))
    return CategoryColumn(column.name, values, words.null_count() > 0)


def _key(name: str) -> str:
    """A column name as a TOML key.

    >>> _key("age"), _key("height in cm")
    ('age', '"height in cm"')
    """
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return name if bare else json.dumps(name, ensure_ascii=False)
