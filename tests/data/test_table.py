from __future__ import annotations

import datetime
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.encoding import CategoryColumn, NumericColumn, TableEncoder
from fedveil.data.partition import ByKey
from fedveil.data.table import load_table, read_frame, read_table
from fedveil.errors import UserError


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


def test_a_csv_becomes_a_data_set(tmp_path: Path) -> None:
    table = read_table(csv(tmp_path, people()), "person", "outcome")
    dataset = table.dataset
    assert dataset.name == "people"
    assert (len(dataset.train), len(dataset.test)) == (48, 12)
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
    assert dataset.train.inputs[:, 1:5].sum(dim=1).tolist() == [1.0] * 48
    assert set(dataset.train.inputs[:, 5].tolist()) == {0.0, 1.0}
    assert dataset.split(ByKey()).clients == 6


def test_parquet_and_csv_agree(tmp_path: Path) -> None:
    people().write_parquet(tmp_path / "people.parquet")
    one = load_table(tmp_path / "people.parquet", "person", "outcome")
    two = load_table(csv(tmp_path, people()), "person", "outcome")
    assert torch.equal(one.train.inputs, two.train.inputs)
    assert torch.equal(one.test.labels, two.test.labels)
    assert one.keys is not None
    assert np.array_equal(one.keys, two.keys)


def test_keys_and_labels_stay_with_their_rows(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": np.arange(40) % 5, "x": np.arange(40.0), "y": np.arange(40) % 2})
    table = read_table(csv(tmp_path, frame), "who", "y", ranges={"x": (0, 39)})
    rows = (table.dataset.train.inputs[:, 0] * 39).round().long()
    assert table.dataset.keys is not None
    assert table.dataset.keys.tolist() == (rows % 5).tolist()
    assert table.dataset.train.labels.tolist() == (rows % 2).tolist()


def test_the_seed_decides_the_held_out_rows(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    first, again, other = (load_table(path, "person", "outcome", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert not torch.equal(first.test.inputs, other.test.inputs)


@given(fraction=st.floats(0, 0.99), seed=st.integers(0, 50))
def test_every_client_keeps_a_training_row(
    tmp_path_factory: pytest.TempPathFactory, fraction: float, seed: int
) -> None:
    frame = pl.DataFrame({"who": [0, 1, 1, 2, 2, 2, 2], "x": range(7), "y": [0, 1, 0, 1, 0, 1, 0]})
    path = csv(tmp_path_factory.mktemp("t"), frame)
    dataset = load_table(path, "who", "y", test_fraction=fraction, seed=seed)
    assert dataset.keys is not None
    assert set(dataset.keys.tolist()) == {0, 1, 2}
    assert len(dataset.train) + len(dataset.test) == 7
    assert math.floor(2 * fraction) + math.floor(4 * fraction) <= len(dataset.test) <= 4


def test_notes_tell_imbalance_dates_and_leaks(tmp_path: Path) -> None:
    notes = "\n".join(load_table(csv(tmp_path, people()), "person", "outcome").notes)
    assert "The largest class, 'no', has 75% of the rows." in notes
    assert "Ignored, for they hold dates or nested or no values: joined." in notes
    assert "Means and deviations of age come from the data and are not covered" in notes
    assert "The category lists of city come from the data" in notes


def test_public_ranges_take_nothing_from_the_data(tmp_path: Path) -> None:
    ranges = {"age": (0.0, 100.0)}
    table = read_table(csv(tmp_path, people()), "person", "outcome", ranges=ranges)
    assert table.encoder.columns[0] == NumericColumn("age", 0, 100, 50, True, clip=True)
    assert "Means and deviations" not in "\n".join(table.dataset.notes)
    frame = pl.DataFrame({"age": [-50, 30, 500, None], "city": ["Rome"] * 4, "member": [True] * 4})
    encoded = table.encoder.encode(frame)
    assert encoded[:, 0].tolist() == pytest.approx([0, 0.3, 1, 0.5])
    assert encoded[:, 1].tolist() == [0, 0, 0, 1]


def test_missing_numbers_get_the_mean_and_an_indicator(tmp_path: Path) -> None:
    text = rows_of("a,1,0\nb,3,1\na,NA,0\nb,?,1\na,inf,0\n")
    table = read_table(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert table.encoder.features == ("x", "x is missing")
    assert table.dataset.train.inputs.tolist() == [[-1, 0], [1, 0], [0, 1], [0, 1], [0, 1]]


def test_missing_categories_are_a_category(tmp_path: Path) -> None:
    text = rows_of("a,red,0\nb,,1\na,blue,0\nb, red ,1\n")
    table = read_table(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert table.encoder.features == ("x = blue", "x = red", "x = other", "x is missing")
    assert table.dataset.train.inputs.argmax(dim=1).tolist() == [1, 3, 0, 1]


def test_a_constant_column_is_no_division_by_zero(tmp_path: Path) -> None:
    dataset = load_table(csv(tmp_path, rows_of("a,7,0\nb,7,1\n")), "who", "y", test_fraction=0)
    assert dataset.train.inputs.tolist() == [[0], [0]]
    assert "No rows are held out for testing." in dataset.notes


def test_unseen_categories_and_new_gaps_at_prediction(tmp_path: Path) -> None:
    table = read_table(csv(tmp_path, people()), "person", "outcome")
    mean = table.encoder.columns[0].center  # type: ignore[union-attr]
    frame = pl.DataFrame({"age": [mean, None], "city": ["Paris", None], "member": [None, True]})
    encoded = table.encoder.encode(frame)
    assert encoded.tolist() == [[0, 0, 0, 0, 1, 0.5], [0, 0, 0, 0, 1, 1]]
    assert table.encoder.encode(frame.clear()).shape == (0, 6)


def test_rare_categories_become_other(tmp_path: Path) -> None:
    names = [f"v{i:03}" for i in range(150)] + [f"v{i:03}" for i in range(50, 150)]
    frame = pl.DataFrame({"who": np.arange(250) % 3, "x": names, "y": np.arange(250) % 2})
    table = read_table(csv(tmp_path, frame), "who", "y", test_fraction=0)
    (column,) = table.encoder.columns
    assert isinstance(column, CategoryColumn)
    assert column.values == tuple(f"v{i:03}" for i in range(50, 150))
    assert float(table.dataset.train.inputs[:, -1].sum()) == 50
    assert "'x' has 150 categories; the 100 most frequent are kept" in table.dataset.notes[0]


def test_the_encoder_survives_json(tmp_path: Path) -> None:
    encoder = read_table(csv(tmp_path, people()), "person", "outcome").encoder
    again = TableEncoder.from_json(encoder.to_json())
    assert again == encoder
    assert torch.equal(again.encode(people()), encoder.encode(people()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": [{"name": "x"}]}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a table encoder's JSON"):
        TableEncoder.from_json(text)


def test_a_missing_input_column_at_prediction_is_named(tmp_path: Path) -> None:
    encoder = read_table(csv(tmp_path, people()), "person", "outcome").encoder
    with pytest.raises(UserError, match="no column 'age'; did you mean 'aged'"):
        encoder.encode(people().rename({"age": "aged"}))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["7", "3", "7", "3"], ("3", "7")),
        (["1.0", "0.0", "1.0", "0.0"], ("0", "1")),
        (["true", "false", "true", "false"], ("False", "True")),
        (["b", "a", "b", "a"], ("a", "b")),
    ],
)
def test_labels_of_many_kinds(tmp_path: Path, values: list[str], names: tuple[str, ...]) -> None:
    text = rows_of("".join(f"{'ab'[i % 2]},{i},{v}\n" for i, v in enumerate(values)))
    dataset = load_table(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert dataset.class_names == names
    assert dataset.train.labels.tolist() == [1, 0, 1, 0]


def test_rows_without_client_or_label_are_left_out(tmp_path: Path) -> None:
    text = rows_of("a,1,0\n,2,1\nb,3,\nb,4,1\n")
    dataset = load_table(csv(tmp_path, text), "who", "y", test_fraction=0)
    assert len(dataset.train) == 2
    assert dataset.notes[0] == "2 rows without a value in 'who' or 'y' were left out."


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_and_blanks(tmp_path: Path, separator: str) -> None:
    text = rows_of("a, 1,0\nb, 2.5,1\n").replace(",", separator)
    frame = read_frame(csv(tmp_path, text))
    assert frame["x"].to_list() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a readable CSV"),
        ("who,x,y\n", "has no rows"),
        ("whom,x,y\na,1,0\n", "no client column 'who'; did you mean 'whom'"),
        ("who,x,why\na,1,0\n", "no label column 'y'"),
        (rows_of("a,1,0\na,2,1\n"), "'a' in every row; federated training needs"),
        (rows_of("a,1,0\nb,2,0\n"), "nothing to learn"),
        (rows_of("a,1,0.5\nb,2,1\n"), "holds fractions"),
        (rows_of("a,1,\nb,2,\n"), "No row of 'people.csv' has both"),
        (rows_of("".join(f"{i},1,{i}\n" for i in range(101))), "101 distinct values"),
        ("who,y\na,1\nb,0\n", "No column besides 'who' and 'y'"),
        ("who,x,y\na,1,0\nb,2,1,5,6\n", "not a readable CSV"),
    ],
)
def test_unusable_tables(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_table(csv(tmp_path, text), "who", "y")
    assert "\n" not in str(caught.value)


def test_unusable_arguments(tmp_path: Path) -> None:
    path = csv(tmp_path, people())
    with pytest.raises(UserError, match="There is no file"):
        load_table(tmp_path / "absent.csv", "who", "y")
    with pytest.raises(UserError, match="test_fraction"):
        load_table(path, "person", "outcome", test_fraction=1.0)
    with pytest.raises(UserError, match="cannot be the client and the label"):
        load_table(path, "person", "person")
    with pytest.raises(UserError, match="no column for a range 'agee'; did you mean 'age'"):
        load_table(path, "person", "outcome", ranges={"agee": (0, 1)})
    with pytest.raises(UserError, match="does not hold numbers"):
        load_table(path, "person", "outcome", ranges={"city": (0, 1)})
    with pytest.raises(UserError, match="must go upwards"):
        load_table(path, "person", "outcome", ranges={"age": (1, 1)})
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="not a readable CSV or Parquet"):
        load_table(tmp_path / "bad.parquet", "who", "y")


def test_no_client_changes_which_rows_of_another_are_held_out(tmp_path: Path) -> None:
    """Were all rows shuffled together, one client less would change what the others train on."""
    rng = np.random.default_rng(0)
    rows = [f"c{i % 40},{rng.random():.6f},{i % 2}" for i in range(200)]
    kept = [row for row in rows if not row.startswith("c7,")]

    def training(lines: list[str]) -> dict[object, set[float]]:
        path = tmp_path / "t.csv"
        path.write_text("\n".join(["who,x,y", *lines]) + "\n", encoding="utf-8")
        data = load_table(path, "who", "y", ranges={"x": (0.0, 1.0)})
        found: dict[object, set[float]] = {}
        for key, value in zip(data.keys, data.train.inputs[:, 0].tolist(), strict=True):
            found.setdefault(str(key), set()).add(value)
        return found

    whole, without = training(rows), training(kept)
    assert {key: rows for key, rows in whole.items() if key != "c7"} == without
    assert "c7" in whole
    assert sum(len(v) for v in whole.values()) < 200  # some rows are held out
