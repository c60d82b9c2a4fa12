"""Tables as polars frames: from CSV and Parquet files, and from pandas, polars and Arrow tables."""

from __future__ import annotations

import csv
import gzip
import io
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.data.cells import days_of, words_of, written
from fedveil.errors import UserError

if TYPE_CHECKING:
    import polars as pl

MAX_COLUMNS = 10_000
MAX_UNPACKED = 2**31  # bytes of a compressed CSV: more could be any amount
PARQUET = (".parquet", ".pq")
TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLES = (*TEXT, ".parquet")
TYPED = "iufbMm"  # kinds of NumPy's and pandas' types that all cells of a column have
PLAIN = {bool, float, str, bytes}  # Python types of which no value is beyond that of a column
GZIP = b"\x1f\x8b"
PACKED = (b"\x28\xb5", b"\x78\x01", b"\x78\x9c", b"\x78\xda")  # zstd, zlib


def is_table(path: Path) -> bool:
    """Whether a file has the name of a table.

    >>> is_table(Path("ehr.csv.gz")), is_table(Path("digits.zip"))
    (True, False)
    """
    return path.name.lower().endswith((*TABLES, *PARQUET))


def named_frame(source: Any) -> tuple[str, pl.DataFrame]:
    """The name and the rows of a file, or of a polars, pandas or Arrow table, or of columns."""
    if isinstance(source, str | Path):
        path = Path(source)
        return path.name.removesuffix(".gz"), read_frame(path)
    return "table", _not_empty(as_frame(source), "The table")


def as_frame(source: Any) -> pl.DataFrame:
    """A polars frame of a polars, pandas or Arrow table, or of a dictionary of columns."""
    import polars as pl

    if isinstance(source, pl.DataFrame):
        return source
    if isinstance(source, pl.LazyFrame):
        return source.collect()
    try:
        _refuse_twice([*map(str, getattr(source, "columns", ()))], "The table")
        if isinstance(source, Mapping):
            return pl.DataFrame([_column(str(name), cells) for name, cells in source.items()])
        if hasattr(source, "columns") and hasattr(source, "dtypes"):  # pandas, without pyarrow
            return pl.DataFrame([_column(str(name), source[name]) for name in source.columns])
        if hasattr(source, "__arrow_c_stream__"):
            return pl.DataFrame(source)
    except UserError:
        raise
    except Exception as error:  # other libraries raise many kinds
        raise UserError(f"The table could not be converted ({_brief(error)}).") from None
    raise UserError(
        f"A {type(source).__name__} is not a table. Give the path of a CSV or Parquet file, or a "
        "polars, pandas or Arrow table."
    )


def _column(name: str, given: Any) -> pl.Series:
    """A column of one type as it is; of Python objects, each cell by itself.

    A type that is inferred from all cells would let one of them change how others are read.
    """
    import numpy as np
    import polars as pl

    if isinstance(given, pl.Series):
        return given.alias(name)
    one_type = getattr(getattr(given, "dtype", None), "kind", "O") in TYPED
    if one_type and isinstance(given, np.ndarray):
        return pl.Series(name, given)
    cells = _cells(given)
    if one_type:
        return pl.Series(name, cells, strict=False, nan_to_null=True)
    kinds = {type(cell) for cell in cells if cell is not None}
    if len(kinds) == 1 and kinds <= PLAIN:
        return pl.Series(name, cells)
    return written(name, cells)


def _cells(column: Any) -> list[Any]:
    """The cells of any column. Missing values of pandas, such as pandas.NA, are None."""
    cells = column.tolist() if hasattr(column, "tolist") else list(column)
    if not hasattr(column, "isna"):
        return cells
    empty = column.isna().tolist()
    return [None if gone else cell for cell, gone in zip(cells, empty, strict=True)]


def read_frame(path: Path | str, inferred: bool = False) -> pl.DataFrame:
    """The rows of a .csv, .tsv, .csv.gz or .parquet file.

    A CSV's cells are text. With inferred types, a column of numbers becomes numeric and a column of
    dates becomes dates: one cell can then change the encoding of all others in its column.
    """
    path = Path(path)
    require_file(path)
    try:
        frame = _read(path)
    except UserError:
        raise
    except Exception as error:  # polars raises many kinds for broken bytes
        if "more fields" in str(error) and (where := _long_row(path)):
            raise UserError(f"'{path}' is not a readable CSV: {where}. Correct that row.") from None
        raise UserError(
            f"'{path}' is not a readable CSV or Parquet file ({_brief(error)})."
        ) from None
    _not_empty(frame, f"'{path}'")
    return with_types(frame) if inferred else frame


def require_file(path: Path) -> None:
    """Refuse a table that does not exist."""
    if not path.is_file():
        raise UserError(f"No such file: '{path}'. Give the path of a CSV or Parquet file.")


def with_types(frame: pl.DataFrame) -> pl.DataFrame:
    """Text columns as numbers, truth values or dates where every cell is one."""
    return frame.with_columns([_typed(column) for column in frame.get_columns()])


def _brief(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def _not_empty(frame: pl.DataFrame, what: str) -> pl.DataFrame:
    if frame.height == 0:
        raise UserError(f"{what} has no rows. Give a table with data.")
    return frame


def _read(path: Path) -> pl.DataFrame:
    import polars as pl

    if path.suffix.lower() in PARQUET:
        return pl.read_parquet(path)
    source = _unpacked(path)
    header = _header(path, source)
    separator = _separator(header)
    if header.count(separator) >= MAX_COLUMNS:
        raise ValueError(f"its first line has more than {MAX_COLUMNS:,} columns")
    content = path if source is None else source
    _refuse_twice(_names(content, separator), f"'{path}'")
    return pl.read_csv(content, separator=separator, infer_schema=False)


def _names(content: Path | bytes, separator: str) -> list[str]:
    """The first row of a CSV: polars renames columns of the same name."""
    import polars as pl

    first = pl.read_csv(
        content, separator=separator, infer_schema=False, has_header=False, n_rows=1
    )
    return [str(name) for row in first.rows() for name in row if name is not None]


def _refuse_twice(names: list[str], what: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"{what} has several columns named '{twice}'. Rename or remove all but one."
        )


def _long_row(path: Path) -> str:
    """The first row of a CSV with more cells than columns; empty if none is found."""
    source = _unpacked(path)
    text = (
        path.open(encoding="utf-8", errors="replace", newline="")
        if source is None
        else (io.StringIO(source.decode("utf-8", "replace"), newline=""))
    )
    separator = _separator(_header(path, source))
    with text as lines, suppress(csv.Error):
        rows = csv.reader(lines, delimiter=separator)
        width = len(next(rows))
        for row in rows:
            if len(row) > width:
                return f"line {rows.line_num} has {len(row)} fields, but there are {width} columns"
    return ""


def _unpacked(path: Path) -> bytes | None:
    """The content of a gzipped file of bounded size; None if it is not compressed."""
    with path.open("rb") as file:
        first = file.read(2)
    if first in PACKED:
        raise ValueError("it is compressed; decompress it first")
    if first != GZIP:
        return None
    with gzip.open(path) as packed:
        content = packed.read(MAX_UNPACKED + 1)
    if len(content) > MAX_UNPACKED:
        raise ValueError(f"it unpacks to more than {MAX_UNPACKED:,} bytes; decompress it first")
    return content


def _header(path: Path, content: bytes | None) -> str:
    """The first line of text."""
    if content is not None:
        return content.partition(b"\n")[0].decode("utf-8", "replace")
    with path.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline()


def _separator(header: str) -> str:
    return max(",;\t|", key=header.count)


def _typed(column: pl.Series) -> pl.Series:
    """Text without surrounding blanks, as numbers, truth values or dates where every cell is."""
    import polars as pl

    if column.dtype != pl.String:
        return column
    words = words_of(column)
    for kind in (pl.Int64, pl.Float64):
        numbers = words.cast(kind, strict=False)
        if numbers.null_count() == words.null_count() < len(words):
            return numbers
    for found in (_truth(words), days_of(words).cast(pl.Int32).cast(pl.Date)):
        if found.null_count() == words.null_count() < len(words):
            return found
    return words


def _truth(words: pl.Series) -> pl.Series:
    import polars as pl

    known = {"true": True, "false": False}
    return words.str.to_lowercase().replace_strict(known, default=None, return_dtype=pl.Boolean)
