from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data.partition import ByKey
from fedveil.data.sources.shakespeare import (
    CLASSES,
    OTHER,
    VOCABULARY,
    encode,
    load_shakespeare,
    roles,
)
from fedveil.errors import UserError

from ..paths import SHARED, needs_plays

PLAY = f"ROMEO:\n{'abcdefghij' * 12}k\n\nJULIET:\n{'0123456789' * 3}!\n\nNURSE:\nAy.\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "play.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_windows_labels_and_keys(tmp_path: Path) -> None:
    dataset = load_shakespeare(write(tmp_path, PLAY), length=10)
    assert dataset.keys is not None
    assert list(np.unique(dataset.keys)) == ["JULIET", "ROMEO"]
    assert (dataset.keys == "ROMEO").sum() == 11  # twelve windows, the tenth is for testing
    assert len(dataset.test) == 1
    assert dataset.train.inputs.dtype == torch.int64
    assert torch.equal(dataset.train.inputs[:, 1:], dataset.train.labels[:, :-1])
    tenth = dataset.test.labels[0].tolist()
    assert "".join(VOCABULARY[i] for i in tenth) == "bcdefghija"
    assert dataset.classes == CLASSES == 97
    assert dataset.notes == ("1 roles with fewer than 2 windows of 10 characters were left out.",)


def test_unknown_characters_are_other() -> None:
    assert encode("aé\t€").tolist() == [VOCABULARY.index("a"), OTHER, OTHER, OTHER]


def test_a_colon_inside_a_speech_is_no_speaker() -> None:
    assert roles("A:\nHe said: no\nB:\nx") == {"A": "He said: no\nB:\nx"}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no role with 2 windows"):
        load_shakespeare(write(tmp_path, "just some text"))
    with pytest.raises(UserError, match="at least one character"):
        load_shakespeare(write(tmp_path, PLAY), length=0)
    with pytest.raises(UserError, match="not a readable UTF-8"):
        load_shakespeare(tmp_path / "absent.txt")
    (tmp_path / "play.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a readable UTF-8"):
        load_shakespeare(tmp_path / "play.txt")


@needs_plays
def test_the_real_plays() -> None:
    dataset = load_shakespeare(SHARED / "shakespeare.txt")
    federated = dataset.split(ByKey())
    assert federated.clients == 232
    assert federated.labels.shape == (11498, 80)
    assert dataset.keys is not None
    assert "GLOUCESTER" in dataset.keys
    assert OTHER not in federated.inputs.unique().tolist()
    assert "67 roles" in dataset.notes[0]
