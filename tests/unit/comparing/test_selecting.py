"""What a private selection draws, enters in the ledger and hands out."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedveil import algorithms
from fedveil.accounting.events import NonPrivate
from fedveil.comparing import selecting
from fedveil.comparing.members import planned
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import VIEWS
from fedveil.privacy.selection import law_of
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import train

RECIPE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
LAW = law_of("geometric", 3.0)


def drawn_into(hidden: Path, key: str = "key") -> dict[str, Any]:
    """What is drawn for two members, about four hundred runs."""
    flags = {"epsilon": 4.0, "rounds": 3, "data": {"dataset": "digits", "clients": 20}}
    comparison = planned([], ["dp_fedavg", "dp_norm_fedavg"], flags, [], [0])
    first = cast(Training, SimpleNamespace(spec=SimpleNamespace(secret=False, identity=key)))
    return selecting._draws(comparison, law_of("poisson", 400.0), hidden, first)


def test_members_are_drawn_evenly_and_every_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """The bound takes members to be equally likely and runs to have independent noise."""
    drawn = drawn_into(tmp_path / "a")
    members, seeds = (Counter(column) for column in zip(*drawn["picks"], strict=True))
    runs = len(drawn["picks"])
    assert 300 < runs < 500
    assert abs(members[0] - runs / 2) < 5 * math.sqrt(runs) / 2
    assert members.keys() == {0, 1}
    assert max(seeds.values()) == 1
    assert drawn_into(tmp_path / "a", "another") == drawn  # once, and remembered
    other = drawn_into(tmp_path / "b", "another")
    assert (other["stream"], other["picks"]) != (drawn["stream"], drawn["picks"])


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
