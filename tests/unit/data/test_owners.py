"""Test examples know their client where the data say it, and nobody guesses where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data.building import from_arrays, from_hf
from fedveil.data.federated import Examples, Federated
from fedveil.data.partition import ByKey, Iid
from fedveil.data.save import save_federated
from fedveil.data.saved import open_federated, verify_federated
from fedveil.data.sources.benchmarks import _dataset
from fedveil.data.table import load_table
from fedveil.errors import UserError

COLUMNS = {
    "who": [f"p{k % 12}" for k in range(120)],
    "age": [str(20 + k % 50) for k in range(120)],
    "ill": [str(k % 2) for k in range(120)],
}


@pytest.mark.parametrize("holdout", ["clients", "rows"])
def test_held_out_rows_of_a_table_keep_their_client(holdout: str) -> None:
    table = load_table(COLUMNS, "who", "ill", holdout=holdout, classes=["0", "1"])  # type: ignore[arg-type]
    assert table.test.owners is not None
    assert len(table.test.owners) == len(table.test) > 0
    trained = set(table.keys.tolist())  # type: ignore[union-attr]
    assert bool(trained & set(table.test.owners.tolist())) == (holdout == "rows")
    data = table.split(ByKey())
    assert len(np.unique(data.test_units())) == len(set(table.test.owners.tolist()))


def test_a_test_table_names_its_clients_or_none() -> None:
    tested = {"who": ["a", "a", "b"], "age": ["1", "2", "3"], "ill": ["0", "1", "1"]}
    data = load_table(COLUMNS, "who", "ill", classes=["0", "1"], test=tested).split(ByKey())
    assert data.test_units().tolist() == [0, 0, 1]
    for unnamed in (
        {name: tested[name] for name in ("age", "ill")},
        {**tested, "who": ["a", None, "b"]},
    ):
        data = load_table(COLUMNS, "who", "ill", classes=["0", "1"], test=unnamed).split(ByKey())
        with pytest.raises(UserError, match="does not say which client each test example"):
            data.test_units()


def arrays(test: tuple[object, ...]) -> Federated:
    x = np.zeros((6, 2), np.float32)
    return from_arrays(x, np.array([0, 1] * 3), list("aabbcc"), test, classes=2)


def test_arrays_name_the_clients_of_test_examples() -> None:
    x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 1])
    assert arrays((x, y, [7, "7", "b"])).test_units().tolist() == [0, 0, 1]
    assert arrays((x, y, torch.tensor([4, 2, 4]))).test_units().tolist() == [1, 0, 1]
    with pytest.raises(UserError, match="does not say which client"):
        arrays((x, y)).test_units()
    with pytest.raises(UserError, match="None or NaN"):
        arrays((x, y, ["a", None, "b"])).test_units()
    with pytest.raises(UserError, match="3 labels but 2 clients"):
        arrays((x, y, ["a", "b"]))
    with pytest.raises(UserError, match="inputs, labels and clients"):
        arrays((x,))
    rows = {"who": ["a", "a", "b"], "x": [[0.0, 1.0]] * 3, "y": [0, 1, 1]}
    assert from_hf(rows, "who", "y", "x", test=rows, classes=2).test_units().tolist() == [0, 0, 1]


def test_benchmarks_keep_the_users_of_their_test_files() -> None:
    users = {name: (torch.zeros(2, 3), torch.tensor([0, 1])) for name in ("u", "v")}
    data = _dataset("leaf", users, users).split(ByKey())
    assert data.test_units().tolist() == [0, 0, 1, 1]


def test_saved_data_keep_the_owners_of_test_examples(tmp_path: Path) -> None:
    x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 1])
    data = arrays((x, y, ["kim", "lee", "kim"]))
    save_federated(data, tmp_path / "saved")
    verify_federated(tmp_path / "saved")
    assert open_federated(tmp_path / "saved").test_units().tolist() == [0, 1, 0]
    assert b"kim" not in b"".join(f.read_bytes() for f in (tmp_path / "saved").iterdir())
    column = tmp_path / "saved" / "test_owners.npy"
    bytes_ = bytearray(column.read_bytes())
    bytes_[-8] ^= 1
    column.write_bytes(bytes_)
    with pytest.raises(UserError, match="test_owners"):
        open_federated(tmp_path / "saved")


def test_made_up_clients_are_dealt_the_test_examples() -> None:
    table = load_table(COLUMNS, "who", "ill", classes=["0", "1"])
    test = Examples(table.test.inputs, table.test.labels)
    data = replace(table, keys=None, test=test).split(Iid(4))
    assert data.test_units().tolist() == [k % 4 for k in range(len(test))]
    assert data.by_example().test_units().tolist() == list(range(len(test)))
