"""Files that docs/using.md calls releasable tell nothing but what ε covers."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedveil as fv
from fedveil import algorithms
from fedveil.data.federated import Examples, Federated

RELEASABLE = ("recipe.toml", "privacy.txt")


def people(largest: int) -> Federated:
    """Twenty clients with two examples each, but for one that has more."""
    rng = np.random.default_rng(0)
    sizes = np.full(20, 2)
    sizes[7] = largest
    inputs = torch.from_numpy(rng.normal(size=(sizes.sum(), 30)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, sizes.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    test = Examples(inputs[:9], labels[:9])
    return Federated("people", inputs, labels, offsets, test, classes=3)


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_one_large_client_changes_no_file_that_may_be_released(noise: str, tmp_path: Path) -> None:
    """Its size decides how fast each engine is, and so which one is taken."""
    recipe = algorithms.dp_fedavg(rate=0.5, steps=3, noise_multiplier=1.0)
    for largest in (2, 3000):
        fv.train(recipe, people(largest), "mlp-8", 2, noise=noise, save=tmp_path / str(largest))
    for name in RELEASABLE:
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "3000" / name).read_bytes(), name
    facts = []
    for largest in (2, 3000):
        with safe_open(tmp_path / str(largest) / "model.safetensors", "pt") as model:
            shapes = {name: model.get_slice(name).get_shape() for name in model.keys()}  # noqa: SIM118
            facts.append((model.metadata(), shapes))
    assert facts[0] == facts[1]


def test_the_engine_that_was_chosen_is_no_setting(tmp_path: Path) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    fv.train(recipe, people(2), rounds=1, save=tmp_path / "auto")
    fv.train(recipe, people(2), rounds=1, engine="dense", save=tmp_path / "asked")
    settings = [
        tomllib.loads((tmp_path / run / "recipe.toml").read_text()) for run in ("auto", "asked")
    ]
    assert [plain["engine"] for plain in settings] == ["auto", "dense"]
    assert all("engine_reason" not in plain for plain in settings)
