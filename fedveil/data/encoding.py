"""Encodes the columns of a table as numbers, identically for training and prediction.

An encoded cell is a function of that cell and of the encoder. Where the encoder's own numbers come
from is decided in `declared.py` and `learning.py`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.cells import cells_of, days_of, numbered, words_of
from fedveil.errors import UserError, unknown
from fedveil.parts.statistics import Statistics

if TYPE_CHECKING:
    import polars as pl

MAX_NUMBERS = 2**29  # in all inputs together
LARGEST, SMALLEST = 3e38, 1e-150  # limit of an input's magnitude; least deviation to divide by
KNOTS = (
    -1e4, -1e3, -100.0, -10.0, -1.0, 0.0, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 60.0, 80.0, 120.0, 160.0, 250.0, 500.0, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6,
)  # fmt: skip
RANGE_KNOTS = 9  # for a column with a public range
BUCKETS = 16  # for a text column
MAX_BUCKETS = 10_000


@dataclass(frozen=True)
class NumericColumn:
    """(x − center) / scale; a missing x becomes `fill`, and 1 in a second column if `missing`."""

    name: str
    center: float
    scale: float
    fill: float
    missing: bool
    clip: bool  # to [0, 1]: how versions before 0.2 encoded a public range

    @property
    def standardized(self) -> bool:
        """Whether center, scale and `fill` are the mean and deviation of the data."""
        return self.fill == self.center

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, 1 or 2]; anything that is not a finite float32 counts as missing."""
        values = numbers_of(column)
        absent = ~(np.abs(values) <= LARGEST)
        scaled = (np.where(absent, self.fill, values) - self.center) / self.scale
        scaled = scaled.clip(0, 1) if self.clip else scaled.clip(-LARGEST, LARGEST)
        parts = [scaled, absent] if self.missing else [scaled]
        return np.stack(parts, axis=1).astype(np.float32)


@dataclass(frozen=True)
class CategoryColumn:
    """One column per known value, one for all others, and one for missing if any was missing."""

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
    """Encodes each cell by a public function of that cell: nothing is computed from the data.

    A number is split between its two neighbouring knots by linear interpolation: 12 between the
    knots 10 and 15 gives 0.6 and 0.4. A number beyond the last knot goes to that knot. Text sets a
    1 in the bucket of its hash.
    """

    name: str
    knots: tuple[float, ...]  # increasing
    buckets: int  # 0: text counts as missing

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        near = [f"{self.name} near {knot:g}" for knot in self.knots]
        hashed = [f"{self.name} in bucket {i}" for i in range(self.buckets)]
        return [*near, *hashed, f"{self.name} is missing"]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, knots + buckets + 1]; other cells count as missing."""
        encoded = np.zeros((len(column), len(self.features)), dtype=np.float32)
        cells = cells_of(column)
        numbers = numbers_of(cells)
        known = ~np.isnan(numbers)
        self._place(encoded, np.flatnonzero(known), numbers[known])
        left = np.flatnonzero(~known)
        encoded[left, self._where(cells, left)] = 1
        return encoded

    def _place(self, encoded: np.ndarray, rows: np.ndarray, numbers: np.ndarray) -> None:
        if len(rows):
            interpolate(encoded, rows, numbers, self.knots)

    def _where(self, cells: pl.Series, rows: np.ndarray) -> list[int]:
        """The feature of each cell that is not a number: its bucket, or 'missing'."""
        missing = len(self.knots) + self.buckets
        if not self.buckets:
            return [missing] * len(rows)
        words = cells.gather(rows)
        known: dict[str | None, int] = {None: missing}
        for word in words.unique().drop_nulls().to_list():
            known[word] = len(self.knots) + bucket_of(word, self.buckets)
        return [known[word] for word in words.to_list()]


@dataclass(frozen=True)
class DateColumn:
    """A date (YYYY-MM-DD) as its position between knots in days, its month and its weekday."""

    name: str
    days: tuple[float, ...]  # knots in days since 1970-01-01, increasing

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        epoch = datetime.date(1970, 1, 1)
        near = [f"{self.name} near {epoch + datetime.timedelta(round(day))}" for day in self.days]
        months = [f"{self.name} in month {month}" for month in range(1, 13)]
        weekdays = [f"{self.name} on weekday {day}" for day in range(1, 8)]
        return [*near, *months, *weekdays, f"{self.name} is missing"]

    def encode(self, column: pl.Series) -> np.ndarray:
        """float32 [rows, knots + 12 + 7 + 1]; a cell that is no date counts as missing."""
        import polars as pl

        encoded = np.zeros((len(column), len(self.features)), dtype=np.float32)
        days = days_of(column)
        known = np.flatnonzero(days.is_not_null().to_numpy())
        encoded[np.flatnonzero(days.is_null().to_numpy()), -1] = 1
        if not len(known):
            return encoded
        there, dates = days.drop_nulls(), days.drop_nulls().cast(pl.Int32).cast(pl.Date)
        interpolate(encoded, known, there.to_numpy(), self.days)
        encoded[known, len(self.days) + dates.dt.month().to_numpy() - 1] = 1
        encoded[known, len(self.days) + 12 + dates.dt.weekday().to_numpy() - 1] = 1
        return encoded


def interpolate(
    encoded: np.ndarray, rows: np.ndarray, numbers: np.ndarray, knots: tuple[float, ...]
) -> None:
    """Split each number between its two neighbouring knots, in the first columns."""
    clipped = numbers.clip(knots[0], knots[-1])
    position = np.interp(clipped, knots, np.arange(len(knots)))
    lower = np.minimum(position.astype(np.int64), len(knots) - 2)
    encoded[rows, lower] = 1 - (position - lower)
    encoded[rows, lower + 1] = position - lower


def bucket_of(word: str, buckets: int) -> int:
    """BLAKE2b of the text modulo the number of buckets: the same on every machine.

    >>> bucket_of("Bern", 16), bucket_of("Rome", 16)
    (12, 0)
    """
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


Column = NumericColumn | CategoryColumn | PublicColumn | DateColumn


@dataclass(frozen=True)
class TableEncoder:
    """Converts rows of a table to input vectors, identically for training and prediction."""

    columns: tuple[Column, ...]
    client: str
    label: str
    class_names: tuple[str, ...]
    inferred: bool = False  # whether a CSV's columns have types, inferred from all of their cells
    statistics: Statistics | None = None  # the noise of what was learned from the data
    released: tuple[str, ...] = ()  # noun phrases for that
    target_range: tuple[float, float] | None = None  # that a numeric target is scaled from, to 0…1
    noise: str = ""  # a name of the noise of the statistics, which does not reveal it

    def restored(self, predictions: Any) -> Any:
        """Predictions of a scaled numeric target in its own unit."""
        low, high = self.target_range or (0.0, 1.0)
        return low + (high - low) * predictions

    @property
    def features(self) -> tuple[str, ...]:
        """A name for each entry of an input vector."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, frame: pl.DataFrame) -> Tensor:
        """float32 [rows, features]; unseen categories map to 'other', and nothing is refitted."""
        for column in self.columns:
            check_column(frame, column.name, "column")
        if frame.height * len(self.features) > MAX_NUMBERS:
            raise UserError(
                f"The inputs of {frame.height:,} rows do not fit in memory. Declare ranges and "
                "categories, set fewer buckets, or use fewer rows."
            )
        parts = [column.encode(frame[column.name]) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def to_json(self) -> str:
        """Everything `encode` needs, as text; `from_json` restores an equal encoder."""
        plain = asdict(self)
        if self.statistics is None:  # as versions before 0.3 write it
            del plain["statistics"], plain["released"], plain["noise"]
        return json.dumps(plain, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TableEncoder:
        """Load an encoder that `to_json` wrote, from text or from a file such as encoder.json."""
        try:
            fields = json.loads(_read(text))
            columns = tuple(_column_from(entry) for entry in fields["columns"])
            names = tuple(fields["class_names"])
            inferred = bool(fields.get("inferred", True))  # earlier versions always inferred types
            known = fields.get("statistics")
            statistics = None if known is None else Statistics(**known)
            released, scale = tuple(fields.get("released", ())), fields.get("target_range")
            return cls(
                columns, fields["client"], fields["label"], names, inferred, statistics, released,
                None if scale is None else (float(scale[0]), float(scale[1])),
                str(fields.get("noise", "")),
            )  # fmt: skip
        except UserError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"This is not the JSON of a table encoder ({error!r}).") from None


def _read(text: str | Path) -> str:
    """The content of a path; text that starts like JSON is not a path."""
    if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"'{str(text)[:80]}' is neither the JSON of a table encoder nor a file with it "
            f"({why}). Give the text or the path of a run's encoder.json."
        ) from None


def numbers_of(column: pl.Series) -> np.ndarray:
    """The cells as float64, NaN where a cell is not a number."""
    import polars as pl

    plain = words_of(column) if column.dtype == pl.String else column
    values = plain.cast(pl.Float64, strict=False).fill_null(float("nan"))
    return np.asarray(values.to_numpy(), dtype=np.float64)


def check_column(frame: pl.DataFrame, name: str, what: str) -> None:
    """Refuse a column name that is not in the table."""
    if name not in frame.columns:
        raise unknown(what, name, frame.columns)


def _column_from(entry: dict[str, Any]) -> Column:
    if "knots" in entry:
        return PublicColumn(entry["name"], _increasing(entry["knots"]), int(entry["buckets"]))
    if "days" in entry:
        return DateColumn(entry["name"], _increasing(entry["days"]))
    if "values" in entry:
        return CategoryColumn(entry["name"], tuple(entry["values"]), entry["missing"])
    return NumericColumn(**entry)


def _increasing(values: list[Any]) -> tuple[float, ...]:
    knots = tuple(map(float, values))
    if len(knots) < 2 or any(not a < b for a, b in pairwise(knots)):
        raise ValueError("knots must increase")
    return knots
