from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.audit.run import place_canaries
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.ledger import (
    ACCOUNTANT,
    VIEWS,
    Account,
    Facts,
    Ledger,
    ledger_path,
    open_ledger,
    stream_key,
)
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.verify import TOLERANCE, verify
from fedveil.parts.bound import ProbedClip
from fedveil.privacy.calibrate import Budget, most_rounds
from fedveil.privacy.composition import plan
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, start, train
from tests.system import forked

DIM, CLIENTS, DELTA = 18, 12, 1e-5
ACCOUNT = Account("ab" * 32, "client")
POISSON = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
OTHER = algorithms.dp_fedavg(noise_multiplier=4.0, rate=0.5, steps=1)
FIXED = algorithms.dp_fedavg(noise_multiplier=4.0, clients=4, steps=1)


def facts(recipe: Recipe = POISSON, stream: str = "seeded a", rounds: int = 50) -> Facts:
    plans = {view: plan(recipe, DIM, CLIENTS, view) for view in VIEWS}
    return Facts(ACCOUNT, "blobs", CLIENTS, recipe.name, stream, rounds, DELTA, plans)


@pytest.fixture
def books(ledger: Path) -> Iterator[Ledger]:
    opened = open_ledger(ledger)
    yield opened
    opened.close()


def grant(books: Ledger, epsilon: float, account: Account = ACCOUNT) -> Budget:
    budget = Budget(epsilon, DELTA)
    books.grant(account, "models", budget, "blobs", "contents")
    return budget


def played(session: Session, most: int = 1000) -> int:
    """How many rounds it may reserve, until it is refused."""
    for round in range(most):
        try:
            session.reserve(round)
        except BudgetError:
            return round
    return most


def spent(recipe: Recipe, rounds: int) -> float:
    return accounting.epsilon(recipe.spent(DIM, CLIENTS, rounds), DELTA)


# What counts


def test_the_wording_of_a_reason_does_not_make_another_stream() -> None:
    """Else a run recorded by a version with other words would be charged twice when it resumes."""
    body = facts().plain()
    worded = json.loads(json.dumps(body).replace("the server sees", "a server knows"))
    assert worded != body
    assert stream_key(worded) == stream_key(body) != stream_key(facts(OTHER).plain())


def test_a_reserve_without_a_commit_is_spent(books: Ledger) -> None:
    session = Session(books, facts(), "run")
    session.reserve(0)
    session.commit(0, "x")
    session.reserve(1)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 2)
    again = Ledger(books.path)
    assert again.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 2)
    verdict = verify(again)
    assert (verdict.rounds, verdict.uncommitted, verdict.problems) == (2, 1, [])


def test_the_last_affordable_round_is_allowed_and_the_next_is_not(books: Ledger) -> None:
    budget = grant(books, 3.0)
    affordable = most_rounds(POISSON, budget, DIM, CLIENTS)
    session = Session(books, facts(), "run")
    assert session.room == affordable
    assert played(session) == affordable
    assert books.spent(ACCOUNT, "models", DELTA, 3.0) <= 3.0 < spent(POISSON, affordable + 1)
    with pytest.raises(BudgetError) as refusal:
        session.reserve(affordable)
    assert str(refusal.value).startswith(
        f"Round {affordable + 1} of dp_fedavg was not run: it would bring the spending on "
        "'blobs' to ε = 3."
    )
    assert "The budget is ε = 3 at δ = 1e-5 in view 'models'" in str(refusal.value)


def test_a_plan_that_is_affordable_is_played_to_its_end(books: Ledger) -> None:
    grant(books, spent(POISSON, 50))
    assert played(Session(books, facts(), "run"), 50) == 50


def test_a_budget_holds_across_runs_and_processes(books: Ledger) -> None:
    budget = grant(books, 3.0)
    affordable = most_rounds(POISSON, budget, DIM, CLIENTS)
    first = Session(books, facts(rounds=5), "one")
    played(first, 5)
    first.close()
    later = Ledger(books.path)
    second = Session(later, facts(stream="seeded b"), "two")
    assert 5 + played(second) in (affordable, affordable - 1)  # a half of δ counts
    assert later.spent(ACCOUNT, "models", DELTA, 3.0) <= 3.0


def test_a_budget_holds_across_recipes_whose_neighbours_differ(books: Ledger) -> None:
    grant(books, 9.0)
    for number, recipe in enumerate((POISSON, OTHER, FIXED)):
        session = Session(books, facts(recipe, f"seeded {number}", 4), str(number))
        assert played(session, 4) == 4
        session._lock.release()
    assert spent(POISSON, 4) < books.spent(ACCOUNT, "models", DELTA, 9.0) <= 9.0
    session = Session(books, facts(POISSON, "seeded more", 200), "more")
    assert 0 < played(session) < 200
    assert books.spent(ACCOUNT, "models", DELTA, 9.0) <= 9.0


def test_each_view_has_a_budget_of_its_own(books: Ledger) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=9.0, clients=6, noise_at="client", steps=1)
    grant(books, 100.0)
    free = Session(books, facts(recipe), "one")
    assert free.room == 50
    free._lock.release()
    books.grant(ACCOUNT, "messages", Budget(4.0, DELTA), "blobs", "contents")
    kept = Session(books, facts(recipe), "one")
    assert kept.room < 5
    with pytest.raises(BudgetError, match="in view 'messages'"):
        kept.reserve(played(kept))


def test_data_of_other_people_are_not_charged(books: Ledger) -> None:
    grant(books, 0.5, Account("cd" * 32, "client"))
    grant(books, 0.5, Account("ab" * 32, "example"))
    assert played(Session(books, facts(), "run"), 50) == 50


def test_a_budget_that_is_lifted_is_kept_no_more(books: Ledger) -> None:
    grant(books, 0.01)
    books.grant(ACCOUNT, "models", None, "blobs", "contents")
    assert books.budgets(ACCOUNT) == {}
    assert played(Session(books, facts(), "run"), 50) == 50


def test_a_budget_set_while_a_run_goes_on_is_kept_from_then_on(books: Ledger) -> None:
    session = Session(books, facts(), "run")
    played(session, 3)
    grant(Ledger(books.path), spent(POISSON, 4) * 1.001)
    session.reserve(3)
    with pytest.raises(BudgetError):
        session.reserve(4)


def test_neighbours_that_do_not_fit_are_refused_with_the_reason(books: Ledger) -> None:
    adaptive = algorithms.dp_fedavg_adaptive(noise_multiplier=3.0, rate=0.5)
    grant(books, 50.0)
    first = Session(books, facts(POISSON), "one")
    played(first, 2)
    first._lock.release()
    second = Session(books, facts(adaptive, "seeded b"), "two")
    with pytest.raises(BudgetError, match="do not all hold for zero-out neighbours"):
        second.reserve(0)


def test_who_removes_the_lock_does_not_spend_twice(books: Ledger) -> None:
    """Two at work at once, each of which had room for all when it began."""
    budget = grant(books, 3.0)
    affordable = most_rounds(POISSON, budget, DIM, CLIENTS)
    one = Session(books, facts(), "one")
    for lock in books.path.parent.glob("*.lock"):
        lock.unlink()
    other = Session(Ledger(books.path), facts(stream="seeded b"), "two")
    assert one.room == affordable <= other.room + 1
    drawn = 0
    for round in range(affordable):
        for session in (one, other):
            with contextlib.suppress(BudgetError):
                session.reserve(round)
                drawn += 1
    assert affordable - 1 <= drawn <= affordable
    assert books.spent(ACCOUNT, "models", DELTA, 3.0) <= 3.0


def test_a_budget_lifted_under_a_run_without_its_lock_lets_it_go_on(books: Ledger) -> None:
    grant(books, spent(POISSON, 1))
    session = Session(books, facts(), "one")
    session.reserve(0)
    for lock in books.path.parent.glob("*.lock"):
        lock.unlink()
    Ledger(books.path).grant(ACCOUNT, "models", None, "blobs", "contents")
    session.reserve(1)


# Noise is never drawn twice


def test_the_same_stream_is_charged_once(books: Ledger) -> None:
    for name in ("one", "one", "twin"):
        session = Session(books, facts(), name)
        for round in range(3):
            session.reserve(round)
            session.check(round, f"bytes {round}")
            session.commit(round, f"bytes {round}")
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 3)
    assert (Session(books, facts(), "twin").rounds, Session(books, facts(), "new").rounds) == (3, 0)


def test_a_stream_that_is_spent_may_be_played_again_without_room(books: Ledger) -> None:
    grant(books, 3.0)
    session = Session(books, facts(), "one")
    last = played(session)
    session._lock.release()
    again = Session(books, facts(), "one")
    assert again.room == 0
    assert played(again) == last


def test_a_secret_stream_is_charged_anew(books: Ledger) -> None:
    first = Session(books, facts(stream="secret 1"), "run")
    played(first, 5)
    resumed = Session(books, facts(stream="secret 2"), "run", 3)  # from a checkpoint
    assert resumed.redrawn == 2
    for round in (3, 4, 5):
        resumed.reserve(round)
    assert resumed.rounds == 8
    again = Session(books, facts(stream="secret 3"), "run", 3)  # lost by both are 3, 4, and 3, 4, 5
    assert (again.redrawn, again.rounds) == (5, 8)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 8)


def test_other_bytes_under_the_same_noise_are_not_published_on_a_budget(books: Ledger) -> None:
    grant(books, 10.0)
    session = Session(books, facts(), "one")
    session.reserve(0)
    session.commit(0, "these bytes")
    session.check(0, "these bytes")
    with pytest.raises(UserError, match="Round 1 of dp_fedavg was released before with other"):
        session.check(0, "other bytes")


def test_other_bytes_are_not_published_in_another_account_either(books: Ledger) -> None:
    """Their difference has no noise, whichever accounts the two releases are charged to."""
    other = replace(ACCOUNT, fingerprint="cd" * 32)
    for account in (ACCOUNT, other):
        grant(books, 10.0, account)
    first = Session(books, facts(), "one")
    first.reserve(0)
    first.commit(0, "these bytes")
    second = Session(books, replace(facts(), account=other), "two")
    second.reserve(0)
    second.check(0, "these bytes")
    with pytest.raises(UserError, match="Round 1 of dp_fedavg was released before with other"):
        second.check(0, "other bytes")


def test_without_a_budget_other_bytes_are_noted(books: Ledger) -> None:
    session = Session(books, facts(), "one")
    for released in ("these bytes", "other bytes", "these bytes"):
        session.reserve(0)
        session.check(0, released)
        session.commit(0, released)
    (problem,) = verify(books).problems
    assert "round 1 was released in two versions with the same noise" in problem


def test_a_round_that_was_published_in_two_versions_is_charged_twice(books: Ledger) -> None:
    """A part that draws randomness of its own gives two releases; the ledger knows only bytes."""
    for name in ("one", "twin"):
        session = Session(books, facts(), name)
        for round in range(3):
            session.reserve(round)
            session.commit(round, f"bytes {round}")
        assert (session.rounds, session.redrawn) == (3, 0)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 3)
    assert session.repeats(2, "other bytes")
    assert not session.repeats(2, "bytes 2")
    session.commit(2, "other bytes")
    assert (session.rounds, session.redrawn) == (4, 1)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 4)
    other = Session(books, facts(), "third")
    other.reserve(2)
    other.commit(2, "more bytes")
    assert (other.rounds, other.redrawn) == (1, 0)  # its own statement is about its own releases
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 5)
    assert verify(books).rounds == 5


def test_versions_of_a_round_leave_less_room_in_a_budget(books: Ledger) -> None:
    session = Session(books, facts(), "one")
    for released in ("these bytes", "other bytes"):
        session.reserve(0)
        session.commit(0, released)
    budget = grant(books, 3.0)
    affordable = most_rounds(POISSON, budget, DIM, CLIENTS)
    session = Session(books, facts(), "one")
    assert played(session) == affordable - 1
    assert books.spent(ACCOUNT, "models", DELTA, 3.0) <= 3.0
    assert verify(books).problems[0].startswith("dp_fedavg on ")  # the two versions, and no more


def accounted_otherwise(books: Ledger, digest: str) -> None:
    """A round of the same noise stream, recorded when its rounds were accounted otherwise."""
    before = facts()
    wider = {view: replace(one, adjacencies=("zero-out",)) for view, one in before.plans.items()}
    session = Session(books, replace(before, plans=wider), "one")
    session.reserve(0)
    session.commit(0, digest)
    if session._lock is not None:
        session._lock.release()


def test_other_bytes_are_noticed_across_a_change_of_the_accounting(books: Ledger) -> None:
    """The noise is the stream's; what its rounds were thought to cost is not part of its name."""
    grant(books, 10.0)
    accounted_otherwise(books, "these bytes")
    session = Session(books, facts(), "one")
    session.reserve(0)
    session.check(0, "these bytes")
    with pytest.raises(UserError, match="Round 1 of dp_fedavg was released before with other"):
        session.check(0, "other bytes")
    session.commit(0, "these bytes")
    assert not session.differed
    verdict = verify(books)
    assert (verdict.rounds, verdict.uncommitted, verdict.problems) == (2, 0, [])


def test_other_bytes_are_noted_across_a_change_of_the_accounting(books: Ledger) -> None:
    accounted_otherwise(books, "these bytes")
    session = Session(books, facts(), "one")
    session.reserve(0)
    session.check(0, "other bytes")
    session.commit(0, "other bytes")
    assert session.differed
    problems = verify(books).problems
    assert len(problems) == 1
    assert "round 1 was released in two versions with the same noise" in problems[0]
    assert "by the runs of entries 2, 5 " in problems[0]


def test_bytes_of_another_stream_do_not_matter(books: Ledger) -> None:
    accounted_otherwise(books, "these bytes")
    session = Session(books, facts(stream="seeded b"), "two")
    session.reserve(0)
    session.commit(0, "other bytes")
    assert not session.differed


def test_rounds_that_the_ledger_does_not_know_are_charged(books: Ledger) -> None:
    session = Session(books, facts(), "old", 4)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 4)
    assert (session.rounds, session.redrawn) == (4, 0)
    secret = Session(books, facts(stream="secret"), "older", 4)
    assert (secret.rounds, secret.redrawn) == (4, 0)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 8)


def test_a_session_that_has_ended_reserves_nothing(books: Ledger) -> None:
    session = Session(books, facts(), "run")
    session.close()
    with pytest.raises(UserError, match="has ended"):
        session.reserve(0)


# One at a time

OTHER_PROCESS = """
import sys
from tests.unit.ledger.test_session import *

try:
    Session(open_ledger(Path(sys.argv[1])), facts(stream="seeded elsewhere"), "other").reserve(0)
    print("entered")
except UserError as refusal:
    print(refusal)
"""


def elsewhere(path: Path) -> str:
    other = forked.start(("-c", OTHER_PROCESS, path), path.parent, os.environ, "elsewhere")
    assert other.wait(60) == 0, other.err.read_text()
    return other.out.read_text()


@pytest.mark.system
def test_data_with_a_budget_have_one_writer(books: Ledger) -> None:
    grant(books, 10.0)
    session = Session(books, facts(), "one")
    refusal = elsewhere(books.path)
    assert f"is in use by process {os.getpid()} on " in refusal
    assert str(ACCOUNT) in refusal
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        grant(Ledger(books.path), 20.0)
    session.close()
    assert elsewhere(books.path) == "entered\n"


@pytest.mark.system
def test_without_a_budget_simulations_may_go_on_side_by_side(books: Ledger) -> None:
    session = Session(books, facts(), "one")
    session.reserve(0)
    assert elsewhere(books.path) == "entered\n"
    session.reserve(1)
    assert books.spent(ACCOUNT, "models", DELTA) == spent(POISSON, 3)


# Trainings


@pytest.fixture
def granted(blobs: Federated, ledger: Path) -> Ledger:
    """A ledger with ε = 3 for the clients of blobs."""
    books = open_ledger(ledger)
    account = Account(blobs.fingerprint(), "client")
    books.grant(account, "models", Budget(3.0, DELTA), "blobs", blobs.contents())
    return books


def account_of(blobs: Federated) -> Account:
    return Account(blobs.fingerprint(), "client")


def test_a_run_is_stopped_by_its_data_s_budget_and_saved(
    blobs: Federated, granted: Ledger, tmp_path: Path
) -> None:
    affordable = most_rounds(POISSON, Budget(3.0, DELTA), DIM, CLIENTS)
    with pytest.raises(BudgetError, match=f"Round {affordable + 1} of dp_fedavg") as refusal:
        train(POISSON, blobs, rounds=50, delta=DELTA, save=tmp_path / "a")
    result = refusal.value.result
    assert len(result.records) == affordable
    assert result.guarantee.epsilon == spent(POISSON, 50)  # of the plan: others may see the end
    assert result.records[-1].epsilon <= 3.0
    summary = json.loads((tmp_path / "a" / "summary.json").read_bytes())
    assert (summary["rounds"], summary["rounds_planned"]) == (affordable, 50)


def test_no_client_is_asked_for_a_round_that_is_refused(
    blobs: Federated, granted: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = algorithms.dp_fedavg(noise_multiplier=0.1, rate=0.5, steps=1)
    monkeypatch.delattr("fedveil.training.run.run_round")
    with pytest.raises(BudgetError, match="Round 1 of dp_fedavg"):
        train(loud, blobs, rounds=2, save=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_budget_is_kept_by_unsaved_runs_and_by_steps(blobs: Federated, granted: Ledger) -> None:
    with pytest.raises(BudgetError, match=r"Round \d\d? of"):
        train(POISSON, blobs, rounds=50, delta=DELTA)
    training = prepare(OTHER, blobs, rounds=50)
    with pytest.raises(BudgetError):
        training.step()
    granted.sync()
    assert granted.spent(account_of(blobs), "models", DELTA, 3.0) <= 3.0


def test_without_noise_nothing_is_trained_on_a_budget(
    blobs: Federated,
    granted: Ledger,
    plain_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with pytest.raises(BudgetError, match=r"no finite ε, since updates are not clipped"):
        train(plain_recipe, blobs, rounds=1)
    with pytest.raises(UserError, match="without noise would not be charged to it"):
        train(replace(POISSON, bound=ProbedClip()), blobs, rounds=1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("FEDVEIL_LEDGER", str(tmp_path / "another.sqlite"))
        with pytest.raises(UserError, match="would not be charged to it"):
            train(replace(POISSON, bound=ProbedClip()), blobs, rounds=1, ledger=granted.path)
    with pytest.raises(BudgetError, match="taken from these data without noise"):
        train(replace(POISSON, bound=ProbedClip(norm=1.0)), blobs, rounds=1)


def test_a_run_without_noise_that_goes_on_does_not_spoil_a_budget_for_ever(
    blobs: Federated, plain_recipe: Recipe, ledger: Path, tmp_path: Path
) -> None:
    stopping = iter(range(2))
    with pytest.raises(StopIteration):
        train(plain_recipe, blobs, rounds=9, save=tmp_path / "a", checkpoint_every=1,
              watch=lambda *_: next(stopping))  # fmt: skip
    books = open_ledger(ledger)
    books.grant(account_of(blobs), "models", Budget(3.0, DELTA), "blobs", blobs.contents())
    with pytest.raises(BudgetError, match="no finite ε"):
        resume(prepare(plain_recipe, blobs, rounds=9), tmp_path / "a")
    books.sync()
    assert books.spent(account_of(blobs), "models", DELTA) == 0.0


def test_a_budget_ends_a_run_that_went_on_unrecorded(
    blobs: Federated, plain_recipe: Recipe, ledger: Path, tmp_path: Path
) -> None:
    """It was set after the run had begun; other entries do not disturb it."""

    def set_a_budget(_: Training, record: Record) -> None:
        books = open_ledger(ledger)
        if record.round == 2:
            other = Account("cd" * 32, "client")
            books.grant(other, "models", Budget(3.0, DELTA), "other", "other")
        if record.round == 4:
            books.grant(account_of(blobs), "models", Budget(3.0, DELTA), "b", blobs.contents())
        books.close()

    for recipe, save in ((plain_recipe, tmp_path / "a"), (POISSON, None)):
        with pytest.raises(BudgetError, match="Round 5 was not run") as end:
            train(recipe, blobs, rounds=9, save=save, watch=set_a_budget)
        assert len(end.value.result.records) == 4
        for file in ledger.parent.iterdir():
            file.unlink()


@pytest.mark.parametrize("other", ["unit", "split", "order"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_budget_for_the_same_examples_in_another_way_ends_a_run_under_way(
    blobs: Federated, ledger: Path, tmp_path: Path, other: str, saved: bool
) -> None:
    """Whether the run is recorded in its own account or nowhere: no budget counts its rounds."""
    dealt = {
        "unit": blobs.by_example(),
        "split": replace(blobs, offsets=torch.tensor([0, 30, len(blobs.labels)])),
        "order": replace(blobs, inputs=blobs.inputs.flip(0), labels=blobs.labels.flip(0)),
    }[other]

    def set_a_budget(_: Training, record: Record) -> None:
        books = open_ledger(ledger)
        if record.round == 2:
            strange = Account("cd" * 32, "client")
            books.grant(strange, "models", Budget(3.0, DELTA), "other", "other")
        if record.round == 4:
            account = Account(dealt.fingerprint(), dealt.unit)
            books.grant(account, "models", Budget(3.0, DELTA), "b", dealt.contents())
        books.close()

    with pytest.raises(BudgetError, match=r"Round 5 (of dp_fedavg )?was not") as end:
        train(POISSON, blobs, rounds=9, save=tmp_path / "a" if saved else None, watch=set_a_budget)
    assert len(end.value.result.records) == 4


@pytest.mark.parametrize("name", ["recipe", "data", "key", "rounds"])
def test_what_was_enrolled_is_what_is_played(blobs: Federated, granted: Ledger, name: str) -> None:
    weaker = algorithms.dp_fedavg(noise_multiplier=0.1, rate=0.5, steps=1)
    other = {"recipe": weaker, "data": blobs.by_example(), "key": "0" * 64, "rounds": 3}
    training = prepare(POISSON, blobs, rounds=9)
    training.step()
    for owner in (training, training.spec):
        with pytest.raises(AttributeError):
            setattr(owner, name, other[name])
    training.spec = replace(training.spec, **{name: other[name]})
    with pytest.raises(UserError, match="were replaced after its enrolment"):
        training.step()
    assert training.session is not None
    training.session.close()


def test_a_refused_training_does_not_step_on_unrecorded(
    blobs: Federated, granted: Ledger, plain_recipe: Recipe
) -> None:
    training = prepare(plain_recipe, blobs, rounds=1)
    for _ in range(2):
        with pytest.raises(BudgetError, match="no finite ε"):
            training.step()


def test_no_audit_where_a_budget_stands(blobs: Federated, granted: Ledger) -> None:
    for data in (blobs, blobs.by_example()):
        with pytest.raises(UserError, match="an audit's rounds would not be charged to it"):
            place_canaries(POISSON, data, 20, "direction", 0)


def test_the_same_examples_dealt_out_anew_need_a_budget_of_their_own(
    blobs: Federated, granted: Ledger
) -> None:
    halves = replace(blobs, offsets=torch.tensor([0, 30, len(blobs.labels)]))
    turned = replace(blobs, inputs=blobs.inputs.flip(0), labels=blobs.labels.flip(0))
    for data in (halves, turned):
        with pytest.raises(UserError, match="A budget is set for these examples"):
            train(POISSON, data, rounds=1)
    with pytest.raises(UserError, match="A budget is set for these examples"):
        train(algorithms.dp_sgd(rate=0.5, noise_multiplier=1.0), blobs, rounds=1)
    train(POISSON, replace(blobs, inputs=blobs.inputs + 1), rounds=1)


def test_only_private_saved_runs_are_recorded_where_no_budget_stands(
    blobs: Federated, plain_recipe: Recipe, ledger: Path, tmp_path: Path
) -> None:
    train(POISSON, blobs, rounds=1)
    train(plain_recipe, blobs, rounds=1, save=tmp_path / "a")
    assert not ledger.exists()
    train(POISSON, blobs, rounds=2, save=tmp_path / "b")
    books = Ledger(ledger)
    assert books.spent(account_of(blobs), "models", DELTA) == spent(POISSON, 2)
    assert books.spent(account_of(blobs), "messages", DELTA) == math.inf


def test_a_ledger_can_be_named(blobs: Federated, ledger: Path, tmp_path: Path) -> None:
    train(POISSON, blobs, rounds=1, save=tmp_path / "a", ledger=str(tmp_path / "deep" / "own"))
    assert not ledger.exists()
    assert Ledger(tmp_path / "deep" / "own").accounts() == [account_of(blobs)]
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700


def test_where_the_ledger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_path(Path("a")) == Path("a")
    assert ledger_path(Path("~/a")) == Path.home() / "a"
    monkeypatch.setenv("FEDVEIL_LEDGER", "b")
    assert ledger_path() == Path("b")
    monkeypatch.delenv("FEDVEIL_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert ledger_path() == Path("/state/fedveil/ledger.sqlite")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert ledger_path() == Path("/home/someone/.local/state/fedveil/ledger.sqlite")


def test_an_equal_run_is_the_same_release(blobs: Federated, ledger: Path, tmp_path: Path) -> None:
    for name in "ab":
        train(POISSON, blobs, rounds=3, save=tmp_path / name)
    train(POISSON, blobs, rounds=3, seed=1, save=tmp_path / "c")
    books = Ledger(ledger)
    assert [len(stream.rounds) for stream in books.of(account_of(blobs))] == [3, 3]
    assert verify(books).problems == []


def test_the_books_are_balanced_by_verify(blobs: Federated, ledger: Path, tmp_path: Path) -> None:
    for name, recipe in {"a": POISSON, "b": FIXED}.items():
        train(recipe, blobs, rounds=3, save=tmp_path / name)
    verdict = verify(Ledger(ledger))
    assert (verdict.rounds, verdict.epsilons, verdict.problems) == (6, 2, [])


def test_an_entry_without_sense_is_refused(books: Ledger) -> None:
    with books.chain.writing():
        books.chain.add("reserve", {"run": 77, "round": 1})
    with pytest.raises(UserError, match=r"cannot be trusted: entry 2 is invalid\. Restore"):
        Ledger(books.path)


def test_verify_finds_a_wrong_epsilon(books: Ledger) -> None:
    session = Session(books, facts(), "run")
    played(session, 3)
    planned = facts().rounds
    session.end("models", planned, spent(POISSON, planned))
    session.end("models", planned, spent(POISSON, 2))
    (problem,) = verify(books).problems
    assert "dp_fedavg stated ε =" in problem
    assert f"its events give {spent(POISSON, planned):.6g}" in problem


def stated(books: Ledger, share: float, **accountant: int) -> None:
    """An `end` entry with a share of the ε of all planned rounds, by an accountant."""
    session, rounds = Session(books, facts(), "run"), facts().rounds
    played(session, 1)
    body = {"run": session._entry, "view": "models", "rounds": rounds, "redrawn": 0}
    said = {"of": "the plan", "limited": False, "epsilon": share * spent(POISSON, rounds)}
    with books.writing():
        books.chain.add("end", {**body, **said, **accountant})


def test_verify_notes_what_an_earlier_accountant_found(books: Ledger) -> None:
    """ε = 2.32655, where the present one gives 2.32667: the run was honest."""
    stated(books, 0.9999)
    stated(books, 0.9999, accountant=ACCOUNTANT + 1)
    verdict = verify(books)
    assert verdict.problems == []
    assert len(verdict.notes) == 2
    found = f"{spent(POISSON, facts().rounds):.6g}"
    assert f"by another version of the accountant; this one gives {found}" in verdict.notes[0]
    stated(books, 0.98)
    (problem,) = verify(books).problems
    assert "but its events give" in problem


def test_verify_holds_an_entry_to_the_accountant_that_wrote_it(books: Ledger) -> None:
    session = Session(books, facts(), "run")
    played(session, 1)
    session.end("models", facts().rounds, 0.9999 * spent(POISSON, facts().rounds))
    verdict = verify(books)
    assert (len(verdict.problems), verdict.notes) == (1, [])


def test_verify_accepts_more_than_the_events_give(books: Ledger) -> None:
    """As of an accountant that has become tighter since."""
    stated(books, 1.2)
    stated(books, 1.2, accountant=ACCOUNTANT)
    verdict = verify(books)
    assert (verdict.problems, verdict.notes) == ([], [])


REVISION = 1
NUMBERS = {
    "poisson": (algorithms.dp_fedavg(noise_multiplier=1.0, rate=0.1), 200),
    "rare": (algorithms.dp_fedavg(noise_multiplier=0.8, rate=1e-4), 200),
    "fixed size": (algorithms.dp_fedavg(noise_multiplier=2.0, clients=2), 20),
    "capped": (algorithms.dp_fedavg(noise_multiplier=2.0, rate=0.1, cap=3), 50),
    "correlated": (algorithms.dp_ftrl(noise_multiplier=4.0, clients=2, separation=4, bands=4), 20),
    "whole numbers": (algorithms.dp_norm_fedavg_discrete(rate=0.1, sigma=300.0, support=4000), 20),
}
FOUND = {
    "poisson": 9.971319691,
    "rare": 0.009997695716,
    "fixed size": 2.056681585,
    "capped": 1.652540423,
    "correlated": 2.824998464,
    "whole numbers": 0.5165877771,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_accountant_s_revision_names_its_numbers(name: str) -> None:
    """If a number changed on purpose, raise ledger.ACCOUNTANT and REVISION, and note it here."""
    recipe, rounds = NUMBERS[name]
    found = accounting.epsilon(recipe.spent(18, 40, rounds), DELTA)
    assert ACCOUNTANT == REVISION
    assert found == pytest.approx(FOUND[name], rel=TOLERANCE)


def test_verify_finds_a_statement_of_fewer_rounds_than_planned(books: Ledger) -> None:
    """Entries of versions that stated the rounds run so far still agree with their events."""
    session = Session(books, facts(), "run")
    played(session, 3)
    session.end("models", 3, spent(POISSON, 3))
    (problem,) = verify(books).problems
    assert f"stated 3 rounds, but {facts().rounds} were planned" in problem
    (end,) = [entry for entry in books.chain.entries() if entry.kind == "end"]
    with books.chain.writing():
        old = {key: value for key, value in end.body.items() if key not in ("of", "limited")}
        books.chain.add("end", old)
    assert verify(books).problems == [problem]


def test_verify_finds_rounds_that_no_budget_had_room_for(
    books: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(books, spent(POISSON, 3) * 1.001)
    monkeypatch.setattr(Session, "require", lambda self, round: None)
    session = Session(books, facts(), "run")
    played(session, 3)
    assert verify(books).problems == []
    session.reserve(3)
    (problem,) = verify(books).problems
    assert "under a budget of" in problem


def test_a_budget_below_what_was_spent_is_no_mistake_but_allows_nothing(books: Ledger) -> None:
    first = Session(books, facts(), "run")
    played(first, 3)
    grant(books, spent(POISSON, 1))
    assert verify(books).problems == []
    with pytest.raises(BudgetError):
        Session(books, facts(), "run").reserve(3)


def test_a_finished_training_does_not_step_on(blobs: Federated, tmp_path: Path) -> None:
    training = prepare(POISSON, blobs, rounds=3)
    finish(start(training, tmp_path / "a"))
    with pytest.raises(UserError, match="has ended"):
        training.step()
