"""The total cost of runs: by the ledger that records them, wherever it is now."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedveil import algorithms
from fedveil.comparing.costs import Cost, total_cost
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import open_ledger
from fedveil.training.start import train

RECIPE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)


def trained(data: Federated, place: Path, *seeds: int) -> list[Path]:
    for seed in seeds:
        train(RECIPE, data, rounds=2, delta=1e-5, seed=seed, save=place / str(seed))
    return [place / str(seed) for seed in seeds]


def copied(ledger: Path, to: Path) -> Path:
    to.mkdir()
    for part in ledger.parent.glob(f"{ledger.name}*"):
        shutil.copy(part, to)
    return to / ledger.name


def known(cost: Cost) -> Mapping[str, Any]:
    assert isinstance(cost, Mapping)
    return cost


def test_a_moved_ledger_is_found_where_it_is_named(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = trained(blobs, tmp_path, 0, 1)
    before = known(total_cost(paths, "models"))
    assert (before["runs"], before["unrecorded"]) == (2, 0)
    moved = copied(ledger, tmp_path / "moved")
    ledger.unlink()
    ledger.with_name(f"{ledger.name}.head").unlink()
    assert total_cost(paths, "models") is None
    assert total_cost(paths, "models", moved) == before
    monkeypatch.setenv("FEDVEIL_LEDGER", str(moved))
    assert total_cost(paths, "models") == before


def test_a_stale_copy_gives_no_number(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number would be too small: it lacks what was drawn since."""
    paths = trained(blobs, tmp_path, 0)
    stale = copied(ledger, tmp_path / "stale")
    paths += trained(blobs, tmp_path, 1)
    assert known(total_cost(paths, "models"))["runs"] == 2
    assert "an old copy has replaced the ledger" in str(total_cost(paths, "models", stale))
    other = tmp_path / "other.sqlite"
    open_ledger(other).close()
    monkeypatch.setenv("FEDVEIL_LEDGER", str(other))
    assert "is another one. Name the right one with --ledger" in str(total_cost(paths, "models"))
