"""Frames and files of pandas, pyarrow and h5py, and of Hugging Face's datasets if installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedveil as fv
from tests.unit.data.test_building import gaps


def dated() -> dict[str, list[Any]]:
    days = [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(60)]
    return {**gaps(), "day": days}


def loaded(source: Any) -> fv.Dataset:
    return fv.load_table(source, "who", "ill", classes=["0", "1"], stats_epsilon=5.0)


def test_pandas_frames_of_every_kind(tmp_path: Path) -> None:
    import pandas

    pl.DataFrame(dated()).write_csv(tmp_path / "t.csv")
    plain = pandas.read_csv(tmp_path / "t.csv")
    frames = [
        plain,
        plain.set_index(np.arange(60)[::-1]),
        plain.astype({"plan": "category"}),
        pandas.read_csv(tmp_path / "t.csv", parse_dates=["day"]),
        pandas.read_csv(tmp_path / "t.csv", dtype_backend="numpy_nullable"),
    ]
    expected = loaded(tmp_path / "t.csv")
    for frame in frames:
        found = loaded(frame)
        assert torch.equal(found.train.inputs[:], expected.train.inputs[:])
        assert found.source == expected.source


def test_arrow_tables_of_every_kind(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    table = arrow.Table.from_pydict(dated())
    parquet.write_table(table, tmp_path / "t.parquet")
    expected = loaded(dated())
    for source in (table, table.to_reader(), tmp_path / "t.parquet"):
        assert torch.equal(loaded(source).train.inputs[:], expected.train.inputs[:])


def test_files_of_tensorflow_federated(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "t.h5", "w") as file:
        for client in ("f1", "f2"):
            group = file.create_group(f"examples/{client}")
            group["pixels"] = np.ones((5, 4, 4), np.float32)
            group["label"] = np.arange(5)
    data = fv.load_path(tmp_path / "t.h5").split(fv.ByKey())
    assert (data.clients, len(data.labels), data.classes) == (2, 10, 5)


def test_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({**gaps(), "x": [[0.0, 1.0]] * 60})
    for form in (whole, whole.with_format("torch"), whole.with_format("numpy")):
        assert fv.Federated.from_hf(form, "who", "ill", "x", classes=2).clients == 12
