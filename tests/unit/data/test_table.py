from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fedveil.data.encoding import (
    BUCKETS,
    KNOTS,
    CategoryColumn,
    PublicColumn,
    TableEncoder,
    bucket_of,
)
from fedveil.data.federated import Dataset
from fedveil.data.frames import read_frame
from fedveil.data.partition import ByKey
from fedveil.data.table import EncodedTable, TableOptions, load_table
from fedveil.data.table import read_table as read_with
from fedveil.errors import UserError


def read_table(source: Any, client: str, label: str, **options: Any) -> EncodedTable:
    """Rows are held out by default: most tables here have too few clients to hold any out."""
    options = {"holdout": "rows", **options}
    return read_with(source, TableOptions(client=client, label=label, **options))


def read_rows(source: Any, client: str, label: str, **options: Any) -> Dataset:
    return read_table(source, client, label, **options).dataset


def people(rows: int = 60) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "person": [f"p{i % 6}" for i in range(rows)],
            "age": rng.integers(18, 90, rows),
            "city": rng.choice(["Bern", "Rome", "Oslo"], rows),
            "member": rng.random(rows) < 0.5,
            "joined": [datetime.date(2020, 1, 1 + i % 28) for i in range(rows)],
            "outcome": np.where(np.arange(rows) % 4 == 0, "yes", "no"),
        }
    )


def csv(folder: Path, frame: pl.DataFrame | str, name: str = "people.csv") -> Path:
    path = folder / name
    if isinstance(frame, str):
        path.write_text(frame, encoding="utf-8")
    else:
        frame.write_csv(path)
    return path


def rows_of(table: str) -> str:
    return "who,x,y\n" + table


def test_columns_of_images_are_told() -> None:
    rows = {"who": ["a", "b"] * 9, "y": ["0", "1"] * 9}
    files, pixels = {**rows, "scan": ["x/1.PNG"] * 18}, {**rows, "scan": [b"x"] * 18}
    for columns in (files, pixels):
        data = load_table(columns, "who", "y", holdout="rows")
        assert "If 'scan' has images, give --data image=scan to train on them." in data.notes
    plain = load_table({**rows, "x": ["a.txt"] * 18}, "who", "y", holdout="rows")
    assert not any("images" in note for note in plain.notes)


def test_a_csv_becomes_a_data_set(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    table = read_table(path, "person", "outcome", standardize=True, drop=("joined",))
    dataset = table.dataset
    assert dataset.name == "people"
    assert len(dataset.train) + len(dataset.test) == 60
    assert 4 <= len(dataset.test) <= 20
    assert dataset.class_names == ("no", "yes")
    assert table.encoder.features == (
        "age",
        "city = Bern",
        "city = Oslo",
        "city = Rome",
        "city = other",
        "member",
    )
    assert dataset.train.inputs.dtype == torch.float32
    age = dataset.train.inputs[:, 0]
    assert float(age.mean()) == pytest.approx(0, abs=1e-5)
    assert float(age.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert dataset.train.inputs[:, 1:5].sum(dim=1).tolist() == [1.0] * len(dataset.train)
    assert set(dataset.train.inputs[:, 5].tolist()) == {0.0, 1.0}
    assert dataset.split(ByKey()).clients == 6


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {
            "ranges": {"age": (0, 100)},
            "categories": {"city": ("Bern", "Oslo"), "member": ("true", "false"), "joined": ("x",)},
        },
    ],
    ids=["undeclared", "declared"],
)
def test_parquet_and_csv_agree(tmp_path: Path, declared: dict[str, Any]) -> None:
    """In all that is made of a row: its inputs, label, client and part; whatever the types."""
    kinds = {"age": pl.Int64, "member": pl.Boolean, "joined": pl.Date, "ratio": pl.Float64}
    frame = people().with_columns(
        ratio=pl.Series(np.random.default_rng(1).random(60).astype(np.float32)).cast(pl.Float32),
        at=pl.Series([datetime.datetime(2020, 1, 1, i % 24, 30, 0, 500_000) for i in range(60)]),
        nothing=pl.Series([None] * 60),
        person=pl.Series(np.arange(60) % 6),
    )
    two = read_rows(csv(tmp_path, frame), "person", "outcome", **declared)
    others = {"age": pl.Float64, "member": pl.Float64, "joined": pl.Datetime("ns")}
    others |= {"person": pl.Float64, "at": pl.Datetime("ms"), "nothing": pl.String}
    for types in ({}, others, {**kinds, "city": pl.Categorical, "age": pl.Decimal(10, 2)}):
        frame.cast({n: t for n, t in types.items() if n != "ratio"}).write_parquet(
            tmp_path / "people.parquet"
        )
        one = read_rows(tmp_path / "people.parquet", "person", "outcome", **declared)
        assert torch.equal(one.train.inputs, two.train.inputs)
        assert torch.equal(one.test.inputs, two.test.inputs)
        assert torch.equal(one.train.labels, two.train.labels)
        assert torch.equal(one.test.labels, two.test.labels)
        assert one.keys is not None
        assert np.array_equal(one.keys, two.keys)
        assert one.sketch == two.sketch


def test_keys_and_labels_stay_with_their_rows(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": np.arange(40) % 5, "x": np.arange(40.0), "y": np.arange(40) % 2})
    table = read_table(csv(tmp_path, frame), "who", "y", ranges={"x": (0, 39)})
    rows = (table.dataset.train.inputs[:, :9] @ torch.linspace(0, 39, 9)).round().long()
    assert table.dataset.keys is not None
    assert table.dataset.keys.tolist() == [str(int(row) % 5) for row in rows]
    assert table.dataset.train.labels.tolist() == (rows % 2).tolist()


def test_the_seed_decides_the_held_out_rows(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    first, again, other = (read_rows(path, "person", "outcome", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert not torch.equal(first.test.inputs, other.test.inputs)


def test_about_the_asked_fraction_is_held_out(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": np.arange(4000) % 50, "x": range(4000), "y": [0, 1] * 2000})
    path = csv(tmp_path, frame)
    for fraction in (0.0, 0.1, 0.5, 0.9):
        dataset = read_rows(path, "who", "y", test_fraction=fraction)
        assert len(dataset.train) + len(dataset.test) == 4000
        assert len(dataset.test) == pytest.approx(4000 * fraction, abs=4 * 32)


def test_a_client_with_test_rows_only_is_told(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": range(300), "x": range(300), "y": [0, 1] * 150})
    dataset = read_rows(csv(tmp_path, frame), "who", "y")
    gone = 300 - dataset.split(ByKey()).clients
    assert gone == len(dataset.test) > 0
    told = f"{gone} clients are held out for testing: they have only test rows."
    assert told in dataset.notes


def test_notes_tell_imbalance_dates_and_leaks(tmp_path: Path) -> None:
    dataset = read_rows(csv(tmp_path, people()), "person", "outcome", standardize=True)
    notes = "\n".join(dataset.notes)
    assert "The largest class, 'no', has 75% of the rows." in notes
    assert "Ignored" not in notes
    assert dataset.origin.exclusions == (
        "the classes of 'outcome'",
        "the column types",
        "the means and deviations of age",
        "the categories of city",
        "the first and last dates of joined",
    )


def test_public_ranges_take_nothing_from_the_data(tmp_path: Path) -> None:
    ranges = {"age": (0.0, 80.0)}
    table = read_table(csv(tmp_path, people()), "person", "outcome", ranges=ranges)
    column = table.encoder.columns[0]
    assert column == PublicColumn("age", (0, 10, 20, 30, 40, 50, 60, 70, 80), 0)
    encoded = column.encode(pl.Series("age", ["-50", "24", "500", None, "abc", "true"]))
    assert encoded.sum(axis=1).tolist() == pytest.approx([1] * 6)
    assert encoded[0, 0] == encoded[2, 8] == encoded[3, 9] == encoded[4, 9] == 1
    assert encoded[1, 2:4].tolist() == pytest.approx([0.6, 0.4])
    assert encoded[5, :2].tolist() == pytest.approx([0.9, 0.1])
    standardized = read_table(
        csv(tmp_path, people()), "person", "outcome", ranges=ranges, standardize=True
    )
    assert "age" not in standardized.dataset.origin.excluded


def test_by_default_a_cell_is_a_number_text_or_missing(tmp_path: Path) -> None:
    table = read_table(csv(tmp_path, people()), "person", "outcome", classes=("no", "yes"))
    assert table.dataset.origin.exclusions == ()
    age, city, member, joined = table.encoder.columns
    assert {type(c) for c in table.encoder.columns} == {PublicColumn}
    assert len(table.encoder.features) == 4 * (len(KNOTS) + BUCKETS + 1)
    cells = pl.Series("age", ["12", "12.0", " 1.2e1", "abc", "", None, "?", "inf", "-1e9", "1e300"])
    encoded = age.encode(cells)
    assert encoded.sum(axis=1).tolist() == pytest.approx([1] * 10)
    ten = KNOTS.index(10.0)
    for row in range(3):
        assert encoded[row, [ten, ten + 1]].tolist() == pytest.approx([0.6, 0.4])
    assert encoded[3, len(KNOTS) + bucket_of("abc", BUCKETS)] == 1
    assert encoded[4:7, -1].tolist() == [1, 1, 1]
    last = len(KNOTS) - 1
    assert encoded[[7, 8, 9], [last, 0, last]].tolist() == [1, 1, 1]
    truth = member.encode(pl.Series("member", ["true", "False", "1", "0"]))
    assert np.array_equal(truth[:2], truth[2:])
    assert not np.array_equal(truth[0], truth[1])
    assert joined.encode(pl.Series("joined", ["2020-01-01"]))[0, len(KNOTS) : -1].sum() == 1
    assert city.encode(pl.Series("city", [])).shape == (0, len(KNOTS) + BUCKETS + 1)


def test_a_parquet_file_s_schema_decides_nothing(tmp_path: Path) -> None:
    people().write_parquet(tmp_path / "people.parquet")
    table = read_table(tmp_path / "people.parquet", "person", "outcome", buckets=8)
    names = ("age", "city", "member", "joined")
    assert table.encoder.columns == tuple(PublicColumn(name, KNOTS, 8) for name in names)
    assert not any("Ignored" in note for note in table.dataset.notes)


def test_large_numbers_in_a_column_of_fractions_name_no_clients(tmp_path: Path) -> None:
    """2^53 and 2^53 + 1 are one float64: a gap would make one client of two."""
    frame = pl.DataFrame({"who": [2**53, 2**53 + 1] * 10, "x": range(20), "y": [0, 0, 1, 1] * 5})
    frame.write_parquet(tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet", "who", "y").split(ByKey()).clients == 2
    frame.cast({"who": pl.Float64}).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="cannot represent every whole number"):
        read_rows(tmp_path / "t.parquet", "who", "y")


def test_declared_categories_and_classes(tmp_path: Path) -> None:
    text = rows_of("a,red,0\nb,,1.0\na,blue,0\nb, red ,1\nb,red,2\na,green,0\n")
    table = read_table(
        csv(tmp_path, text),
        "who",
        "y",
        test_fraction=0,
        categories={"x": ("red", "blue")},
        classes=("1", "0"),
    )
    assert table.encoder.features == ("x = red", "x = blue", "x = other", "x is missing")
    assert table.dataset.train.inputs.argmax(dim=1).tolist() == [0, 3, 1, 0, 2]
    assert table.dataset.train.labels.tolist() == [1, 0, 1, 0, 1]
    assert table.dataset.class_names == ("1", "0")
    assert table.dataset.origin.exclusions == ()
    assert "Left out 1 rows whose 'y' is not one of the classes." in table.dataset.notes


def test_missing_numbers_get_the_mean_and_an_indicator(tmp_path: Path) -> None:
    text = rows_of("a,1,0\nb,3,1\na,NA,0\nb,?,1\na,inf,0\n")
    table = read_table(csv(tmp_path, text), "who", "y", test_fraction=0, standardize=True)
    assert table.encoder.features == ("x", "x is missing")
    assert table.dataset.train.inputs.tolist() == [[-1, 0], [1, 0], [0, 1], [0, 1], [0, 1]]


def test_missing_categories_are_a_category(tmp_path: Path) -> None:
    text = rows_of("a,red,0\nb,,1\na,blue,0\nb, red ,1\n")
    table = read_table(csv(tmp_path, text), "who", "y", test_fraction=0, standardize=True)
    assert table.encoder.features == ("x = blue", "x = red", "x = other", "x is missing")
    assert table.dataset.train.inputs.argmax(dim=1).tolist() == [1, 3, 0, 1]


def test_a_constant_column_is_no_division_by_zero(tmp_path: Path) -> None:
    dataset = read_rows(
        csv(tmp_path, rows_of("a,7,0\nb,7,1\n")), "who", "y", test_fraction=0, standardize=True
    )
    assert dataset.train.inputs.tolist() == [[0], [0]]
    assert any("No rows are held out for testing." in note for note in dataset.notes)


def test_unseen_categories_and_new_gaps_at_prediction(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    table = read_table(path, "person", "outcome", standardize=True, drop=("joined",))
    mean = table.encoder.columns[0].center  # type: ignore[union-attr]
    frame = pl.DataFrame({"age": [mean, None], "city": ["Paris", None], "member": [None, True]})
    encoded = table.encoder.encode(frame)
    assert encoded.tolist() == [[0, 0, 0, 0, 1, 0.5], [0, 0, 0, 0, 1, 1]]
    assert table.encoder.encode(frame.clear()).shape == (0, 6)


def test_rare_categories_become_other(tmp_path: Path) -> None:
    names = [f"v{i:03}" for i in range(150)] + [f"v{i:03}" for i in range(50, 150)]
    frame = pl.DataFrame({"who": np.arange(250) % 3, "x": names, "y": np.arange(250) % 2})
    table = read_table(csv(tmp_path, frame), "who", "y", test_fraction=0, standardize=True)
    (column,) = table.encoder.columns
    assert isinstance(column, CategoryColumn)
    assert column.values == tuple(f"v{i:03}" for i in range(50, 150))
    assert float(table.dataset.train.inputs[:, -1].sum()) == 50
    assert "'x' has 150 categories. The 100 most frequent are kept" in table.dataset.notes[0]


@pytest.mark.parametrize("standardize", [False, True])
def test_the_encoder_survives_json(tmp_path: Path, standardize: bool) -> None:
    path = csv(tmp_path, people())
    encoder = read_table(path, "person", "outcome", standardize=standardize).encoder
    assert encoder.inferred == standardize
    again = TableEncoder.from_json(encoder.to_json())
    assert again == encoder
    assert torch.equal(again.encode(people()), encoder.encode(people()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": [{"name": "x"}]}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="the JSON of a table encoder"):
        TableEncoder.from_json(text)


def test_a_missing_input_column_at_prediction_is_named(tmp_path: Path) -> None:
    encoder = read_table(csv(tmp_path, people()), "person", "outcome").encoder
    with pytest.raises(UserError, match=r"no column 'age'\. Did you mean 'aged'"):
        encoder.encode(people().rename({"age": "aged"}))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["7", "3", "7", "3"], ("3", "7")),
        (["1.0", "0.0", "1.0", "0.0"], ("0", "1")),
        (["true", "false", "true", "false"], ("0", "1")),
        (["10", "9", "10", "9"], ("9", "10")),
        (["b", "a", "b", "a"], ("a", "b")),
    ],
)
def test_labels_of_many_kinds(tmp_path: Path, values: list[str], names: tuple[str, ...]) -> None:
    text = rows_of("".join(f"{'ab'[i % 2]},{i},{v}\n" for i, v in enumerate(values)))
    dataset = read_rows(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert dataset.class_names == names
    assert dataset.train.labels.tolist() == [1, 0, 1, 0]


def test_rows_without_client_or_label_are_left_out(tmp_path: Path) -> None:
    text = rows_of("a,1,0\n,2,1\nb,3,\nb,4,1\n")
    dataset = read_rows(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert len(dataset.train) == 2
    assert dataset.notes[0] == "Left out 2 rows without a value in 'who' or 'y'."


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_and_blanks(tmp_path: Path, separator: str) -> None:
    text = rows_of("a, 1,0\nb, 2.5,1\n").replace(",", separator)
    frame = read_frame(csv(tmp_path, text), inferred=True)
    assert frame["x"].to_list() == [1.0, 2.5]
    assert read_frame(tmp_path / "people.csv")["x"].to_list() == [" 1", " 2.5"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a readable CSV"),
        ("who,x,y\n", "has no rows"),
        ("whom,x,y\na,1,0\n", "no client column 'who'. Did you mean 'whom'"),
        ("who,x,why\na,1,0\n", "no label column 'y'"),
        (rows_of("a,1,0\na,2,1\n"), "'a' in every row. Federated training needs"),
        (rows_of("a,1,0\nb,2,0\n"), "Name a column with two classes"),
        (rows_of("a,1,0.5\nb,2,1\n"), "holds fractions"),
        (rows_of("a,1,\nb,2,\n"), "No row of 'people.csv' has both"),
        (rows_of("".join(f"{i},1,{i}\n" for i in range(101))), "101 distinct values"),
        ("who,y\na,1\nb,0\n", "No column besides 'who' and 'y'"),
        ("who,x,y\na,1,0\nb,2,1,5,6\n", "not a readable CSV"),
    ],
)
def test_unusable_tables(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_rows(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert "\n" not in str(caught.value)


def test_unusable_arguments(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    with pytest.raises(UserError, match="No such file"):
        read_rows(tmp_path / "absent.csv", "who", "y")
    with pytest.raises(UserError, match="test_fraction"):
        read_rows(path, "person", "outcome", test_fraction=1.0)
    with pytest.raises(UserError, match="is both the client and the label"):
        read_rows(path, "person", "person")
    with pytest.raises(UserError, match=r"no column for a range 'agee'\. Did you mean 'age'"):
        read_rows(path, "person", "outcome", ranges={"agee": (0, 1)})
    wrong: dict[str, dict[str, Any]] = {
        "Give low < high": {"ranges": {"age": (1, 1)}},
        "no column for categories 'town'": {"categories": {"town": ("a",)}},
        "are empty or repeat a value": {"categories": {"city": ("Bern", "Bern")}},
        "'age' are empty or repeat a value": {"categories": {"age": ("1", "1.0")}},
        "each once": {"classes": ("1", "true")},
        "two of a range, categories and dates": {
            "ranges": {"age": (0, 1)},
            "categories": {"age": ("1",)},
        },
        "is the client or label column": {"ranges": {"outcome": (0, 1)}},
        "two or more classes": {"classes": ("yes",)},
        "No row's 'outcome' is one of the classes": {"classes": ("ja", "nein")},
        "buckets is 0": {"buckets": 0},
    }
    for says, given in wrong.items():
        with pytest.raises(UserError, match=says):
            read_rows(path, "person", "outcome", **given)
    notes = read_rows(path, "person", "outcome", ranges={"city": (0, 1)}).notes
    assert any("none of its cells is a number" in note for note in notes)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="not a readable CSV or Parquet"):
        read_rows(tmp_path / "bad.parquet", "who", "y")


OLD = """{"columns": [
 {"name": "age", "center": 50.0, "scale": 10.0, "fill": 50.0, "missing": true, "clip": false},
 {"name": "bmi", "center": 10.0, "scale": 50.0, "fill": 35.0, "missing": true, "clip": true},
 {"name": "member", "center": 0.0, "scale": 1.0, "fill": 0.5, "missing": false, "clip": false},
 {"name": "city", "values": ["Bern", "Rome"], "missing": false}],
 "client": "who", "label": "y", "class_names": ["no", "yes"]}"""


def test_encoders_of_earlier_versions_encode_as_they_did(tmp_path: Path) -> None:
    encoder = TableEncoder.from_json(OLD)
    path = csv(tmp_path, "age,bmi,member,city\n60,35,true, Rome\n,99,false,Oslo\n")
    encoded = encoder.encode(read_frame(path, encoder.inferred))
    assert encoded.tolist() == [
        [1, 0, 0.5, 0, 1, 0, 1, 0],
        [0, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert TableEncoder.from_json(encoder.to_json()) == encoder


@pytest.mark.parametrize("knots", [[1.0], [2.0, 1.0], ["a", "b"]])
def test_an_encoder_without_order_is_refused(knots: list[Any]) -> None:
    column = {"name": "x", "knots": knots, "buckets": 0}
    fields = {"columns": [column], "client": "c", "label": "y", "class_names": []}
    with pytest.raises(UserError, match="the JSON of a table encoder"):
        TableEncoder.from_json(json.dumps(fields))


@pytest.mark.parametrize("kind", [int, bool, str, float])
def test_classes_are_named_by_text_numbers_or_truth_values(kind: type) -> None:
    labels = [kind(value) for value in (0, 1, 0, 1)] * 3
    rows = {"who": ["a", "b", "c"] * 4, "x": list(range(12)), "y": labels}
    table = load_table(rows, "who", "y", holdout="rows", classes=[kind(0), kind(1)])
    assert len(table.train) + len(table.test) == 12
    assert table.classes == 2
    with pytest.raises(UserError, match="The class None is neither text, a number nor true"):
        load_table(rows, "who", "y", classes=[None, 1])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("who;x;x;y\na;1;2;0\nb;1;2;1\n")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["a", 1, 2, 0], ["b", 1, 2, 1]], columns=["who", "x", "x", "y"])
    for source in (path, frame):
        with pytest.raises(UserError, match=r"several columns named .x.\. Rename or remove"):
            load_table(source, "who", "y")


def test_a_row_with_more_fields_than_columns_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text('who,x,y\na,"1\n2",0\nb,1,1\nc,1,0,7\nd,1,0\n')
    with pytest.raises(UserError, match=r"line 5 has 4 fields, but there are 3 columns\. Corr"):
        load_table(path, "who", "y")
