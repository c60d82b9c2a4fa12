"""Columns of a table as numbers: fitted on the training rows, and the same at prediction."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    import polars as pl

MAX_CATEGORIES = 100
MAX_NUMBERS = 2**29  # of all inputs together
LARGEST, SMALLEST = 3e38, 1e-150  # of numbers that inputs can hold; of a deviation to divide by
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
Ranges = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class NumericColumn:
    """(x − center) / scale; a missing x becomes `fill`, and 1 in a second column if `missing`."""

    name: str
    center: float
    scale: float
    fill: float
    missing: bool
    clip: bool  # into [0, 1], for a public range

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
        number = {value: i for i, value in enumerate(self.values)}
        absent = other + 1 if self.missing else other
        words = words_of(column).to_list()
        where = [absent if word is None else number.get(word, other) for word in words]
        encoded = np.zeros((len(where), len(self.features)), dtype=np.float32)
        encoded[np.arange(len(where)), where] = 1
        return encoded


@dataclass(frozen=True)
class TableEncoder:
    """From rows of a table to input vectors, in the same way at training and at prediction."""

    columns: tuple[NumericColumn | CategoryColumn, ...]
    client: str
    label: str
    class_names: tuple[str, ...]

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
                "memory; leave out columns with many categories, or take fewer rows."
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
            return cls(columns, fields["client"], fields["label"], names)
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


def words_of(column: pl.Series) -> pl.Series:
    """As text, with the usual marks of a missing value made null."""
    import polars as pl

    words = column.cast(pl.String).str.strip_chars()
    return words.set(words.is_in(MISSING).fill_null(False), None)


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


def fitted(
    frame: pl.DataFrame,
    training: np.ndarray,
    client: str,
    label: str,
    class_names: tuple[str, ...],
    ranges: Ranges,
) -> tuple[TableEncoder, list[str]]:
    """The encoder of the training rows, and notes on what it ignored or took from them."""
    for name, (low, high) in ranges.items():
        _check_range(frame, name, low, high)
    rows = frame.filter(training)
    fitted: list[NumericColumn | CategoryColumn] = []
    ignored: list[str] = []
    notes: list[str] = []
    for name in (n for n in rows.columns if n not in (client, label)):
        column = _fit_column(rows[name], ranges.get(name), notes)
        fitted.append(column) if column else ignored.append(name)
    if not fitted:
        raise UserError(f"No column besides '{client}' and '{label}' can be an input; add some.")
    if ignored:
        notes.append(f"Ignored, for they hold dates or nested or no values: {', '.join(ignored)}.")
    notes += _leaks(fitted)
    return TableEncoder(tuple(fitted), client, label, class_names), notes


def _check_range(frame: pl.DataFrame, name: str, low: float, high: float) -> None:
    check_column(frame, name, "column for a range")
    if not frame[name].dtype.is_numeric():
        raise UserError(
            f"A range was given for '{name}', which does not hold numbers; leave it out."
        )
    if not -np.inf < low < high < np.inf:
        raise UserError(f"The range of '{name}' is {low} to {high}; it must go upwards.")


def _fit_column(
    column: pl.Series, bounds: tuple[float, float] | None, notes: list[str]
) -> NumericColumn | CategoryColumn | None:
    import polars as pl

    if column.null_count() == len(column):
        return None
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return _fit_numeric(column, bounds)
    if column.dtype in (pl.String, pl.Categorical, pl.Enum):
        return _fit_category(column, notes)
    return None


def _fit_numeric(column: pl.Series, bounds: tuple[float, float] | None) -> NumericColumn | None:
    import polars as pl

    values = _numbers_of(column)
    known = values[np.abs(values) <= LARGEST]
    missing = len(known) < len(values)
    if bounds:  # always with the indicator: even whether one is needed would come from the data
        low, high = bounds
        return NumericColumn(column.name, low, high - low, (low + high) / 2, True, clip=True)
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


def _leaks(columns: list[NumericColumn | CategoryColumn]) -> list[str]:
    """What the encoder took from the data, which no noise covers."""
    numeric = [c.name for c in columns if isinstance(c, NumericColumn) and c.standardized]
    category = [c.name for c in columns if isinstance(c, CategoryColumn)]
    notes = []
    if numeric:
        notes.append(
            f"Means and deviations of {', '.join(numeric)} come from the data and are not covered "
            "by the privacy guarantee; to avoid that give public ranges: "
            f"--data ranges='{{{_key(numeric[0])}=[0,100]}}', or [data.ranges] in TOML."
        )
    if category:
        notes.append(
            f"The category lists of {', '.join(category)} come from the data and are not covered "
            "by the privacy guarantee; make sure that they are public."
        )
    return notes


def _column_from(entry: dict[str, Any]) -> NumericColumn | CategoryColumn:
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
