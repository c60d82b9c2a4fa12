"""A CSV or Parquet table with a client column and a label column, as a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.encoding import (
    MISSING,
    Ranges,
    TableEncoder,
    check_column,
    fitted,
    words_of,
)
from fedveil.data.federated import Dataset, Examples
from fedveil.errors import UserError
from fedveil.streams import stream

if TYPE_CHECKING:
    import polars as pl

MAX_CLASSES = 100
MAX_COLUMNS = 10_000
MAX_NAME = 1_000  # characters of a client's name
PACKED = (b"\x1f\x8b", b"\x28\xb5", b"\x78\x01", b"\x78\x9c", b"\x78\xda")  # gzip, zstd, zlib


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
    encoder, more = fitted(frame, ~testing, client, label, class_names, ranges or {})
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
    nulls = list(MISSING)
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
    words = words_of(column)
    for kind in (pl.Int64, pl.Float64):
        numbers = words.cast(kind, strict=False)
        if numbers.null_count() == words.null_count() < len(words):
            return numbers
    return words


def _complete(
    frame: pl.DataFrame, client: str, label: str, file: str
) -> tuple[pl.DataFrame, list[str]]:
    """The rows that have a client and a label."""
    check_column(frame, client, "client column")
    check_column(frame, label, "label column")
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


def _remarks(labels: np.ndarray, names: tuple[str, ...], testing: np.ndarray) -> list[str]:
    counts = np.bincount(labels)
    top = int(counts.argmax())
    share = counts[top] / len(labels)
    notes = [f"The largest class, '{names[top]}', has {share:.0%} of the rows."]
    if not testing.any():
        notes.append("No rows are held out for testing.")
    return notes
