"""Table cells as text in one canonical form, independent of the column's type.

The program that wrote a file chose each column's type from all of its cells: one missing cell turns
34 into 34.0, and one cell that is not a date turns dates into text. The encoding of a cell must not
depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
EXACT = 2.0**53  # float64 represents every whole number below it
_DAY, _TIME, _ZONE = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d", r"(Z|[+-]\d\d:?\d\d)?"


def words_of(column: pl.Series) -> pl.Series:
    """The cells as text, as written; the usual markers of a missing value become null."""
    import polars as pl

    dates = (pl.Date, pl.Datetime, pl.Time)
    plain = (pl.String, pl.Categorical, pl.Enum, pl.Boolean, pl.Null, *dates)
    if column.dtype.is_numeric() or column.dtype in plain:
        words = column.cast(pl.String)
    else:
        words = pl.Series(column.name, list(map(_written, column.to_list())), dtype=pl.String)
    words = words.str.strip_chars()
    return words.set(words.is_in(MISSING).fill_null(False), None)


def cells_of(column: pl.Series) -> pl.Series:
    """The canonical form of each cell: 34, 34.0 and "34" are 34, true is 1, midnight is its day."""
    import polars as pl

    words = _dates(words_of(column))
    truth = words.str.to_lowercase().replace_strict(
        {"true": "1", "false": "0"}, default=None, return_dtype=pl.String
    )
    numbers = words.cast(pl.Float64, strict=False).fill_nan(None)
    return _first(truth, _whole(numbers), numbers.cast(pl.String), words)


def names_of(column: pl.Series) -> pl.Series:
    """Each cell as a client's name: 7.0 is 7, but 007 is a different client."""
    words = _dates(words_of(column)).str.replace(r"^-0\.0+$", "0")
    return words.str.replace(r"^(-?[1-9][0-9]*|0)\.0+$", "${1}")


def labels_of(column: pl.Series) -> pl.Series:
    """Each cell as a class name: 1.0 and 01 are 1."""
    import polars as pl

    words = _dates(words_of(column))
    return _first(_whole(words.cast(pl.Float64, strict=False)), words)


def numbered(column: pl.Series, names: Sequence[str]) -> list[int | None]:
    """The index of each cell among `names`, matched as written or else in canonical form."""
    import polars as pl

    exact = {name: place for place, name in enumerate(names)}
    forms = cells_of(pl.Series(list(names), dtype=pl.String)).to_list()
    alike = {form: place for place, form in reversed([*enumerate(forms)]) if form is not None}
    words, cells = words_of(column).to_list(), cells_of(column).to_list()
    return [exact.get(word, alike.get(cell)) for word, cell in zip(words, cells, strict=True)]


def distinct(names: Sequence[str]) -> bool:
    """Whether no two names match the same cells, as "1" and "1.0" do."""
    import polars as pl

    return cells_of(pl.Series(list(names), dtype=pl.String)).n_unique() == len(names)


def days_of(column: pl.Series) -> pl.Series:
    """Days since 1970-01-01 of each cell that begins with a date (YYYY-MM-DD); null for others."""
    import polars as pl

    words = _dates(words_of(column))
    dated = words.str.extract(rf"^({_DAY})(?: {_TIME}.*)?$", 1)
    days = dated.str.to_date("%Y-%m-%d", strict=False).to_physical().cast(pl.Float64)
    return days.alias(column.name)


def merging(column: pl.Series) -> bool:
    """Whether the column holds whole numbers too large for its type to distinguish."""
    return column.dtype.is_float() and bool((column.abs().fill_nan(0) >= EXACT).any())


def _written(value: Any) -> str | None:
    """A cell of a nested or rare type; whole numbers lose their fraction."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_written(value[name])}' for name in sorted(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_written(one)) for one in value)}]"
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None if value is None else str(value)


def _dates(words: pl.Series) -> pl.Series:
    """Dates and times in canonical form: 2024-01-01T00:00:00.000 is 2024-01-01."""
    words = words.str.replace(rf"^({_DAY})T(\d\d:\d\d.*)$", "${1} ${2}")
    fraction = rf"^((?:{_DAY} )?{_TIME}(?:\.\d*[1-9])?)\.?0*{_ZONE}$"
    words = words.str.replace(fraction, "${1}${2}")
    return words.str.replace(rf"^({_DAY}) 00:00(?::00)?{_ZONE}$", "${1}${2}")


def _whole(numbers: pl.Series) -> pl.Series:
    """Whole numbers as text without a fraction; null for all others."""
    import polars as pl

    whole = (numbers == numbers.round()) & (numbers.abs() < EXACT)
    return numbers.set(~whole, None).cast(pl.Int64, strict=False).cast(pl.String)


def _first(*columns: pl.Series) -> pl.Series:
    """The first value of each row that is not null."""
    found = columns[-1]
    for column in reversed(columns[:-1]):
        found = column.zip_with(column.is_not_null(), found)
    return found.alias(columns[-1].name)
