"""Columns of a table as numbers, the same at training and at prediction.

By default (`public`) an input is a fixed function of its own cell and of public settings, so that
no row changes how another one is encoded. `fitted` takes means, deviations, categories and types
from all training rows, which no ε covers; `taken` names them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.cells import cells_of, distinct, numbered, words_of
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    import polars as pl

MAX_CATEGORIES = 100
MAX_NUMBERS = 2**29  # of all inputs together
LARGEST, SMALLEST = 3e38, 1e-150  # of numbers that inputs can hold; of a deviation to divide by
KNOTS = (
    -1e4, -1e3, -100.0, -10.0, -1.0, 0.0, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 60.0, 80.0, 120.0, 160.0, 250.0, 500.0, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6,
)  # fmt: skip
RANGE_KNOTS = 9  # of a column with a public range
BUCKETS = 16  # of a text column
MAX_BUCKETS = 10_000
NAMED = 5  # columns that a phrase names before it counts the others
Ranges = Mapping[str, tuple[float, float]]
Categories = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class NumericColumn:
    """(x − center) / scale; a missing x becomes `fill`, and 1 in a second column if `missing`."""

    name: str
    center: float
    scale: float
    fill: float
    missing: bool
    clip: bool  # into [0, 1], for a public range as versions before 0.2 encoded it

    @property
    def standardized(self) -> bool:
        """Whether center and scale are the data's own mean and deviation; then `fill` is too."""
        return self.fill == self.center

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, 1 or 2]; what is not a finite number of float32 is missing."""
        values = _numbers_of(column)
        absent = ~(np.abs(values) <= LARGEST)
        scaled = (np.where(absent, self.fill, values) - self.center) / self.scale
        scaled = scaled.clip(0, 1) if self.clip else scaled.clip(-LARGEST, LARGEST)
        parts = [scaled, absent] if self.missing else [scaled]
        return np.stack(parts, axis=1).astype(np.float32)


@dataclass(frozen=True)
class CategoryColumn:
    """One column per known value, one for any other, and one for missing if any was missing."""

    name: str
    values: tuple[str, ...]
    missing: bool

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        known = [f"{self.name} = {value}" for value in self.values]
        absent = [f"{self.name} is missing"] if self.missing else []
        return [*known, f"{self.name} = other", *absent]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, values + 1 or 2], one 1 in each row; an unseen value is 'other'."""
        other = len(self.values)
        absent = other + 1 if self.missing else other
        found = numbered(column, self.values)
        missing = words_of(column).is_null().to_list()
        where = [
            absent if gone else other if number is None else number
            for gone, number in zip(missing, found, strict=True)
        ]
        encoded = np.zeros((len(where), len(self.features)), dtype=np.float32)
        encoded[np.arange(len(where)), where] = 1
        return encoded


@dataclass(frozen=True)
class PublicColumn:
    """Each cell by a public function of itself: nothing here is taken from the data.

    A number is shared between the two knots next to it, in proportion to its nearness: 12 between
    the knots 10 and 15 is 0.6 and 0.4; one beyond the last knot is all at that knot. Text is a 1 in
    the bucket that its hash names.
    """

    name: str
    knots: tuple[float, ...]  # rising
    buckets: int  # none where text counts as missing

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        near = [f"{self.name} near {knot:g}" for knot in self.knots]
        hashed = [f"{self.name} in bucket {i}" for i in range(self.buckets)]
        return [*near, *hashed, f"{self.name} is missing"]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, knots + buckets + 1]; what is neither number nor text is missing."""
        encoded = np.zeros((len(column), len(self.features)), dtype=np.float32)
        cells = cells_of(column)
        numbers = _numbers_of(cells)
        known = ~np.isnan(numbers)
        self._place(encoded, np.flatnonzero(known), numbers[known])
        left = np.flatnonzero(~known)
        encoded[left, self._where(cells, left)] = 1
        return encoded

    def _place(self, encoded: np.ndarray, rows: np.ndarray, numbers: np.ndarray) -> None:
        if not len(rows):
            return
        clipped = numbers.clip(self.knots[0], self.knots[-1])
        position = np.interp(clipped, self.knots, np.arange(len(self.knots)))
        lower = np.minimum(position.astype(np.int64), len(self.knots) - 2)
        encoded[rows, lower] = 1 - (position - lower)
        encoded[rows, lower + 1] = position - lower

    def _where(self, cells: pl.Series, rows: np.ndarray) -> list[int]:
        """The feature of each cell that is no number: its bucket, or 'missing'."""
        missing = len(self.knots) + self.buckets
        if not self.buckets:
            return [missing] * len(rows)
        words = cells.gather(rows)
        known: dict[str | None, int] = {None: missing}
        for word in words.unique().drop_nulls().to_list():
            known[word] = len(self.knots) + bucket_of(word, self.buckets)
        return [known[word] for word in words.to_list()]


def bucket_of(word: str, buckets: int) -> int:
    """BLAKE2b of the text modulo the number of buckets: the same everywhere and always.

    >>> bucket_of("Bern", 16), bucket_of("Rome", 16)
    (12, 0)
    """
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


Column = NumericColumn | CategoryColumn | PublicColumn


@dataclass(frozen=True)
class TableEncoder:
    """From rows of a table to input vectors, in the same way at training and at prediction."""

    columns: tuple[Column, ...]
    client: str
    label: str
    class_names: tuple[str, ...]
    inferred: bool = False  # whether a CSV's columns have types, which all of their cells decide

    @property
    def features(self) -> tuple[str, ...]:
        """A name for each entry of an input vector."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, frame: pl.DataFrame) -> Tensor:
        """float32 [rows, features]; unseen categories go to 'other', and nothing is refitted."""
        for column in self.columns:
            check_column(frame, column.name, "column")
        if frame.height * len(self.features) > MAX_NUMBERS:
            raise UserError(
                f"{frame.height:,} rows of {len(self.features):,} inputs each are too many for "
                "memory; declare ranges and categories, set fewer buckets, or take fewer rows."
            )
        parts = [column.encode(frame[column.name]) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def to_json(self) -> str:
        """All that `encode` needs, as text; `from_json` gives an equal encoder back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TableEncoder:
        """The encoder that `to_json` wrote; as text, or the path of a file such as encoder.json."""
        try:
            fields = json.loads(_read(text))
            columns = tuple(_column_from(entry) for entry in fields["columns"])
            names = tuple(fields["class_names"])
            inferred = bool(fields.get("inferred", True))  # as before there was a choice
            return cls(columns, fields["client"], fields["label"], names, inferred)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"This is not a table encoder's JSON ({error!r}).") from None


def _read(text: str | Path) -> str:
    """What a path leads to; text that begins as JSON does is no path."""
    if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"'{str(text)[:80]}' is not a table encoder's JSON, nor a file of it ({why}); give the "
            "text or the path of a run's encoder.json."
        ) from None


def _numbers_of(column: pl.Series) -> np.ndarray:
    """As float64, NaN where there is no number."""
    import polars as pl

    plain = words_of(column) if column.dtype == pl.String else column
    values = plain.cast(pl.Float64, strict=False).fill_null(float("nan"))
    return np.asarray(values.to_numpy(), dtype=np.float64)


def check_column(frame: pl.DataFrame, name: str, what: str) -> None:
    """Refuse a name that the table does not have."""
    if name not in frame.columns:
        raise unknown(what, name, frame.columns)


@dataclass(frozen=True)
class Declared:
    """What is said of a table and is public: its columns, and what they can hold."""

    client: str
    label: str
    class_names: tuple[str, ...]
    ranges: Ranges
    categories: Categories
    buckets: int = BUCKETS

    def inputs(self, frame: pl.DataFrame) -> list[str]:
        """The columns that are neither the client's nor the label's."""
        return [name for name in frame.columns if name not in (self.client, self.label)]

    def column(self, name: str) -> Column | None:
        """Of a column with a range or categories."""
        if name in self.categories:
            values = tuple(value.strip() for value in self.categories[name])
            return CategoryColumn(name, values, missing=True)
        if name in self.ranges:
            knots = np.linspace(*self.ranges[name], RANGE_KNOTS)
            return PublicColumn(name, tuple(knots.tolist()), 0)
        return None

    def check(self, frame: pl.DataFrame) -> None:
        """Refuse declarations that do not fit the table's header."""
        for name in (*self.ranges, *self.categories):
            what = "a range" if name in self.ranges else "categories"
            check_column(frame, name, f"column for {what}")
            if name in (self.client, self.label):
                raise UserError(f"'{name}' is the client or the label column, not an input.")
            if name in self.ranges and name in self.categories:
                raise UserError(f"'{name}' has both a range and categories; declare one of them.")
        for name, (low, high) in self.ranges.items():
            if not -LARGEST < low < high < LARGEST:
                raise UserError(f"The range of '{name}' is {low} to {high}; it must go upwards.")
        for name, values in self.categories.items():
            if not values or not distinct(values):
                raise UserError(
                    f"The categories of '{name}' are none or not distinct; list each once."
                )
        if not 1 <= self.buckets <= MAX_BUCKETS:
            raise UserError(f"buckets is {self.buckets}; give 1 to {MAX_BUCKETS:,}.")

    def encoder(self, columns: list[Column], inferred: bool) -> TableEncoder:
        """Of these columns."""
        if not columns:
            raise UserError(
                f"No column besides '{self.client}' and '{self.label}' can be an input; add some."
            )
        names = (self.client, self.label, self.class_names)
        return TableEncoder(tuple(columns), *names, inferred)


def public(frame: pl.DataFrame, declared: Declared) -> tuple[TableEncoder, list[str]]:
    """The encoder of public declarations, and notes on it.

    A column's type, which one cell can change, decides nothing: each cell may be a number or text.
    """
    declared.check(frame)
    columns: list[Column] = [
        declared.column(name) or PublicColumn(name, KNOTS, declared.buckets)
        for name in declared.inputs(frame)
    ]
    notes = []
    open_ = [column.name for column in columns if declared.column(column.name) is None]
    if open_:
        notes.append(
            f"Encoded by fixed public bins: {listed(open_)}. Declare public ranges or categories "
            f"for a finer encoding: --data ranges='{{{_key(open_[0])}=[0,100]}}' or --data "
            f'categories=\'{{{_key(open_[0])}=["a","b"]}}\', or [data.ranges] in TOML.'
        )
    for name in declared.ranges:
        if np.isnan(_numbers_of(cells_of(frame[name]))).all():
            notes.append(f"No cell of '{name}' is a number, although a range is declared for it.")
    return declared.encoder(columns, inferred=False), notes


def _ignored(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"Ignored, for they hold dates or nested or no values: {', '.join(names)}."]


def fitted(
    frame: pl.DataFrame, training: np.ndarray, declared: Declared
) -> tuple[TableEncoder, list[str]]:
    """The encoder of the training rows, and notes on what it ignored; `taken` says what it took."""
    declared.check(frame)
    rows = frame.filter(training)
    columns: list[Column] = []
    ignored: list[str] = []
    notes: list[str] = []
    for name in declared.inputs(rows):
        column = declared.column(name) or _fit_column(rows[name], notes)
        columns.append(column) if column else ignored.append(name)
    return declared.encoder(columns, inferred=True), notes + _ignored(ignored)


def taken(encoder: TableEncoder, declared: Declared) -> tuple[str, ...]:
    """What a fitted encoder took from the data, as noun phrases."""
    open_ = [column for column in encoder.columns if declared.column(column.name) is None]
    numeric = [c.name for c in open_ if isinstance(c, NumericColumn) and c.standardized]
    category = [c.name for c in open_ if isinstance(c, CategoryColumn)]
    phrases = ["the column types"]
    if numeric:
        phrases.append(f"the means and deviations of {listed(numeric)}")
    if category:
        phrases.append(f"the categories of {listed(category)}")
    return tuple(phrases)


def listed(names: list[str]) -> str:
    """Some names as one phrase.

    >>> listed(["age", "bmi"]), listed(list("abcdefg"))
    ('age and bmi', 'a, b, c, d, e and 2 more')
    """
    if len(names) > NAMED + 1:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _fit_column(column: pl.Series, notes: list[str]) -> NumericColumn | CategoryColumn | None:
    import polars as pl

    if column.null_count() == len(column):
        return None
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return _fit_numeric(column)
    if column.dtype in (pl.String, pl.Categorical, pl.Enum):
        return _fit_category(column, notes)
    return None


def _fit_numeric(column: pl.Series) -> NumericColumn | None:
    import polars as pl

    values = _numbers_of(column)
    known = values[np.abs(values) <= LARGEST]
    missing = len(known) < len(values)
    if column.dtype == pl.Boolean:
        return NumericColumn(column.name, 0.0, 1.0, 0.5, missing, clip=False)
    if len(known) == 0:
        return None
    mean, deviation = float(known.mean()), float(known.std())
    scale = deviation if deviation > SMALLEST else 1.0
    return NumericColumn(column.name, mean, scale, mean, missing, clip=False)


def _fit_category(column: pl.Series, notes: list[str]) -> CategoryColumn:
    words = words_of(column).rename("word")
    found = words.drop_nulls().value_counts(name="times")
    frequent = found.sort(["times", "word"], descending=[True, False]).head(MAX_CATEGORIES)
    if found.height > MAX_CATEGORIES:
        notes.append(
            f"'{column.name}' has {found.height} categories; the {MAX_CATEGORIES} most frequent "
            "are kept, the rest count as 'other'."
        )
    values = tuple(sorted(frequent["word"].to_list()))
    return CategoryColumn(column.name, values, words.null_count() > 0)


def _column_from(entry: dict[str, Any]) -> Column:
    if "knots" in entry:
        knots = tuple(map(float, entry["knots"]))
        if len(knots) < 2 or any(not a < b for a, b in pairwise(knots)):
            raise ValueError("knots must go upwards")
        return PublicColumn(entry["name"], knots, int(entry["buckets"]))
    if "values" in entry:
        return CategoryColumn(entry["name"], tuple(entry["values"]), entry["missing"])
    return NumericColumn(**entry)


def _key(name: str) -> str:
    """A column's name as a key of TOML.

    >>> _key("age"), _key("height in cm")
    ('age', '"height in cm"')
    """
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return name if bare else json.dumps(name, ensure_ascii=False)
