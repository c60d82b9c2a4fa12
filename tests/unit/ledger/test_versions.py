"""Rounds that were published in several versions: what the account, the run and a budget count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import VIEWS, Account, Ledger, open_ledger
from fedveil.ledger.session import BudgetError, Session
from fedveil.privacy.guarantee import guarantee
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, start, train
from tests.system.test_crash import Crash, crashed
from tests.unit.ledger.test_stopping import Changing

DELTA = 1e-5
PLAIN = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
CAPPED = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.9, steps=1, cap=1)
ON_CLIENTS = algorithms.dp_fedavg(noise_multiplier=3.0, clients=4, steps=1, noise_at="client")
CYCLIC = algorithms.dp_fedavg(
    noise_multiplier=3.0, rate=0.2, steps=1, noise="banded", bands=3, separation=3
)
SEPARATED = algorithms.dp_ftrl(noise_multiplier=3.0, clients=3, steps=1, separation=4, bands=4)
RECIPES = {
    "cap 1": CAPPED,
    "cap 2": replace(CAPPED, cohort=replace(CAPPED.cohort, cap=2)),
    "client noise": ON_CLIENTS,
    "cyclic": CYCLIC,
    "separated": SEPARATED,
}


def spent(books: Ledger, data: Federated, view: str = "models") -> float:
    return books.spent(Account(data.fingerprint(), "client"), view, DELTA)  # type: ignore[arg-type]


def changing(recipe: Recipe) -> Recipe:
    """The recipe with noise that differs between processes, if it is drawn round by round."""
    if recipe.noise.correlated:
        return recipe
    return replace(recipe, noise=Changing(3.0, at=recipe.noise.at))


def crashed_and_changed(
    recipe: Recipe, data: Federated, path: Path, patch: pytest.MonkeyPatch, **options: Any
) -> Training:
    """A seeded run that crashed in its sixth round, and is back at its third with other bytes."""
    options = {"rounds": 8, "delta": DELTA, **options}
    patch.setattr(Changing, "SHIFT", 0.0)
    with patch.context() as during:
        crashed(during, Session, "commit", 6)
        with pytest.raises(Crash):
            train(recipe, data, save=path, checkpoint_every=3, **options)
    patch.setattr(Changing, "SHIFT", 1.0)
    training = resume(prepare(recipe, data, **options), path)
    if recipe.noise.correlated:  # as by another engine: the last bits differ
        training.state = replace(training.state, x=training.state.x * (1 + 1e-6))
    return training


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_account_of_versions_costs_at_least_what_the_run_states(
    recipe: Recipe, blobs: Federated, tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds in two versions come on top of a cap, a separation and the noise of the others."""
    training = crashed_and_changed(changing(recipe), blobs, tmp_path / "a", monkeypatch)
    result = finish(training)
    assert result.guarantee.course is not None
    assert result.guarantee.course.redrawn == 2
    with contextlib.closing(open_ledger(ledger)) as books:
        for view in VIEWS:
            stated = result.statement.towards(view).epsilon
            assert stated <= spent(books, blobs, view) <= 1.1 * stated  # at half of δ


def test_an_equal_run_in_the_ledger_pays_for_no_round_of_this_one(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own ε limits its own releases: 9 rounds here, of which 2 are other versions."""
    recipe, size = changing(PLAIN), (18, blobs.clients)
    allowed = guarantee(recipe, *size, 9, DELTA).epsilon * 1.0001
    train(recipe, blobs, rounds=8, delta=DELTA, epsilon=allowed, save=tmp_path / "equal")
    training = crashed_and_changed(recipe, blobs, tmp_path / "a", monkeypatch, epsilon=allowed)
    with pytest.raises(BudgetError, match="Round 8 of dp_fedavg was not run: with 2 rounds") as end:
        finish(training)
    assert training.session is not None
    assert training.session.rounds == 9
    assert end.value.result.guarantee.epsilon == allowed


def test_a_version_that_was_committed_since_the_last_entry_was_read_is_noticed(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes drew a round at once: the one that published it last says so."""
    prepared = [prepare(changing(PLAIN), blobs, rounds=8, delta=DELTA) for _ in range(2)]
    one, other = (start(each, tmp_path / str(n)) for n, each in enumerate(prepared))
    record = other._record

    def slowly(*given: Any) -> Any:
        one.step()
        return record(*given)

    monkeypatch.setattr(other, "_record", slowly)
    monkeypatch.setattr(Changing, "SHIFT", 0.0)
    play = other.play
    monkeypatch.setattr(other, "play", lambda: shifted(play, monkeypatch))
    other.step()
    assert one.session is not None
    assert other.session is not None
    assert (one.session.differed, other.session.differed) == (False, True)
    one.close()
    other.close()


def shifted(play: Callable[[], Any], patch: pytest.MonkeyPatch) -> Any:
    """A round with other noise."""
    with patch.context() as during:
        during.setattr(Changing, "SHIFT", 1.0)
        return play()


def test_a_capped_run_in_three_directories_costs_three_releases(
    blobs: Federated, tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed, and noise that differs: a unit takes part once in each of three releases."""
    for number in range(3):
        monkeypatch.setattr(Changing, "SHIFT", float(number))
        train(changing(CAPPED), blobs, rounds=8, delta=DELTA, save=tmp_path / str(number))
    three = events.Composed(events.GaussianRelease(3.0), 3)
    with contextlib.closing(open_ledger(ledger)) as books:
        assert spent(books, blobs) >= accounting.epsilon(three, DELTA)
