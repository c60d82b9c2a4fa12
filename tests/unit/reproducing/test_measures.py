"""Measures of a run are read by its one reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.reproducing.measures import measured
from fedveil.runs.saved import MODEL
from fedveil.training.start import train


def test_a_damaged_model_is_one_sentence_that_names_it(blobs: Federated, tmp_path: Path) -> None:
    recipe = algorithms.fedavg(learning_rate=0.1, steps=1)
    result = train(recipe, blobs, rounds=1, save=tmp_path / "a")
    firsts = [float(leaf.detach().flatten()[0]) for leaf in result.model.parameters()]
    assert measured("position", tmp_path / "a", blobs) in firsts
    assert measured("bits", tmp_path / "a", blobs) == 32.0
    (tmp_path / "a" / MODEL).write_bytes(b"cut")
    for name in ("position", "bits"):
        with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
            measured(name, tmp_path / "a", blobs)
