"""A CSV or Parquet table with a client column and a label column, as a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.cells import (
    MISSING,
    cells_of,
    distinct,
    labels_of,
    merging,
    names_of,
    numbered,
    words_of,
)
from fedveil.data.encoding import (
    BUCKETS,
    Categories,
    Declared,
    Ranges,
    TableEncoder,
    check_column,
    fitted,
    public,
    taken,
)
from fedveil.data.federated import Dataset, Examples
from fedveil.data.origin import Origin
from fedveil.data.sketch import sketched
from fedveil.errors import UserError

if TYPE_CHECKING:
    import polars as pl

MAX_CLASSES = 100
MAX_COLUMNS = 10_000
MAX_NAME = 1_000  # characters of a client's name
PARQUET = (".parquet", ".pq")
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
    categories: Categories | None = None,
    classes: Sequence[str] | None = None,
    buckets: int = BUCKETS,
    standardize: bool = False,
) -> Dataset:
    """The data set of `read_table`, where the encoder is not needed."""
    return read_table(
        path, client, label, test_fraction, seed, ranges, categories, classes, buckets, standardize
    ).dataset


def read_table(
    path: Path | str,
    client: str,
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    ranges: Ranges | None = None,
    categories: Categories | None = None,
    classes: Sequence[str] | None = None,
    buckets: int = BUCKETS,
    standardize: bool = False,
) -> Table:
    """Rows → inputs float32 [n, features], labels 0…k−1, keys = client column.

    A row's inputs, label, key and part (training or test) are functions of that row and of these
    arguments: `ranges` of numbers, `categories` of text, else fixed bins and `buckets`. Not so
    where `classes` are not given, for the list of them is then read from the data, and with
    `standardize`, which scales by the data's own means and deviations. `Dataset.origin` names
    what was taken from the data.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction must be at least 0 and below 1, not {test_fraction}.")
    path = Path(path)
    frame = read_frame(path)
    words, kept, notes = _complete(frame, client, label, path.name)
    class_names = _found(words.filter(kept), label) if classes is None else _declared(classes)
    places = numbered(words[label], class_names)
    kept, more = _of_classes(places, kept, class_names, label)
    keys = np.array(words[client].filter(kept).to_list(), dtype=str)
    _check_clients(keys, client)
    rows = _row_digests(frame)[kept]
    testing = _testing(rows, test_fraction, seed)
    declared = Declared(client, label, class_names, ranges or {}, categories or {}, buckets)
    exclusions = [] if classes is not None else [f"the classes of '{label}'"]
    if standardize:
        typed = read_frame(path, inferred=True).filter(kept)
        encoder, told = fitted(typed, ~testing, declared)
        inputs = encoder.encode(typed)
        exclusions += taken(encoder, declared)
    else:
        plain = frame.filter(kept)
        encoder, told = public(plain, declared)
        inputs = encoder.encode(plain)
    labels = torch.tensor([place for place, there in zip(places, kept, strict=True) if there])
    dataset = Dataset(
        path.stem,
        Examples(inputs[~testing], labels[~testing]),
        Examples(inputs[testing], labels[testing]),
        len(class_names),
        class_names=class_names,
        keys=keys[~testing],
        notes=(
            *(*notes, *more, *told),
            *(_undeclared(label, class_names) if classes is None else ()),
            *_remarks(keys, labels.numpy(), class_names, testing),
        ),
        encoder=encoder.to_json(),
        origin=Origin(exclusions=tuple(exclusions)),
        sketch=sketched(rows),
    )
    return Table(dataset, encoder)


def read_frame(path: Path | str, inferred: bool = False) -> pl.DataFrame:
    """The rows of a .csv, .tsv or .parquet file.

    A CSV's cells are text. Where types are inferred, text that is all numbers becomes numbers, and
    dates become dates: then one cell can change what becomes of all others in its column.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file '{path}'; give the path of a CSV or Parquet file.")
    try:
        frame = _read(path, inferred)
    except Exception as error:  # polars raises many kinds for broken bytes
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"'{path}' is not a readable CSV or Parquet file ({reason}).") from None
    if frame.height == 0:
        raise UserError(f"'{path}' has no rows; give a table with data.")
    if not inferred:
        return frame
    return frame.with_columns([_typed(column) for column in frame.get_columns()])


def _read(path: Path, inferred: bool) -> pl.DataFrame:
    import polars as pl

    if path.suffix.lower() in PARQUET:
        return pl.read_parquet(path)
    header = _header(path)
    separator = max(",;\t|", key=header.count)
    if header.count(separator) >= MAX_COLUMNS:
        raise ValueError(f"its first line has more than {MAX_COLUMNS:,} columns")
    if not inferred:
        return pl.read_csv(path, separator=separator, infer_schema=False)
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
) -> tuple[pl.DataFrame, np.ndarray, list[str]]:
    """Clients and classes as text, and which rows have both."""
    import polars as pl

    check_column(frame, client, "client column")
    check_column(frame, label, "label column")
    if client == label:
        raise UserError(f"'{client}' cannot be the client and the label column at once.")
    if merging(frame[client]):
        raise UserError(
            f"The client column '{client}' holds floats of 2^53 or more, which cannot tell whole "
            "numbers apart; write it as text or as whole numbers."
        )
    words = pl.DataFrame([names_of(frame[client]), labels_of(frame[label])])
    named = words[client].str.len_chars().fill_null(0).to_numpy() <= MAX_NAME
    there = (words[client].is_not_null() & words[label].is_not_null()).to_numpy()
    if not (named & there).any():
        raise UserError(f"No row of '{file}' has both '{client}' and '{label}'; fill them in.")
    notes = []
    if not there.all():
        gone = int((~there).sum())
        notes.append(f"{gone} rows without a value in '{client}' or '{label}' were left out.")
    if not named.all():
        gone = int((~named).sum())
        notes.append(
            f"{gone} rows whose '{client}' has over {MAX_NAME:,} characters were left out."
        )
    return words, named & there, notes


def _declared(classes: Sequence[str]) -> tuple[str, ...]:
    import polars as pl

    names = labels_of(pl.Series("classes", [str(name) for name in classes], dtype=pl.String))
    if names.null_count() or not distinct(names.to_list()) or len(names) < 2:
        raise UserError(
            f"classes is {list(classes)}; give the names of two or more classes, each once."
        )
    return tuple(names.to_list())


def _found(words: pl.DataFrame, label: str) -> tuple[str, ...]:
    """The classes that occur: numbers by their size, then text by its letters."""
    import polars as pl

    found = words[label].drop_nulls().unique()
    numbers = found.cast(pl.Float64, strict=False)
    if bool((numbers.is_not_null() & (numbers != numbers.round())).any()):
        raise UserError(
            f"The label column '{label}' holds fractions or NaN; name a column of classes."
        )
    if len(found) > MAX_CLASSES:
        raise UserError(
            f"The label column '{label}' has {len(found)} distinct values, more than "
            f"{MAX_CLASSES} classes; name a column of classes, or group its values first."
        )
    order = pl.DataFrame({"number": numbers, "word": found}).sort(
        ["number", "word"], nulls_last=True
    )
    if len(found) < 2:
        raise UserError(
            f"The label column '{label}' is '{found[0]}' in every row: nothing to learn."
        )
    return tuple(order["word"].to_list())


def _of_classes(
    places: list[int | None], kept: np.ndarray, class_names: tuple[str, ...], label: str
) -> tuple[np.ndarray, list[str]]:
    """Only the rows of these classes; each is left out or not by itself."""
    known = np.array([place is not None for place in places])
    gone = int((kept & ~known).sum())
    if not (kept & known).any():
        raise UserError(
            f"No row's '{label}' is one of the classes {', '.join(class_names)}; declare others."
        )
    if not gone:
        return kept, []
    return kept & known, [f"{gone} rows with another '{label}' than the classes were left out."]


def _row_digests(frame: pl.DataFrame) -> np.ndarray:
    """64 bits of BLAKE2b for each row, of its cells, whatever their order and types; uint64 [n]."""
    import polars as pl

    cells = [cells_of(column).fill_null("") for column in frame.get_columns()]
    joined = pl.DataFrame(cells).select(
        pl.concat_list(pl.all()).list.sort().list.join("\x1f").alias("row")
    )
    digests = b"".join(
        hashlib.blake2b(row.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for row in joined["row"]
    )
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def _check_clients(keys: np.ndarray, client: str) -> None:
    if len(np.unique(keys)) < 2:
        raise UserError(
            f"The client column '{client}' is '{keys[0]}' in every row; federated training needs "
            "at least two clients, so name the column that tells people or devices apart."
        )


def _testing(rows: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which rows are held out: each with chance `fraction`, by a hash of the seed and itself.

    Were they drawn together, or a client's rows together, one row more or less would change what
    others are used for. So equal rows fare alike, and a client may be left with test rows only.
    """
    salt = hashlib.blake2b(f"fedveil/held out/{seed}".encode(), digest_size=16).digest()
    drawn = b"".join(
        hashlib.blake2b(row.tobytes(), key=salt, digest_size=8).digest() for row in rows
    )
    return np.frombuffer(drawn, dtype="<u8") < np.uint64(fraction * 2**64)


def _undeclared(label: str, class_names: tuple[str, ...]) -> list[str]:
    named = ",".join(class_names[:3]) + ("…" if len(class_names) > 3 else "")
    return [
        f"The classes of '{label}' are read from the data, which no ε covers; declare them if they "
        f"are public: --data classes={named}"
    ]


def _remarks(
    keys: np.ndarray, labels: np.ndarray, names: tuple[str, ...], testing: np.ndarray
) -> list[str]:
    counts = np.bincount(labels)
    top = int(counts.argmax())
    share = counts[top] / len(labels)
    notes = [f"The largest class, '{names[top]}', has {share:.0%} of the rows."]
    if not testing.any():
        notes.append("No rows are held out for testing.")
    without = len(np.unique(keys)) - len(np.unique(keys[~testing]))
    if without:
        notes.append(f"{without} clients have test rows only and take no part in training.")
    return notes
