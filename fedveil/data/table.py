"""A CSV or Parquet table with a client column and a label column, as a data set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Dataset, Examples
from fedveil.errors import UserError, unknown
from fedveil.streams import stream

if TYPE_CHECKING:
    import polars as pl

MAX_CLASSES = 100
MAX_CATEGORIES = 100
MAX_COLUMNS = 10_000
MAX_NAME = 1_000  # characters of a client's name
MAX_NUMBERS = 2**29  # of all inputs together
PACKED = (b"\x1f\x8b", b"\x28\xb5", b"\x78\x01", b"\x78\x9c", b"\x78\xda")  # gzip, zstd, zlib
LARGEST, SMALLEST = 3e38, 1e-150  # of numbers that inputs can hold; of a deviation to divide by
_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
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
        values = _numbers(column)
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
        words = _words(column).to_list()
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
            _check_column(frame, column.name, "column")
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
    def from_json(cls, text: str) -> TableEncoder:
        """The encoder that `to_json` wrote."""
        try:
            fields = json.loads(text)
            columns = tuple(_column_from(entry) for entry in fields["columns"])
            names = tuple(fields["class_names"])
            return cls(columns, fields["client"], fields["label"], names)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"This is not a table encoder's JSON ({error!r}).") from None


@dataclass(frozen=True, eq=False)
class Table:
    """A table's data set and the encoder that made its inputs."""

    dataset: Dataset
    encoder: TableEncoder


def load_table(
    path: Path | str,
    client: str,
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    ranges: Ranges | None = None,
) -> Dataset:
    """The data set of `read_table`, where the encoder is not needed."""
    return read_table(path, client, label, test_fraction, seed, ranges).dataset


def read_table(
    path: Path | str,
    client: str,
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    ranges: Ranges | None = None,
) -> Table:
    """Rows → inputs float32 [n, features], labels 0…k−1 in sorted order, keys = client column.

    Numbers in `ranges` are scaled by these public bounds, so nothing of them is taken from the
    data; for the others, and for the lists of categories, `notes` says that they leak.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction must be at least 0 and below 1, not {test_fraction}.")
    frame, notes = _complete(read_frame(path), client, label, Path(path).name)
    keys = _keys(frame[client])
    _check_clients(keys, client)
    labels, class_names = _labels(frame[label], label)
    testing = _testing(keys, test_fraction, seed)
    encoder, more = _fit(frame, ~testing, client, label, class_names, ranges or {})
    inputs, targets = encoder.encode(frame), torch.from_numpy(labels)
    dataset = Dataset(
        Path(path).stem,
        Examples(inputs[~testing], targets[~testing]),
        Examples(inputs[testing], targets[testing]),
        len(class_names),
        class_names=class_names,
        keys=keys[~testing],
        notes=(*notes, *more, *_remarks(labels, class_names, testing)),
        encoder=encoder.to_json(),
    )
    return Table(dataset, encoder)


def read_frame(path: Path | str) -> pl.DataFrame:
    """The rows of a .csv, .tsv or .parquet file; text that is all numbers becomes numbers."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file '{path}'; give the path of a CSV or Parquet file.")
    try:
        frame = _read(path)
    except Exception as error:  # polars raises many kinds for broken bytes
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"'{path}' is not a readable CSV or Parquet file ({reason}).") from None
    if frame.height == 0:
        raise UserError(f"'{path}' has no rows; give a table with data.")
    return frame.with_columns([_typed(column) for column in frame.get_columns()])


def _read(path: Path) -> pl.DataFrame:
    import polars as pl

    if path.suffix.lower() in (".parquet", ".pq"):
        return pl.read_parquet(path)
    header = _header(path)
    separator = max(",;\t|", key=header.count)
    if header.count(separator) >= MAX_COLUMNS:
        raise ValueError(f"its first line has more than {MAX_COLUMNS:,} columns")
    nulls = list(_MISSING)
    return pl.read_csv(
        path, separator=separator, null_values=nulls, try_parse_dates=True, infer_schema_length=None
    )


def _header(path: Path) -> str:
    """The first line of text; what is packed is not text, and could be of any size unpacked."""
    with path.open("rb") as file:
        first = file.read(2)
    if first in PACKED:
        raise ValueError("it is packed; unpack it first")
    with path.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline()


def _typed(column: pl.Series) -> pl.Series:
    """Text without its outer blanks, and numbers where all of it is numbers."""
    import polars as pl

    if column.dtype != pl.String:
        return column
    words = _words(column)
    for kind in (pl.Int64, pl.Float64):
        numbers = words.cast(kind, strict=False)
        if numbers.null_count() == words.null_count() < len(words):
            return numbers
    return words


def _words(column: pl.Series) -> pl.Series:
    """As text, with the usual marks of a missing value made null."""
    import polars as pl

    words = column.cast(pl.String).str.strip_chars()
    return words.set(words.is_in(_MISSING).fill_null(False), None)


def _numbers(column: pl.Series) -> np.ndarray:
    """As float64, NaN where there is no number."""
    import polars as pl

    plain = _words(column) if column.dtype == pl.String else column
    values = plain.cast(pl.Float64, strict=False).fill_null(float("nan"))
    return np.asarray(values.to_numpy(), dtype=np.float64)


def _check_column(frame: pl.DataFrame, name: str, what: str) -> None:
    if name not in frame.columns:
        raise unknown(what, name, frame.columns)


def _complete(
    frame: pl.DataFrame, client: str, label: str, file: str
) -> tuple[pl.DataFrame, list[str]]:
    """The rows that have a client and a label."""
    _check_column(frame, client, "client column")
    _check_column(frame, label, "label column")
    if client == label:
        raise UserError(f"'{client}' cannot be the client and the label column at once.")
    kept = frame.drop_nulls([client, label])
    if kept.height == 0:
        raise UserError(f"No row of '{file}' has both '{client}' and '{label}'; fill them in.")
    dropped = frame.height - kept.height
    note = f"{dropped} rows without a value in '{client}' or '{label}' were left out."
    return kept, [note] if dropped else []


def _keys(column: pl.Series) -> np.ndarray:
    values = np.asarray(column.to_numpy())
    if values.dtype != object:
        return values
    names = [str(value) for value in values]
    if (longest := max(map(len, names))) > MAX_NAME:
        raise UserError(
            f"The client column '{column.name}' has a name of {longest} characters, more than "
            f"{MAX_NAME}; name the column that tells people or devices apart."
        )
    return np.array(names)


def _check_clients(keys: np.ndarray, client: str) -> None:
    if len(np.unique(keys)) < 2:
        raise UserError(
            f"The client column '{client}' is '{keys[0]}' in every row; federated training needs "
            "at least two clients, so name the column that tells people or devices apart."
        )


def _labels(column: pl.Series, label: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Classes 0…k−1 int64 [n] and their names, in sorted order of the values."""
    if column.dtype.is_float():
        column = _whole(column, label)
    values, classes = np.unique(column.to_numpy(), return_inverse=True)
    if len(values) > MAX_CLASSES:
        raise UserError(
            f"The label column '{label}' has {len(values)} distinct values, more than "
            f"{MAX_CLASSES} classes; name a column of classes, or group its values first."
        )
    if len(values) < 2:
        raise UserError(
            f"The label column '{label}' is '{values[0]}' in every row: nothing to learn."
        )
    return classes.astype(np.int64), tuple(str(value) for value in values)


def _whole(column: pl.Series, label: str) -> pl.Series:
    import polars as pl

    values = column.to_numpy()
    if not np.all(np.isfinite(values) & (values == np.round(values))):
        raise UserError(
            f"The label column '{label}' holds fractions or NaN; name a column of classes."
        )
    return column.cast(pl.Int64)


def _testing(keys: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which rows are held out: about `fraction` of a client's, but never its last training row.

    Each client's rows are drawn by the client's own stream: were they drawn together, one client
    more or less would change what all others train on.
    """
    testing = np.zeros(len(keys), dtype=bool)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.r_[True, keys[order][1:] != keys[order][:-1]])
    for rows in np.split(order, starts[1:]):
        rng = stream(seed, 0, f"held out of {keys[rows[0]]}")
        count = min(int(fraction * len(rows) + rng.random()), len(rows) - 1)
        testing[rng.permutation(rows)[:count]] = True
    return testing


def _fit(
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
    _check_column(frame, name, "column for a range")
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

    values = _numbers(column)
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
    words = _words(column).rename("word")
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
            "by the privacy guarantee; give public `ranges` to avoid that."
        )
    if category:
        notes.append(
            f"The category lists of {', '.join(category)} come from the data and are not covered "
            "by the privacy guarantee; make sure that they are public."
        )
    return notes


def _remarks(labels: np.ndarray, names: tuple[str, ...], testing: np.ndarray) -> list[str]:
    counts = np.bincount(labels)
    top = int(counts.argmax())
    share = counts[top] / len(labels)
    notes = [f"The largest class, '{names[top]}', has {share:.0%} of the rows."]
    if not testing.any():
        notes.append("No rows are held out for testing.")
    return notes


def _column_from(entry: dict[str, Any]) -> NumericColumn | CategoryColumn:
    if "values" in entry:
        return CategoryColumn(entry["name"], tuple(entry["values"]), entry["missing"])
    return NumericColumn(**entry)
