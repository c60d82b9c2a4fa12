"""Data as people have them: arrays, torch data sets, frames, LEAF, TFF, folders of users."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

import fedveil as fv
from fedveil.data.encoding import TableEncoder
from fedveil.data.frames import as_frame
from fedveil.data.sources.benchmarks import from_groups, load_leaf
from fedveil.data.table import load_table
from fedveil.errors import UserError
from fedveil.training.settings import DataSettings
from fedveil.training.sources import load_data


def rows(count: int = 60) -> dict[str, list[Any]]:
    return {
        "who": [f"p{i % 12}" for i in range(count)],
        "age": [20 + i % 50 for i in range(count)],
        "ill": [i % 2 for i in range(count)],
    }


def gaps() -> dict[str, list[Any]]:
    """The rows with a column of text that is empty in places."""
    return {**rows(), "plan": [(None, "free", "pro")[i % 3] for i in range(60)]}


class Pandas:
    """As pandas' frames look from outside: columns, dtypes, columns with tolist and isna."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._plain = columns
        self.columns = list(columns)
        self.dtypes = dict.fromkeys(columns, "object")

    def __getitem__(self, name: str) -> Column:
        return Column(self._plain[name])


class Column:
    """A column of such a frame, whose missing value cannot be compared."""

    def __init__(self, cells: list[Any]) -> None:
        self._cells = cells

    def tolist(self) -> list[Any]:
        return [Missing() if cell is None else cell for cell in self._cells]

    def isna(self) -> np.ndarray:
        return np.array([cell is None for cell in self._cells])


class Missing:
    """As pandas.NA."""

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    def __repr__(self) -> str:
        return "<NA>"


class Arrow:
    """As Arrow tables look from outside."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def test_all_kinds_of_tables_are_the_same_data(tmp_path: Path) -> None:
    frame = pl.DataFrame(gaps())
    frame.write_csv(tmp_path / "t.csv")
    frame.write_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    sources = [frame, frame.lazy(), gaps(), Pandas(gaps()), Arrow(frame)]
    sources += [tmp_path / name for name in ("t.csv", "t.parquet", "t.csv.gz")]
    loaded = [load_table(s, "who", "ill", classes=["0", "1"]) for s in sources]
    for one in loaded[1:]:
        assert one.source == loaded[0].source
        assert torch.equal(one.train.inputs[:], loaded[0].train.inputs[:])
    packed = DataSettings(path=tmp_path / "t.csv.gz", client="who", label="ill")
    assert load_data(packed).source == loaded[0].source


def test_a_packed_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.data.frames.MAX_UNPACKED", 1000)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"who,x,y\n" + b"a,1,0\n" * 10_000))
    with pytest.raises(fv.UserError, match="unpacks to more than 1,000 bytes"):
        load_table(tmp_path / "t.csv.gz", "who", "y")


def test_clients_are_held_out_whole_and_a_test_table_is_used(tmp_path: Path) -> None:
    data = load_table(rows(600), "who", "ill", classes=["0", "1"], test_fraction=0.4)
    assert data.keys is not None
    assert 0 < len(data.test) < 600
    assert len(data.train) % 50 == 0  # twelve clients with fifty rows each
    other = {**rows(30), "who": [f"q{i}" for i in range(30)]}
    given = load_table(rows(), "who", "ill", classes=["0", "1"], test=other)
    assert (len(given.train), len(given.test)) == (60, 30)
    assert not given.split(fv.ByKey()).tested_on_clients
    shared = load_table(rows(), "who", "ill", classes=["0", "1"], test=rows(30))
    assert shared.split(fv.ByKey()).tested_on_clients


def test_single_rows_are_told() -> None:
    alone = {**rows(), "who": [f"p{i}" for i in range(60)]}
    data = load_table(alone, "who", "ill", classes=["0", "1"])
    assert any("ε protects rows, not people" in note for note in data.notes)


def test_columns_are_named_dropped_and_set_aside() -> None:
    wide = {**rows(), "visit_id": list(range(60)), "note": ["x"] * 60}

    def inputs(**given: Any) -> list[str]:
        data = load_table(wide, "who", "ill", classes=["0", "1"], **given)
        assert data.encoder is not None
        return [column.name for column in TableEncoder.from_json(data.encoder).columns]

    assert inputs() == ["age", "note"]
    assert inputs(drop="note") == ["age"]
    assert inputs(columns=["age", "visit_id"]) == ["age", "visit_id"]
    assert inputs(ranges={"visit_id": (0, 60)}) == ["age", "visit_id", "note"]
    with pytest.raises(fv.UserError, match="Did you mean 'note'"):
        inputs(drop="nte")


def test_arrays_and_torch_data_sets() -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2
    data = fv.Federated.from_arrays(x, y, clients=np.arange(8) // 2, test=(x, y), classes=2)
    assert (data.clients, data.unit, data.origin.exclusions) == (4, "client", ())
    assert data.inputs.dtype == torch.float32
    assert fv.Federated.from_arrays(x, y, np.arange(8)).origin.exclusions
    whole = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    assert fv.Federated.from_torch([whole, whole, whole], classes=2).clients == 3
    with pytest.raises(fv.UserError, match="not a Dataset of"):
        fv.Federated.from_torch([[1, 2]])


def test_frames_and_hugging_face() -> None:
    part = {"age": [30, 40, 50], "ill": [0, 1, 0]}
    given = {"classes": ["0", "1"], "test_fraction": 0.0}
    assert fv.Federated.from_frames({"a": part, "b": part}, "ill", **given).clients == 2
    assert fv.Federated.from_hf(rows(), "who", "ill", **given).clients == 12
    with pytest.raises(fv.UserError, match="no column 'x'"):
        fv.Federated.from_hf(rows(), "who", "ill", "x")
    with pytest.raises(fv.UserError, match="A object is not a table"):
        as_frame(object())


def test_a_parquet_file_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.data.building.CHUNK", 7)
    frame = pl.DataFrame(rows()).sort("who")
    frame.write_parquet(tmp_path / "t.parquet")
    path = tmp_path / "t.parquet"
    data = fv.Federated.from_parquet(path, "who", "ill", ["age"], tmp_path / "out", classes=2)
    assert (data.clients, len(data.labels)) == (12, 60)
    frame.sample(fraction=1, shuffle=True, seed=0).write_parquet(path)
    with pytest.raises(fv.UserError, match="are not together"):
        fv.Federated.from_parquet(path, "who", "ill", ["age"], tmp_path / "other", classes=2)


def leaf(users: list[str]) -> dict[str, Any]:
    data = {user: {"x": [[0.0, 1.0]] * 3, "y": [0, 1, 1]} for user in users}
    return {"users": users, "num_samples": [3] * len(users), "user_data": data}


def test_leaf_and_tff(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps(leaf(["a", "b"])))
    data = fv.load_path(tmp_path).split(fv.ByKey())
    assert (data.clients, len(data.labels), len(data.test)) == (2, 6, 6)
    assert data.origin.exclusions == ("the number of classes",)
    (tmp_path / "broken.json").write_text('{"users": ["a"]}')
    with pytest.raises(fv.UserError, match="not in LEAF's layout"):
        load_leaf(tmp_path / "broken.json")
    with pytest.raises(fv.UserError, match="One of pixels"):
        from_groups("emnist", {"examples": {"a": {"sound": np.zeros(3)}}})


def test_images_of_users(tmp_path: Path) -> None:
    for user in ("ann", "bob"):
        for kind in ("cat", "dog"):
            folder = tmp_path / "pictures" / user / kind
            folder.mkdir(parents=True)
            for number in range(12):
                Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    data = fv.load_path(tmp_path / "pictures", classes=("cat", "dog"))
    split = data.split(fv.ByKey())
    assert split.clients == 2
    assert split.names is not None
    assert split.names.tolist() == ["ann", "bob"]
    assert split.origin == fv.Origin()
    assert load_data(DataSettings(path=tmp_path / "pictures")).clients == 2


def test_a_table_of_images(tmp_path: Path) -> None:
    """Paths beside a label file, or bytes in a Parquet file: the same data."""
    listed: dict[str, list[Any]] = {"file": [], "who": [], "kind": [], "pixels": []}
    for number in range(24):
        who, kind = f"u{number % 8}", ("cat", "dog")[number // 8 % 2]
        file = tmp_path / who / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 6), (number, 0, 0)).save(file)
        row = (f"{who}/{number}.png", who, kind, file.read_bytes())
        for name, value in zip(listed, row, strict=True):
            listed[name].append(value)
    pl.DataFrame(listed).drop("pixels").write_csv(tmp_path / "labels.csv")
    pl.DataFrame(listed).write_parquet(tmp_path / "images.parquet")
    given: dict[str, Any] = {"client": "who", "label": "kind", "classes": ("cat", "dog")}
    one = load_data(DataSettings(path=tmp_path / "labels.csv", image="file", **given))
    two = load_data(DataSettings(path=tmp_path / "images.parquet", image="pixels", **given))
    assert torch.equal(one.inputs[:], two.inputs[:])
    assert one.inputs.shape[1:] == (3, 32, 32)
    assert 2 <= one.clients <= 8
    pl.DataFrame({"file": ["../x.png"] * 2, "who": ["a", "b"], "kind": ["cat", "dog"]}).write_csv(
        tmp_path / "labels.csv"
    )
    with pytest.raises(fv.UserError, match="outside the folder"):
        load_data(DataSettings(path=tmp_path / "labels.csv", image="file", **given))
    both = DataSettings(path=tmp_path / "labels.csv", image="file", drop=("who",), **given)
    with pytest.raises(fv.UserError, match="drop does not apply to a table of images"):
        load_data(both)


def test_several_inputs_are_not_arrays() -> None:
    """The message names what takes them, and not torch's types."""
    ids = np.zeros((4, 3), dtype=np.int64)
    with pytest.raises(UserError, match=r"Pack several inputs with Examples\.of\(inputs, labels\)"):
        fv.Federated.from_arrays({"ids": ids}, [0, 1, 0, 1], [0, 0, 1, 1])
