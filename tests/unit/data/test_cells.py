from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

from fedveil.data.cells import cells_of, distinct, labels_of, names_of, numbered

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
        ("{a: 1, b: x}", [[{"b": "x", "a": 1}], [{"a": 1.0, "b": "x"}]]),
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
    kept = ["007", "1e5", "1.5", "00.0", "+7.0", "true"]
    assert names_of(pl.Series(kept)).to_list() == kept


def test_names_of_classes() -> None:
    assert labels_of(pl.Series(["1.0", "01", "true", "0.5"])).to_list() == ["1", "1", "true", "0.5"]


def test_a_name_is_found_as_it_is_written_or_in_its_one_form() -> None:
    names = ("01", "1", "true", "x", "None")
    cells = pl.Series(["1", "01", "1.0", "True", "x", "y", None])
    assert numbered(cells, names) == [1, 0, 0, 0, 3, None, None]
    assert numbered(pl.Series([1.0, 0.0]), ("false", "true")) == [1, 0]
    assert distinct(("false", "true"))
    assert not distinct(("1", "true"))
