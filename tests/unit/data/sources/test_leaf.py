"""LEAF's JSON: roles of plays are clients, windows of characters are examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedveil.data.catalog import load
from fedveil.data.sources.benchmarks import load_leaf
from fedveil.data.sources.shakespeare import CLASSES, VOCABULARY
from fedveil.errors import UserError
from fedveil.models.catalog import build

SAID = {"HAMLET_GHOST": "Remember me, Hamlet", "MACBETH_GHOST": "Never shake thy gory locks"}


def write(folder: Path, half: str, said: dict[str, str], length: int = 5) -> None:
    """LEAF's own layout: every window of `length` characters with the one that follows."""
    data = {}
    for role, text in said.items():
        starts = range(len(text) - length)
        windows = [text[i : i + length] for i in starts]
        data[role] = {"x": windows, "y": [text[i + length] for i in starts]}
    (folder / half).mkdir(parents=True)
    counts = [len(each["y"]) for each in data.values()]
    content = {"users": list(data), "num_samples": counts, "user_data": data}
    (folder / half / "all_data.json").write_text(json.dumps(content))


def test_roles_are_clients_and_every_position_has_a_label(tmp_path: Path) -> None:
    write(tmp_path, "train", SAID)
    write(tmp_path, "test", {"HAMLET_GHOST": "Adieu, adieu"})
    data = load_leaf(tmp_path)
    assert data.keys is not None
    sizes = [len(text) - 5 for text in SAID.values()]
    assert [int((data.keys == role).sum()) for role in SAID] == sizes
    assert (len(data.test), data.classes) == (len("Adieu, adieu") - 5, CLASSES)
    assert torch.equal(data.train.inputs[:, 1:], data.train.labels[:, :-1])
    said = "".join(VOCABULARY[i] for i in data.train.labels[0])
    assert said == SAID["HAMLET_GHOST"][1:6]
    assert not data.origin.exclusions  # the vocabulary is public
    lstm = build("lstm", data, torch.Generator().manual_seed(0))
    assert lstm(data.train.inputs[:2]).shape == (2, 5, CLASSES)


def test_the_data_set_is_found_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"LEAF's Shakespeare was not found.* train \+ test"):
        load("leaf-shakespeare")
    for half in ("train", "test"):
        write(tmp_path / "leaf-shakespeare", half, SAID)
    assert load("leaf-shakespeare").name == "leaf-shakespeare"


def test_windows_of_different_lengths_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "train", SAID)
    file = tmp_path / "train" / "all_data.json"
    file.write_text(file.read_text().replace('"Remem"', '"Reme"'))
    with pytest.raises(UserError, match="windows must have one length"):
        load_leaf(tmp_path)
