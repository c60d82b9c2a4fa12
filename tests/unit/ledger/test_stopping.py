"""When a run ends may depend on what it has released: the ε that holds is that of its plan."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.commands.progress import spending
from fedveil.commands.runs import Filter, _numbers
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import Account, open_ledger
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.verify import verify
from fedveil.parts.noise import Gaussian
from fedveil.privacy import composition
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.guarantee import guarantee
from fedveil.privacy.statement import UNRECORDED
from fedveil.recipe import Recipe
from fedveil.runs.listing import listed
from fedveil.runs.saved import SavedRun
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, train
from tests.conftest import Run
from tests.system.test_crash import Crash, crashed

RECIPE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
DELTA = 1e-5


# What one who chooses the moment gets


def gained_by_stopping(multiplier: float, claims: np.ndarray) -> float:
    """sup over stopping times T of E_P[(1 − e^{ε_T − L_T})₊], ε_k = claims[k − 1].

    It is the least δ for which "(ε_T, δ) at the round of stopping" holds. L is the privacy loss of
    Gaussian releases with everyone, a random walk with steps N(μ²/2, μ²), μ = 1/multiplier; the
    best rule is found backwards, on a grid of a fortieth of a step.
    """
    from scipy.signal import fftconvolve
    from scipy.stats import norm

    mu, rounds = 1 / multiplier, len(claims)
    step = mu / 40
    far = mu**2 * rounds / 2 + 9 * mu * math.sqrt(rounds)
    losses = np.arange(-far, far, step)
    moves = np.arange(-400, 401) * step
    chances = np.diff(norm.cdf(np.append(moves, 401 * step) - step / 2, mu**2 / 2, mu))
    value = np.zeros_like(losses)
    for claim in claims[::-1]:
        value = np.maximum(value, np.maximum(-np.expm1(claim - losses), 0.0))
        padded = np.pad(value, 400, mode="edge")
        value = fftconvolve(padded, chances[::-1], mode="valid")
    return float(np.interp(0.0, losses, value))


def running(multiplier: float, rounds: int) -> np.ndarray:
    """ε at DELTA of every number of rounds of a Gaussian with everyone, in closed form."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def delta(epsilon: float, mu: float) -> float:
        tail = norm.logcdf(-epsilon / mu - mu / 2) + epsilon
        return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(tail))

    mus = np.sqrt(np.arange(1, rounds + 1)) / multiplier
    return np.array([brentq(lambda e, mu=mu: delta(e, mu) - DELTA, 0.0, 60.0) for mu in mus])


@pytest.mark.parametrize(("multiplier", "rounds"), [(10.0, 100), (3.3, 200)])
def test_the_epsilon_so_far_is_no_guarantee_for_one_who_chooses_when_to_stop(
    multiplier: float, rounds: int
) -> None:
    """Nine to sixteen times the printed δ; with the ε of the planned rounds never more than δ."""
    claims = running(multiplier, rounds)
    once = events.Composed(events.GaussianRelease(multiplier), rounds)
    assert claims[-1] == pytest.approx(accounting.epsilon(once, DELTA), rel=2e-3)
    assert 8 * DELTA < gained_by_stopping(multiplier, claims) < 17 * DELTA
    planned = np.full(rounds, claims[-1])
    assert gained_by_stopping(multiplier, planned) == pytest.approx(DELTA, rel=0.02)


# What is stated


class Impatient:
    """Presses Ctrl-C after a round that is good enough."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, training: Training, record: Record) -> None:
        if record.round == self.after:
            signal.raise_signal(signal.SIGINT)


def planned_epsilon(recipe: Recipe, data: Federated, rounds: int) -> float:
    return guarantee(recipe, 18, data.clients, rounds, DELTA).epsilon


def test_a_run_that_is_stopped_by_choice_states_its_planned_rounds(
    blobs: Federated, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "a"
    result = train(
        RECIPE, blobs, rounds=9, delta=DELTA, save=path, watch=Impatient(3), evaluate_every=1
    )
    assert len(result.records) == 3
    planned = planned_epsilon(RECIPE, blobs, 9)
    assert result.guarantee.epsilon == planned
    assert "Rounds: 9 planned, 3 run. ε is that of 9 rounds." in result.guarantee.sentence()
    summary = json.loads((path / "summary.json").read_text())
    assert summary["privacy"]["views"]["models"]["epsilon"] == planned
    assert summary["privacy"]["course"]["run"] == 3
    assert "9 planned, 3 run" in (path / "privacy.txt").read_text()
    assert listed(path).epsilon == planned
    again = json.loads(run("privacy", str(path), "--json").out)
    assert again["views"]["models"]["epsilon"] == planned
    assert again["statement"] == summary["privacy"]["statement"]
    assert verify(open_ledger(Path(summary_ledger(path)))).problems == []


def summary_ledger(path: Path) -> str:
    return str(json.loads((path / "ledger.json").read_text())["path"])


def test_the_figure_so_far_is_marked_as_such(blobs: Federated) -> None:
    result = train(RECIPE, blobs, rounds=4, delta=DELTA, evaluate_every=1)
    so_far = [record.epsilon for record in result.records]
    assert so_far == [planned_epsilon(RECIPE, blobs, k) for k in (1, 2, 3, 4)]
    assert {record.epsilon_planned for record in result.records} == {so_far[-1]}
    assert spending(result.records[0]).startswith("planned ε = ")


def test_a_run_that_was_killed_is_listed_with_its_planned_rounds(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(monkeypatch, Session, "commit", 6)
    with pytest.raises(Crash):
        train(RECIPE, blobs, rounds=8, delta=DELTA, save=tmp_path / "a", evaluate_every=2)
    found = listed(tmp_path / "a")
    assert (found.state, found.rounds) == ("stopped", 4)
    assert (found.epsilon, found.untold) == (planned_epsilon(RECIPE, blobs, 8), False)


def test_a_summary_that_tells_nothing_of_the_plan_is_not_believed(
    blobs: Federated, tmp_path: Path, run: Run
) -> None:
    """As versions before 0.2 wrote it."""
    from fedveil.reporting.load import load_run

    path = tmp_path / "a"
    train(RECIPE, blobs, rounds=9, delta=DELTA, save=path, watch=Impatient(3), evaluate_every=1)
    file = path / "summary.json"
    summary = json.loads(file.read_text())
    del summary["privacy"]["course"]
    summary["privacy"]["rounds"] = 3
    summary["privacy"]["views"]["models"]["epsilon"] = planned_epsilon(RECIPE, blobs, 3)
    file.write_text(json.dumps(summary))
    assert (listed(path).epsilon, listed(path).untold) == (None, True)
    assert "not of the planned rounds" in load_run(path).guarantee["sentence"]
    again = json.loads(run("privacy", str(path), "--json").out)
    assert again["views"]["models"]["epsilon"] == planned_epsilon(RECIPE, blobs, 9)


def test_a_run_that_its_data_s_budget_ends_states_its_planned_rounds(
    blobs: Federated, ledger: Path, tmp_path: Path
) -> None:
    books = open_ledger(ledger)
    account = Account(blobs.fingerprint(), "client")
    books.grant(account, "models", Budget(2.0, DELTA), "blobs", "contents")
    with pytest.raises(BudgetError) as refusal:
        train(RECIPE, blobs, rounds=40, delta=DELTA, save=tmp_path / "a")
    result = refusal.value.result
    assert len(result.records) < 40
    assert result.guarantee.epsilon == planned_epsilon(RECIPE, blobs, 40) > 2.0
    told = dict(result.statement.entries())["Ledger"]
    assert told.startswith("Recorded (`fedveil budget show`). It counts against the budget ε = 2")
    books.sync()
    assert verify(books).problems == []
    books.close()


# Rounds that were lost


def lost_rounds(
    recipe: Recipe, data: Federated, path: Path, patch: pytest.MonkeyPatch, **options: Any
) -> Training:
    """A secret run of 8 rounds that crashed in its sixth, and is back at its third."""
    options = {"delta": DELTA, "noise": "secure", "rounds": 8, **options}
    crashed(patch, Session, "commit", 6)
    with pytest.raises(Crash):
        train(recipe, data, save=path, checkpoint_every=3, **options)
    patch.undo()
    return resume(prepare(recipe, data, **options), path)


def test_lost_rounds_come_on_top_of_the_plan_and_of_an_assumption(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = lost_rounds(RECIPE, blobs, tmp_path / "a", monkeypatch)
    charge = training.charge()
    assert (charge.rounds, charge.drawn, charge.course.redrawn) == (11, 6, 3)
    result = finish(training, Impatient(5))
    assert (len(result.records), result.guarantee.rounds) == (5, 11)
    assert result.guarantee.epsilon == guarantee(
        training.recipe, training.task.dim, blobs.clients, 11, DELTA
    ).epsilon  # fmt: skip
    told = dict(result.statement.entries())
    assert "8 planned, 5 run, 3 more lost in a crash and drawn again" in told["Privacy"]
    assert (
        "The time of the crash did not depend on what the run had released" in told["Assumptions"]
    )


LISTED = {
    "lost rounds": (RECIPE, {}),
    "a cap": (algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1, cap=2), {}),
    "its own ε": (algorithms.dp_fedavg(rate=0.5, steps=1), {"epsilon": 4.0}),
    "more of its own ε": (RECIPE, {"epsilon": 40.0}),
    "correlated noise": (
        algorithms.dp_ftrl(clients=3, separation=4, bands=4, noise_multiplier=6.0, steps=1), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "options"), LISTED.values(), ids=LISTED)
def test_a_run_that_lost_rounds_is_listed_with_what_it_will_state(
    blobs: Federated,
    tmp_path: Path,
    ledger: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    options: dict[str, Any],
) -> None:
    training = lost_rounds(recipe, blobs, tmp_path / "a", monkeypatch, evaluate_every=1, **options)
    training.close()
    found, planned = listed(tmp_path / "a"), SavedRun(tmp_path / "a").rows[-1]["epsilon_planned"]
    assert found.epsilon == pytest.approx(training.guarantee().epsilon, rel=1e-9)
    assert (found.at_least, _numbers(found)[2][0].isdigit()) == (False, True)
    for part in ledger.parent.glob(f"{ledger.name}*"):
        part.unlink()
    unknown = listed(tmp_path / "a")
    assert (unknown.epsilon, unknown.at_least) == (planned, True)
    assert _numbers(unknown)[2].startswith("≥ ")
    assert not Filter(max_epsilon=1000.0).matches(unknown)


def test_a_run_in_an_older_ledger_is_listed_with_at_least_its_plan(
    blobs: Federated, tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_rounds(RECIPE, blobs, tmp_path / "a", monkeypatch, evaluate_every=1).close()
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "other.sqlite"))
    open_ledger(tmp_path / "other.sqlite").close()
    assert listed(tmp_path / "a").at_least


@dataclass(frozen=True)
class Changing(Gaussian):
    """Noise of the user's own, with a part that changes between processes."""

    SHIFT: ClassVar[float] = 0.0

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        return super().draw(message, arrived, expected, rng) + self.SHIFT

    def event(self, *given: Any) -> events.Release:
        return Gaussian(self.multiplier, at=self.at).event(*given)


def changed(
    data: Federated, path: Path, patch: pytest.MonkeyPatch, rounds: int = 8, **options: Any
) -> Training:
    """A seeded run that crashed in its sixth round, and is back at its third with other noise."""
    recipe = replace(RECIPE, noise=Changing(3.0))
    patch.setattr(Changing, "SHIFT", 0.0)
    options = {"delta": DELTA, "rounds": rounds, "checkpoint_every": 3, **options}
    crashed(patch, Session, "commit", min(rounds, 6))
    with pytest.raises(Crash):
        train(recipe, data, save=path, **options)
    patch.undo()
    patch.setattr(Changing, "SHIFT", 1.0)
    return resume(prepare(recipe, data, **options), path)


def test_seeded_rounds_that_are_released_in_another_version_count_twice(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds 4 and 5 were committed before; of round 6 nothing had left the process."""
    training = changed(blobs, tmp_path / "a", monkeypatch, evaluate_every=1)
    assert training.charge().course.redrawn == 0
    result = finish(training)
    assert training.session is not None
    assert training.session.differed
    said, size = result.guarantee, (training.task.dim, blobs.clients)
    assert said.epsilon == guarantee(training.recipe, *size, 10, DELTA).epsilon
    assert "8 planned, 8 run, 2 more lost in a crash and drawn again" in said.sentence()
    so_far = [guarantee(training.recipe, *size, k, DELTA).epsilon for k in (7, 8, 8, 9, 10)]
    assert [record.epsilon for record in result.records[3:]] == so_far
    with contextlib.closing(open_ledger(training.session.ledger.path)) as books:
        account = Account(blobs.fingerprint(), "client")
        drawn = composition.plan(training.recipe, *size, "models")
        charged = composition.epsilon([composition.Charged(drawn, 8, 10)], DELTA)
        assert books.spent(account, "models", DELTA) == charged >= said.epsilon
        (problem,) = verify(books).problems
        assert "rounds 4–5 were released in two versions" in problem


def test_a_run_with_versions_is_listed_with_what_it_will_state(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = changed(blobs, tmp_path / "a", monkeypatch, evaluate_every=3)
    for _ in range(2):
        training.step()
    training.close()
    found = listed(tmp_path / "a")
    assert training.charge().course.redrawn == 2
    assert (found.state, found.epsilon) == ("stopped", training.guarantee().epsilon)


def test_versions_are_held_to_a_run_s_own_epsilon_before_they_are_published(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of 5 rounds is spent: no other version of its last ones can be published."""
    allowed = planned_epsilon(RECIPE, blobs, 6) * 0.999
    training = changed(blobs, tmp_path / "a", monkeypatch, 5, epsilon=allowed)
    assert training.session is not None
    with pytest.raises(
        BudgetError, match="Round 4 of dp_fedavg was not published: with 1 round lost"
    ):
        finish(training)
    assert (training.state.round, training.session.redrawn) == (3, 0)


@pytest.mark.parametrize("cap", [None, 3])
def test_a_run_s_own_epsilon_limits_it_whatever_its_crashes_depended_on(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: int | None
) -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, steps=1, cap=cap)
    path = tmp_path / "a"
    training = lost_rounds(recipe, blobs, path, monkeypatch, epsilon=4.0)
    with pytest.raises(BudgetError, match="lost in a crash and drawn again") as end:
        finish(training)
    said = end.value.result.guarantee
    assert said.epsilon == 4.0
    assert said.course.limited
    assert "This ε limits the run, no matter when rounds are lost" in said.sentence()
    assumed = dict(end.value.result.statement.entries())["Assumptions"]
    assert "view models needs no such assumption" in assumed
    assert training.session is not None
    books = open_ledger(training.session.ledger.path)
    assert verify(books).problems == []
    books.close()


def test_one_proof_decides_how_far_a_run_s_own_epsilon_reaches(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two is better for what happened would be two filters, each with all of δ."""
    recipe = algorithms.dp_fedavg(rate=0.9, steps=1, cap=6)
    training = lost_rounds(recipe, blobs, tmp_path / "a", monkeypatch, epsilon=4.0)
    size = (training.task.dim, blobs.clients)
    known = training.recipe.release(*size)
    sampled = training.recipe.event(*size)
    by_cap, by_rounds = (
        accounting.epsilon(events.Composed(event, count), DELTA)
        for event, count in ((known, 6), (sampled, 8))
    )
    assert by_cap < by_rounds  # so the cap is the plan's proof, and lost rounds come on top of it
    from fedveil.ledger.charging import _own_epsilon

    nine = accounting.epsilon(events.Composed(known, 9), DELTA)
    assert _own_epsilon(training.spec, 9, 3) == nine
    assert accounting.epsilon(events.Composed(sampled, 9), DELTA) < nine
    training.session.close()


# Where it is recorded


def test_an_unsaved_run_says_that_nobody_recorded_it(blobs: Federated, tmp_path: Path) -> None:
    unsaved = train(RECIPE, blobs, rounds=2, delta=DELTA)
    assert dict(unsaved.statement.entries())["Ledger"] == UNRECORDED
    assert unsaved.summary()["privacy"]["ledger"] == UNRECORDED
    saved = train(RECIPE, blobs, rounds=2, delta=DELTA, save=tmp_path / "a")
    told = "Recorded (`fedveil budget show`)."
    assert dict(saved.statement.entries())["Ledger"] == told
    assert told in (tmp_path / "a" / "privacy.txt").read_text()
    assert "Ledger" not in dict(prepare(RECIPE, blobs, rounds=2).statement().entries())


# What was read from the data without noise


def test_a_budget_refuses_data_whose_encoding_was_read_from_them(
    blobs: Federated, ledger: Path, tmp_path: Path
) -> None:
    """As it refuses a probed clip: one row may move everybody's inputs."""
    from fedveil.data.origin import Origin

    fitted = replace(blobs, origin=Origin(exclusions=("the means and deviations of age",)))
    books = open_ledger(ledger)
    account = Account(fitted.fingerprint(), "client")
    books.grant(account, "models", Budget(200.0, DELTA), "blobs", "contents")
    refused = (
        "no finite ε.*since the means and deviations of age were read from these data "
        "without noise .declare public ranges, categories and classes instead."
    )
    with pytest.raises(BudgetError, match=refused):
        train(RECIPE, fitted, rounds=2, delta=DELTA)
    books.sync()
    assert books.of(account) == []
    books.close()


def test_without_a_budget_such_data_are_recorded_without_an_epsilon(
    blobs: Federated, ledger: Path, tmp_path: Path, run: Run
) -> None:
    from fedveil.data.origin import Origin

    fitted = replace(blobs, origin=Origin(exclusions=("the classes",)))
    result = train(RECIPE, fitted, rounds=2, delta=DELTA, save=tmp_path / "a")
    assert result.guarantee.sentence().startswith("Apart from the classes, ")
    books = open_ledger(ledger)
    account = Account(fitted.fingerprint(), "client")
    assert books.spent(account, "models", DELTA) == math.inf
    assert verify(books).problems == []
    books.close()
    assert "ε = ∞ at δ = 1e-5 (zero-out): the classes were read from" in run("budget", "show").out
