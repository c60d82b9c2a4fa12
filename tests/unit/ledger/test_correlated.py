"""Runs with correlated noise: what is charged when they stop, crash, resume and add up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.correlation import energy
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import Account, Ledger
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.verify import verify
from fedveil.privacy import composition
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import Charged, plan
from fedveil.recipe import Recipe
from fedveil.training.start import finish, train
from tests.conftest import Run
from tests.system.test_crash import Crash, begun, crashed, files, resumed
from tests.unit.ledger.test_stopping import Impatient

BANDED = algorithms.dp_ftrl(
    clients=3, separation=4, bands=4, noise_multiplier=6.0, steps=1
)  # of 12 clients
BUFFERED = algorithms.dp_ftrl(
    clients=3, separation=4, noise="blt", noise_multiplier=6.0, steps=1
).planned(8, 12)
TURNS = algorithms.dp_fedavg(
    rate=0.1, separation=4, bands=4, noise="banded", noise_multiplier=6.0, steps=1
)
RECIPES = pytest.mark.parametrize("recipe", [BANDED, BUFFERED, TURNS], ids=["b", "blt", "turns"])
DELTA = 1e-5


def spent(recipe: Recipe, rounds: int) -> float:
    return accounting.epsilon(recipe.spent(18, 12, rounds), DELTA)


def _first(event: Any) -> int:
    """The round from which on a stream is charged."""
    return int(getattr(event, "event", event).first)


@RECIPES
def test_a_seeded_run_that_crashed_ends_at_the_same_bytes(
    recipe: Recipe,
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ledger: Path,
) -> None:
    train(recipe, blobs, rounds=8, checkpoint_every=3, save=tmp_path / "whole", delta=DELTA)
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", delta=DELTA)
    monkeypatch.undo()
    training = resumed(recipe, blobs, tmp_path / "a", delta=DELTA)
    assert training.state.round == 3
    result = finish(training)
    assert files(tmp_path / "a") == files(tmp_path / "whole")
    account = Account(blobs.fingerprint(), "client")
    assert Ledger(ledger).spent(account, "models", DELTA) == result.guarantee.epsilon
    assert verify(Ledger(ledger)).problems == []


@RECIPES
def test_a_secret_run_continues_its_noise_and_pays_for_lost_rounds(
    recipe: Recipe,
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ledger: Path,
) -> None:
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", delta=DELTA, noise="secure")
    monkeypatch.undo()
    saved = load_file(tmp_path / "a" / "checkpoint.safetensors")
    training = resumed(recipe, blobs, tmp_path / "a", delta=DELTA, noise="secure")
    for name, leaf in training.state.parts["noise"].items():
        assert leaf.abs().max() > 0
        assert torch.equal(leaf, saved[f"noise.{name}"])
    result = finish(training)
    assert (len(result.records), result.guarantee.rounds) == (8, 11)
    own = training.recipe
    assert result.guarantee.epsilon == spent(replace(own, lost=3), 11)
    assert result.guarantee.epsilon > spent(own, 8)
    account = Account(blobs.fingerprint(), "client")
    firsts = [_first(stream.plans["models"].ways[0].event) for stream in Ledger(ledger).of(account)]
    assert firsts == [0, 3]
    if recipe is not TURNS:  # whose rounds before the crash are sampled ones in the account
        assert Ledger(ledger).spent(account, "models", DELTA) >= result.guarantee.epsilon
    assert verify(Ledger(ledger)).problems == []


@RECIPES
def test_a_secret_run_that_lost_nothing_costs_what_was_planned(
    recipe: Recipe, blobs: Federated, tmp_path: Path, ledger: Path
) -> None:
    path, options = tmp_path / "a", {"delta": DELTA, "noise": "secure"}
    train(recipe, blobs, rounds=8, save=path, evaluate_every=1, watch=Impatient(5), **options)  # type: ignore[arg-type]
    result = finish(resumed(recipe, blobs, path, **options))
    assert result.guarantee.epsilon == spent(result.recipe, 8)
    assert result.guarantee.rounds == 8
    assert verify(Ledger(ledger)).problems == []


def test_the_privacy_command_agrees_after_a_crash(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--dataset", "digits", "--clients", 20, "--rounds", 8, "--noise", "secure")
    noisy = ("--algorithm", "dp_ftrl", "--noise-multiplier", 6.0, "--set", "clients=4")
    crashed(monkeypatch, Session, "commit", 6)
    with pytest.raises(Crash):
        run("train", *flags, *noisy, "--checkpoint-every", 3, "--out", "a")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run("train", "--resume", "a").code == 0
    said = json.loads((tmp_path / "a" / "summary.json").read_bytes())["privacy"]
    assert said["rounds"] == 11
    assert json.loads(run("privacy", "a", "--json").out)["views"] == said["views"]


def test_a_secret_run_keeps_its_own_epsilon_after_a_crash(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Path
) -> None:
    recipe = algorithms.dp_ftrl(clients=3, separation=2, bands=2, steps=1)
    options: dict[str, Any] = {"epsilon": 4.0, "delta": DELTA, "noise": "secure"}
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", **options)
    monkeypatch.undo()
    training = resumed(recipe, blobs, tmp_path / "a", **options)
    with pytest.raises(BudgetError, match="with 3 rounds lost in a crash and drawn again") as end:
        finish(training)
    assert end.value.result.guarantee.epsilon == 4.0
    assert 3 <= len(end.value.result.records) < 8
    assert verify(Ledger(ledger)).problems == []


def test_turns_end_after_a_crash_on_their_own_epsilon(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Path
) -> None:
    """Sampling counts only for one chain, and a second proof would need a δ of its own."""
    recipe = replace(TURNS, noise=TURNS.noise.uncalibrated())
    options: dict[str, Any] = {"epsilon": 4.0, "delta": DELTA, "noise": "secure"}
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", **options)
    monkeypatch.undo()
    training = resumed(recipe, blobs, tmp_path / "a", **options)
    with pytest.raises(BudgetError, match="with 3 rounds lost in a crash") as end:
        finish(training)
    assert len(end.value.result.records) == 3
    assert end.value.result.guarantee.epsilon == 4.0
    assert verify(Ledger(ledger)).problems == []


# Several runs


def charged(recipe: Recipe, rounds: int, first: int = 0) -> Charged:
    return Charged(plan(recipe, 18, 12, "models").resumed(first), 8, rounds)


def test_two_runs_are_not_one_long_run() -> None:
    """With a cap of two, sixteen rounds of one run cost no more than eight, but two runs do."""
    recipe = replace(BANDED, cohort=replace(BANDED.cohort, cap=2))
    one, long = charged(recipe, 8), spent(recipe, 16)
    assert composition.epsilon([one], DELTA) == pytest.approx(long)
    both = composition.epsilon([one, one], DELTA)
    sensitivity = math.sqrt(2 * energy(BANDED.noise.column, 8, 4, 2))  # type: ignore[attr-defined]
    exact = events.Composed(events.GaussianRelease(6.0 / sensitivity), 1)
    assert both >= accounting.epsilon(exact, DELTA) > 1.2 * long


def test_a_stream_that_takes_over_pays_for_its_own_rows() -> None:
    """Rows 5 to 7 of eight: what is past still moves them, so they cost more than three rows."""
    found = composition.curve(charged(BUFFERED, 3, first=5)).orders
    fresh = composition.curve(charged(BUFFERED, 3)).orders
    whole = composition.curve(charged(BUFFERED, 8)).orders
    assert (fresh < found).all()
    assert (found < whole).all()


def test_a_run_fits_a_budget_of_its_own_epsilon(
    blobs: Federated, tmp_path: Path, ledger: Path
) -> None:
    books = Ledger(ledger)
    account = Account(blobs.fingerprint(), "client")
    epsilon = spent(BANDED, 8)
    books.grant(account, "models", Budget(epsilon, DELTA), "blobs", blobs.contents())
    books.close()
    result = train(BANDED, blobs, rounds=8, save=tmp_path / "a", delta=DELTA)
    assert len(result.records) == 8
    with pytest.raises(BudgetError, match="Round 1 of dp_ftrl was not run"):
        train(BANDED, blobs, rounds=8, save=tmp_path / "b", delta=DELTA, seed=1)


def test_the_account_charges_a_stopped_run_for_the_rounds_it_drew(
    blobs: Federated, tmp_path: Path, ledger: Path
) -> None:
    train(
        BANDED, blobs, rounds=8, save=tmp_path / "a", delta=DELTA, evaluate_every=1,
        watch=Impatient(3),
    )  # fmt: skip
    account = Account(blobs.fingerprint(), "client")
    found = Ledger(ledger).spent(account, "models", DELTA)
    assert found == spent(BANDED, 3) < spent(BANDED, 8)
    column = np.array(BANDED.noise.column.coefficients[:3])  # type: ignore[attr-defined]
    ratio = 6.0 / float(np.linalg.norm(column))  # one participation, cut after three rows
    alone = events.Composed(events.GaussianRelease(ratio), 1)
    assert found == pytest.approx(accounting.epsilon(alone, DELTA))
