"""What a private selection draws, enters in the ledger and hands out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedveil import algorithms
from fedveil.accounting.events import NonPrivate
from fedveil.comparing import selecting
from fedveil.comparing.members import planned
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.ledger import VIEWS
from fedveil.privacy.selection import law_of
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import train

RECIPE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
LAW = law_of("geometric", 3.0)


FLAGS = {"epsilon": 4.0, "rounds": 3, "data": {"dataset": "digits", "clients": 20}}
COMPARISON = planned([], ["dp_fedavg", "dp_norm_fedavg"], FLAGS, [], [0])


def drawn_into(hidden: Path, *keys: str, tested: int = 0) -> dict[str, Any]:
    """What is drawn for two members with these identities, about four hundred runs."""
    test = SimpleNamespace(inputs=torch.full((3, 2), tested), labels=torch.zeros(3))
    members = [
        SimpleNamespace(
            spec=SimpleNamespace(secret=False, identity=key), data=SimpleNamespace(test=test)
        )
        for key in keys or ("one", "two")
    ]
    law, trainings = law_of("poisson", 400.0), cast(list[Training], members)
    return selecting._draws(COMPARISON, law, hidden, trainings)


def test_members_are_drawn_evenly_and_every_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """The bound takes members to be equally likely and runs to have independent noise."""
    drawn = drawn_into(tmp_path / "a")
    members, seeds = (Counter(column) for column in zip(*drawn["picks"], strict=True))
    runs = len(drawn["picks"])
    assert 300 < runs < 500
    assert abs(members[0] - runs / 2) < 5 * math.sqrt(runs) / 2
    assert members.keys() == {0, 1}
    assert max(seeds.values()) == 1
    assert drawn_into(tmp_path / "a", "another", "two") == drawn  # once, and remembered


@pytest.mark.parametrize("other", [("another", "two"), ("one", "another")])
def test_whatever_decides_the_best_run_names_the_stream(
    tmp_path: Path, other: tuple[str, str]
) -> None:
    """Else a selection could be repeated for free, with the same runs and another winner."""
    drawn = drawn_into(tmp_path / "a")
    assert drawn_into(tmp_path / "b") == drawn
    changed = (drawn_into(tmp_path / "c", *other), drawn_into(tmp_path / "d", tested=1))
    for known in changed:
        assert known["stream"] != drawn["stream"]
        assert known["picks"] != drawn["picks"]


def test_another_winner_of_the_same_draws_is_not_published(
    tmp_path: Path, workers_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it win: the ledger charges one release of this stream."""
    comparison = dataclasses.replace(COMPARISON, selection={"name": "geometric", "mean": 3.0})
    published = []
    for name, digest in (("a", "these bytes"), ("b", "these bytes"), ("c", "other bytes")):
        monkeypatch.setattr(selecting, "_digest", lambda run, digest=digest: digest)
        (tmp_path / name).mkdir()
        published.append(tmp_path / name)
        if digest == "these bytes":
            selecting.select(comparison, tmp_path / name, 1, None)
        else:
            with pytest.raises(UserError, match="was released before with other bytes"):
                selecting.select(comparison, tmp_path / name, 1, None)
    kept = [[run.name for run in place.glob("dp_*")] for place in published]
    assert len(kept[0]) == 1
    assert kept == [kept[0], kept[0], []]


def test_whoever_sees_messages_has_no_guarantee_in_the_ledger(blobs: Federated) -> None:
    """They see all runs, of which there is no largest number."""
    training = prepare(RECIPE, blobs, rounds=2, engine="loop")
    price = selecting.selection_cost([training], LAW)
    account = training.spec.account
    plans = selecting._facts(training, account, price, "selection", 1).plans
    assert plans["models"].ways[0].event == price.release
    for view in set(VIEWS) - {"models"}:
        (way,) = plans[view].ways
        assert isinstance(way.event, NonPrivate)


@pytest.mark.parametrize("diagnostics", [True, False])
def test_of_the_best_run_nothing_is_handed_out_that_tells_of_single_clients(
    blobs: Federated, tmp_path: Path, diagnostics: bool
) -> None:
    hidden, kept = tmp_path / "draw-0", tmp_path / "kept"
    train(RECIPE, blobs, rounds=2, engine="loop", save=hidden, diagnostics=diagnostics)
    assert (hidden / "clients.parquet").exists() == diagnostics
    member = prepare(RECIPE, blobs, rounds=2, engine="loop")
    selecting._release(hidden, kept, selecting.selection_cost([member], LAW))
    assert {file.name for file in kept.iterdir()} == {
        "recipe.toml", "model.safetensors", "metrics.parquet", "summary.json", "privacy.txt",
    }  # fmt: skip
