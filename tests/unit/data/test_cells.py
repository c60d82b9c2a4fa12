from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pandas
import polars as pl
import pytest

from fedveil.data.cells import cells_of, distinct, names_of, numbered
from fedveil.data.frames import as_frame

DAY = datetime.date(2024, 1, 2)
NOON = datetime.datetime(2024, 1, 2, 12, 30, 5, 600_000)


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ("34", [[34], [34.0], [Decimal("34.00")], ["34"], [" 34.0 "], ["3.4e1"], ["034"]]),
        ("0.1", [[0.1], pl.Series([0.1], dtype=pl.Float32), [Decimal("0.10")], ["0.1"], [".10"]]),
        ("1", [[True], [1], [1.0], ["true"], ["True"], ["TRUE"]]),
        ("0", [[False], [0], [-0.0], ["false"]]),
        ("2024-01-02", [[DAY], [datetime.datetime(2024, 1, 2)], ["2024-01-02T00:00:00.000"]]),
        ("2024-01-02 12:30:05.6", [[NOON], pl.Series([NOON], dtype=pl.Datetime("ns"))]),
        ("2024-01-02 12:30:05.6", [["2024-01-02T12:30:05.600"], ["2024-01-02 12:30:05.6"]]),
        ("12:30:05", [[datetime.time(12, 30, 5)], ["12:30:05"], ["12:30:05.000"]]),
        ("Bern", [["Bern"], pl.Series(["Bern"], dtype=pl.Categorical), [b"Bern"]]),
        ("1.2345678901234568e+16", [[12345678901234567], [1.2345678901234567e16]]),
        ("[1, 2]", [[[1, 2]], [[1.0, 2.0]], ["[1, 2]"]]),
        ("{a: 1, b: x}", [[{"b": "x", "a": 1}], [{"a": 1.0, "b": "x", "c": None}]]),
        ("{a: {}, b: 1}", [[{"a": {"c": None}, "b": True}], [{"a": {}, "b": 1}]]),
        ("{on: 2024-01-02}", [[{"on": DAY}], [{"on": datetime.datetime(2024, 1, 2)}]]),
        (None, [[None], [float("nan")], ["NA"], [""], pl.Series([None], dtype=pl.Int64)]),
    ],
)
def test_a_cell_has_one_form_whatever_its_column_s_type(form: str | None, columns: Any) -> None:
    for column in columns:
        series = column if isinstance(column, pl.Series) else pl.Series(column)
        assert cells_of(series.alias("x")).to_list() == [form]
        assert cells_of(series.alias("x")).name == "x"


def test_words_that_are_no_numbers_stay() -> None:
    words = ["1:30", "12-05-2024", "-nan", "0x10", "1_000", "a 00:00:00.0"]
    assert cells_of(pl.Series(words)).to_list() == words


def test_names_of_clients() -> None:
    for column in ([7, 10], [7.0, 10.0], ["7", "10"], ["7.0", "10.00"]):
        assert names_of(pl.Series(column)).to_list() == ["7", "10"]
    assert names_of(pl.Series([0.0, -0.0, -7.0])).to_list() == ["0", "0", "-7"]
    assert names_of(pl.Series([Decimal("7.50"), Decimal("7.125")])).to_list() == ["7.5", "7.125"]
    for column in ([True, False], [1, 0], ["true", "FALSE"]):
        assert names_of(pl.Series(column)).to_list() == ["1", "0"]
    kept = ["007", "1e5", "1.5", "00.0", "+7.0"]
    assert names_of(pl.Series(kept)).to_list() == kept


WEST = datetime.timezone(datetime.timedelta(hours=-8))
COLUMNS: dict[str, list[Any]] = {
    "numbers": [1, 2],
    "large numbers": [2**53 + 1, 2**70],
    "fractions": [0.1, 2.25, 1e-5, 6.9e-7, 3.0],
    "decimals": [Decimal("0.10"), Decimal("7")],
    "truth values": [True, False],
    "days": [DAY, datetime.date(2020, 1, 1)],
    "times": [NOON, datetime.datetime(2024, 1, 2)],
    "zoned times": [NOON.replace(tzinfo=WEST)],
    "times of day": [NOON.time()],
    "durations": [datetime.timedelta(1)],
    "words": ["a", "1"],
    "bytes": [b"a"],
    "lists": [[1, 2]],
    "fields": [{"a": 1}, {"a": 2}],
}
CELLS = [
    5, 2, 0.5, 2**80, True, "x", b"x", None, DAY, NOON, NOON.replace(tzinfo=datetime.UTC), [1.5],
    {"x": 1}, {"a": 1.5}, {"a": "x", "b": 2}, Decimal("1.125"), datetime.timedelta(1), 1j,
]  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("library", ["Python", "pandas"])
def test_one_cell_changes_no_other(kind: str, library: str) -> None:
    cells = COLUMNS[kind]

    def read(column: list[Any]) -> list[list[Any]]:
        table: Any = {"x": column}
        if library == "pandas":
            table = pandas.DataFrame({"x": pandas.Series(column, dtype=object)})
        frame = as_frame(table)
        return [form(frame["x"]).to_list() for form in (cells_of, names_of)]

    alone = read(cells)
    for cell in CELLS:
        assert [forms[:-1] for forms in read([*cells, cell])] == alone
        assert [forms[1:] for forms in read([cell, *cells])] == alone


@pytest.mark.parametrize("column", [
    [1, 2], [1.5, 2.0], [True, False], [NOON, datetime.datetime(2024, 1, 2)],
    pandas.date_range("2024-01-01", periods=3, freq="h", tz="Europe/Zurich"),
    [pandas.Timedelta("1 day"), pandas.Timedelta("90 min")],
])  # fmt: skip
def test_a_typed_column_is_read_as_its_cells_are(column: Any) -> None:
    typed = pandas.Series(column)
    mixed = pandas.Series([*typed.tolist(), "x"], dtype=object)
    for form in (cells_of, names_of):
        one, other = (as_frame(pandas.DataFrame({"x": c}))["x"] for c in (typed, mixed))
        assert form(one).to_list() == form(other).to_list()[:-1]


def test_a_name_is_found_as_it_is_written_or_in_its_one_form() -> None:
    names = ("01", "1", "true", "x", "None")
    cells = pl.Series(["1", "01", "1.0", "True", "x", "y", None])
    assert numbered(cells, names) == [1, 0, 0, 0, 3, None, None]
    assert numbered(pl.Series([1.0, 0.0]), ("false", "true")) == [1, 0]
    assert distinct(("false", "true"))
    assert not distinct(("1", "true"))
