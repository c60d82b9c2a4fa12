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
    _testing,
    _windows,
    encode,
    load_shakespeare,
    roles,
)
from fedveil.errors import UserError
from tests.unit.data.paths import SHARED, needs_plays

SPEECH = "".join(f"{number:010}" for number in range(200)) + "."
PLAY = f"ROMEO:\n{SPEECH}\n\nJULIET:\n{'0123456789' * 3}!\n\nNURSE:\nAy.\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "play.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_windows_labels_and_keys(tmp_path: Path) -> None:
    dataset = load_shakespeare(write(tmp_path, PLAY), length=10)
    assert dataset.keys is not None
    assert list(np.unique(dataset.keys)) == ["JULIET", "ROMEO"]
    assert len(dataset.train) + len(dataset.test) == 203
    assert 8 <= len(dataset.test) <= 32
    assert (dataset.keys == "ROMEO").sum() + len(dataset.test) in (200, 201, 202, 203)
    assert dataset.train.inputs.dtype == torch.int64
    assert torch.equal(dataset.train.inputs[:, 1:], dataset.train.labels[:, :-1])
    said = ["".join(VOCABULARY[i] for i in window) for window in dataset.train.inputs.tolist()]
    assert {*said} <= {f"{number:010}" for number in range(200)} | {"0123456789"}
    assert dataset.classes == CLASSES == 97
    assert dataset.notes == ("Left out 1 roles with fewer than 2 windows of 10 characters.",)


def held_out(folder: Path, speech: str, **given: int) -> set[tuple[int, ...]]:
    """The windows that JULIET and ROMEO, who says this, keep for testing."""
    dataset = load_shakespeare(write(folder, f"ROMEO:\n{speech}\n\nJULIET:\n{SPEECH}"), 10, **given)
    assert dataset.keys is not None
    assert len(dataset.keys) == len(dataset.train)
    return {tuple(window) for window in dataset.test.inputs.tolist()}


@pytest.mark.parametrize("gone", [0, 7, 100, 198])
def test_a_window_less_exchanges_no_other(tmp_path: Path, gone: int) -> None:
    """Wherever it stood: it is for testing or not by what it holds, not by its place."""
    less = SPEECH[: 10 * gone] + SPEECH[10 * (gone + 1) :]
    before, after = (
        load_shakespeare(write(tmp_path, f"ROMEO:\n{speech}"), 10) for speech in (SPEECH, less)
    )
    for one, two in ((before.train, after.train), (before.test, after.test)):
        windows = [{tuple(window) for window in part.inputs.tolist()} for part in (one, two)]
        assert len(windows[0] ^ windows[1]) <= 1


def test_the_seed_and_the_role_decide_what_is_held_out(tmp_path: Path) -> None:
    first, again = (held_out(tmp_path, SPEECH) for _ in range(2))
    assert first == again
    assert first != held_out(tmp_path, SPEECH, seed=1)
    assert held_out(tmp_path, "too short") < first


def test_unknown_characters_are_other() -> None:
    assert encode("aé\t€").tolist() == [VOCABULARY.index("a"), OTHER, OTHER, OTHER]


def test_a_colon_inside_a_speech_is_no_speaker() -> None:
    assert roles("A:\nHe said: no\nB:\nx") == {"A": "He said: no\nB:\nx"}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no role with 2 windows"):
        load_shakespeare(write(tmp_path, "just some text"))
    held = next(n for n in range(100) if _testing("A", _windows(f"{n:02}.", 2), 0).all())
    with pytest.raises(UserError, match="no window left to train on"):
        load_shakespeare(write(tmp_path, f"A:\n{held:02}."), length=2, minimum=1)
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
    assert federated.labels.shape == (11400, 80)
    assert dataset.keys is not None
    assert "GLOUCESTER" in dataset.keys
    assert OTHER not in federated.inputs.unique().tolist()
    assert "67 roles" in dataset.notes[0]
