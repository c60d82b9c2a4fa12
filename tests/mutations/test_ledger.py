"""Mistakes about stopping, caps, parts of one's own and the ledger: each must be caught."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil import algorithms, recipe
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.comparing import costs
from fedveil.data.federated import Federated
from fedveil.data.origin import Origin
from fedveil.engines.totals import Total
from fedveil.errors import UserError
from fedveil.federation import reception
from fedveil.ledger import charging, session, stated, verify
from fedveil.ledger.chain import now
from fedveil.ledger.ledger import Account, Facts, Stream, open_ledger
from fedveil.parts.cohort import Cohort, Everyone
from fedveil.parts.memory import Memory
from fedveil.privacy import calibrate, statement
from fedveil.privacy import composition as together
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.guarantee import VIEWS, Rounds
from fedveil.testing.replay import people
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.comparing import test_costs
from tests.unit.federation import test_reception
from tests.unit.ledger import test_session, test_stopping, test_versions
from tests.unit.privacy import test_together
from tests.unit.privacy.test_strangers import SAMPLED, Fifth, Remembering, Shaped, Sure

DELTA, DIM, CLIENTS = 1e-5, 30, 100
SECAGG = algorithms.dp_norm_fedavg_secagg(25, sigma=30.0, support=400, cap=3)


# ------------------------------------------------------------------------- stopping


def started(data: Federated, place: Path, budget: float | None = None) -> Training:
    """A recorded run of six rounds, of which two are run."""
    training = prepare(SAMPLED, data, rounds=6, delta=DELTA, evaluate_every=1)
    if budget is not None:
        training.spec = replace(training.spec, budget=Budget(budget, DELTA))
    training.enrol(place / "ledger.sqlite", saved=True)
    for _ in range(2):
        training.step()
    return training


def epsilon_of(training: Training, rounds: int) -> float:
    spent = training.recipe.spent(training.task.dim, training.data.clients, rounds)
    return accounting.epsilon(spent, DELTA)


def check_plan_is_stated() -> None:
    """A run that is stopped states, records and lists the ε of its plan."""
    with tempfile.TemporaryDirectory() as place:
        training = started(people(12), Path(place))
        planned = epsilon_of(training, 6)
        assert training.guarantee().epsilon == planned
        assert training.records[-1].epsilon == epsilon_of(training, 2)
        assert training.records[-1].epsilon_planned == planned
        assert "6 planned, 2 run" in training.guarantee().sentence()
        assert dict(training.statement().entries())["Ledger"].startswith("Recorded")
        assert training.session is not None
        training.session.close()


def check_lost_rounds() -> None:
    """Rounds under another key of the run, which its state does not hold, come on top."""
    with tempfile.TemporaryDirectory() as place:
        books = open_ledger(Path(place) / "ledger.sqlite")
        plans = {view: together.plan(SAMPLED, DIM, CLIENTS, view) for view in VIEWS}
        common = (Account("f" * 64, "client"), "data", CLIENTS, "dp_fedavg")
        first = session.Session(books, Facts(*common, "secret a", 8, DELTA, plans), "run")
        for round in range(6):
            first.reserve(round)
        again = session.Session(books, Facts(*common, "secret b", 8, DELTA, plans), "run", 3)
        again.reserve(3)
        assert (again.redrawn, again.rounds) == (3, 7)
        copied = session.Session(books, Facts(*common, "secret c", 8, DELTA, plans), "run", 3)
        copied.reserve(3)
        again.ledger.sync()
        assert again.redrawn == 4  # the copy's round is one more release
        books.close()


def check_own_limit() -> None:
    """A run's own ε is kept by the one proof that its plan would choose."""
    capped = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.9, steps=1, cap=6)
    training = prepare(capped, people(12), rounds=8, delta=DELTA)
    size = (training.task.dim, 12)
    known, sampled = training.recipe.release(*size), training.recipe.event(*size)
    wanted, other = (
        accounting.epsilon(events.Composed(event, 9), DELTA) for event in (known, sampled)
    )
    assert other < wanted
    assert charging._own_epsilon(training.spec, 9, 3) == wanted


def check_verify() -> None:
    """An end that states fewer rounds than were planned is found."""
    with tempfile.TemporaryDirectory() as place:
        training = started(people(12), Path(place))
        assert training.session is not None
        training.session.end("models", 2, epsilon_of(training, 2))
        books = training.session.ledger
        assert any("were planned" in problem for problem in verify.verify(books).problems)
        training.session.close()


def check_limited_end() -> None:
    """A limit may not state less than what the run has drawn."""
    with tempfile.TemporaryDirectory() as place:
        training = started(people(12), Path(place))
        assert training.session is not None
        body = {"run": training.session._entry, "view": "models", "rounds": 6, "redrawn": 0}
        stated = {"of": "the plan", "limited": True, "epsilon": epsilon_of(training, 1)}
        books = training.session.ledger
        with books.writing():
            books.chain.add("end", {**body, **stated, "at": now()})
        assert verify.verify(books).problems
        training.session.close()


def check_accountant() -> None:
    """An entry is held to the accountant that wrote it, and another one's to about the same."""
    with tempfile.TemporaryDirectory() as place:
        for number, test in enumerate(
            (
                test_session.test_verify_holds_an_entry_to_the_accountant_that_wrote_it,
                test_session.test_verify_notes_what_an_earlier_accountant_found,
            )
        ):
            books = open_ledger(Path(place) / f"{number}.sqlite")
            try:
                test(books)
            except ValueError as missed:  # there is no problem to unpack
                raise AssertionError(str(missed)) from missed
            books.close()


def check_unrecorded() -> None:
    """A run that no ledger knows says so."""
    training = prepare(SAMPLED, people(12), rounds=1, delta=DELTA)
    training.step()
    told = dict(training.statement().entries())["Ledger"]
    assert told == "Not recorded: this run counts against no budget."


# ------------------------------------------------------------------------- caps


def check_caps() -> None:
    """What only the adversary keeps counts for nothing; what a trusted server keeps does."""
    free = replace(SECAGG, cohort=replace(SECAGG.cohort, cap=None))
    for view in ("sum", "messages"):
        assert SECAGG.spent(DIM, CLIENTS, 20, view) == free.spent(DIM, CLIENTS, 20, view)
        assert together.plan(SECAGG, DIM, CLIENTS, view) == together.plan(free, DIM, CLIENTS, view)
    spent = SECAGG.spent(DIM, CLIENTS, 20, "models")
    assert isinstance(spent, events.Either)
    assert min(way.count for way in spent.ways) == 3
    poisson = algorithms.dp_norm_fedavg_discrete(rate=0.1, sigma=300.0, support=4000, cap=4)
    attended = poisson.participation_mixture(DIM, CLIENTS, 50, "messages")
    assert attended is not None
    assert attended.most == 50


def check_assumed() -> None:
    """Who bounds a message towards a view must be somebody who is trusted there."""
    told = dict(statement.statement(SECAGG, DIM, CLIENTS, 5, DELTA).entries())["Assumptions"]
    assert "by its client itself, or in view models by the server on receipt" in told
    assert "no sum with noise from fewer than 25 honest clients" in told


def check_masked() -> None:
    """Whoever takes messages one by one has view messages, whatever the recipe says."""
    try:
        test_reception.opened(test_reception.MODULAR)
    except UserError:
        return
    raise AssertionError("a reception took messages of a recipe for view sum")


# ------------------------------------------------------------------------- strangers


def check_sampling() -> None:
    told = statement.statement(replace(SAMPLED, cohort=Fifth()), DIM, CLIENTS, 5, DELTA)
    assert dict(told.entries())["Sampling"].startswith("Fifth(")


def check_lost_cap() -> None:
    """After a crash a stranger's cap counts, and the lost rounds with it, in any account."""
    capped = replace(SAMPLED, cohort=Fifth(cap=2))
    lost, planned = charging.redrawn(capped, 3), together.plan(capped, DIM, CLIENTS, "models")
    for spent in (lost.spent(DIM, CLIENTS, 9), planned.redrawn(3).spent(9)):
        assert [way.count for way in spent.ways] == [9, 5]


def check_versions() -> None:
    """A round that is published in two versions is two releases, of the run and of the account."""
    with tempfile.TemporaryDirectory() as place:
        books = open_ledger(Path(place) / "ledger.sqlite")
        plans = {view: together.plan(SAMPLED, DIM, CLIENTS, view) for view in VIEWS}
        account = Account("f" * 64, "client")
        facts = Facts(account, "data", CLIENTS, "dp_fedavg", "seeded a", 8, DELTA, plans)
        one = session.Session(books, facts, "run")
        one.reserve(0)
        one.commit(0, "these bytes")
        assert one.repeats(0, "other bytes")
        one.commit(0, "other bytes")
        assert (one.rounds, one.redrawn) == (2, 1)
        spent = books.spent(account, "models", DELTA)
        books.close()
    assert spent == accounting.epsilon(SAMPLED.spent(DIM, CLIENTS, 2), DELTA)


def check_capped_versions() -> None:
    """The account of a capped, cyclic or correlated run costs what the run states."""
    for made in test_versions.RECIPES.values():
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDVEIL_LEDGER", str(Path(place) / "ledger.sqlite"))
            test_versions.test_the_account_of_versions_costs_at_least_what_the_run_states(
                made, people(12), Path(place) / "a", Path(place) / "ledger.sqlite", patch
            )


def in_own_ledger(test: Callable[..., None]) -> None:
    """Run a test with a ledger of its own."""
    context = pytest.MonkeyPatch.context
    with tempfile.TemporaryDirectory() as place, context() as patch, context() as during:
        patch.setenv("FEDVEIL_LEDGER", str(Path(place) / "ledger.sqlite"))
        try:
            test(people(12), Path(place), during)
        except pytest.fail.Exception as missed:
            raise AssertionError(str(missed)) from missed


def check_equal_run() -> None:
    in_own_ledger(test_versions.test_an_equal_run_in_the_ledger_pays_for_no_round_of_this_one)


def check_stale() -> None:
    """A copy of the ledger without the newest runs gives no total cost."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        ledger = Path(place) / "ledger.sqlite"
        patch.setenv("FEDVEIL_LEDGER", str(ledger))
        test_costs.test_a_stale_copy_gives_no_number(people(12), ledger, Path(place), patch)


def check_listed() -> None:
    in_own_ledger(test_stopping.test_a_run_with_versions_is_listed_with_what_it_will_state)


def check_at_once() -> None:
    in_own_ledger(
        test_versions.test_a_version_that_was_committed_since_the_last_entry_was_read_is_noticed
    )


def check_unpublished() -> None:
    """A version beyond the run's own ε is not published."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        held = test_stopping.test_versions_are_held_to_a_run_s_own_epsilon_before_they_are_published
        held(people(12), Path(place) / "a", patch)


def check_unasked() -> None:
    capped = replace(SAMPLED, cohort=Sure(cap=2))
    assert [way.count for way in capped.spent(DIM, CLIENTS, 9).ways] == [9, 2]


def check_memory() -> None:
    strange = replace(SAMPLED, memory=Remembering())
    assert isinstance(strange.event(DIM, CLIENTS), events.GaussianRelease)


def check_neighbours() -> None:
    assert together.covered(replace(SAMPLED, cohort=Fifth()), "models") == ("add-remove",)


def check_shares() -> None:
    assert replace(SAMPLED, noise=Shaped(3.0, "client")).noise_shares(CLIENTS, "models") == 1


# ------------------------------------------------------------------------- the ledger


def check_exclusions() -> None:
    """Data whose encoding was read from them without noise have no ε in the ledger."""
    fitted = Origin(exclusions=("the means of age",))
    planned = together.plan(SAMPLED, DIM, CLIENTS, "models", fitted)
    runs = [together.Charged(planned, 5, 1)]
    assert together.epsilon(runs, DELTA) == math.inf
    training = prepare(SAMPLED, people(12), rounds=1, delta=DELTA)
    strange = replace(training.data, origin=fitted)
    facts = charging.facts_of(replace(training.spec, data=strange))
    assert all(
        isinstance(facts.plans[view].ways[0].event, events.NonPrivate) for view in facts.plans
    )


def check_sampled_filter() -> None:
    for one, other, planned in test_together.KINDS[:2]:
        for reverse in (False, True):
            test_together.test_no_analyst_gets_more_out_of_sampled_releases_either(
                one, other, planned, reverse
            )


def check_precise_count() -> None:
    """The refusal of a small cohort's adaptive clip names what to change."""
    calibrate.calibrate.cache_clear()
    try:
        calibrate.calibrate(algorithms.dp_fedavg_adaptive(), Budget(2.0, DELTA), 20, DIM, 60)
    except UserError as problem:
        told = str(problem)
    assert "Give count_noise = " in told


def check_count() -> None:
    test_reception.test_honest_messages_make_the_loop_s_own_round(test_reception.WHOLE)
    test_reception.test_short_updates_are_counted_where_messages_are_whole_numbers()


def check_total() -> None:
    charge = charging.Charge(SAMPLED, Rounds(8, 5, 3), 8)
    assert charge.rounds == 11


def so_far(terms: charging.Terms, _: object, run: int) -> charging.Charge:
    """As it was: the rounds that happen to have been run."""
    return charging.Charge(terms.recipe, Rounds(run, run), run)


MUTATIONS = [
    Mutation("a stopped run states the rounds run", returning(charging, "charged", so_far),
             "plan is stated", check_plan_is_stated),
    Mutation("lost rounds are left out of the total",
             returning(charging.Charge, "rounds", property(lambda self: self.course.planned)),
             "total", check_total),
    Mutation("a copy's rounds are forgotten",
             returning(session.Session, "redrawn", property(lambda self: 3)),
             "lost rounds", check_lost_rounds),
    Mutation("the better proof of two limits a run",
             line(charging, "_own_epsilon",
                  ("    return epsilon(best.redrawn(lost), rounds)",
                   "    return min(epsilon(proof.redrawn(lost), rounds) for proof in proofs)")),
             "own limit", check_own_limit),
    Mutation("lost rounds do not come on top of a run's own cap",
             line(charging, "_own_epsilon", ("best.redrawn(lost)", "best")),
             "own limit", check_own_limit),
    Mutation("verify believes any number of rounds",
             line(verify, "_too_few", ('"of" in body and ', "False and ")),
             "verify", check_verify),
    Mutation("verify believes any limit",
             line(verify, "_recomputed",
                  ("max(_said(entry), accounting.epsilon(plan.spent(drawn), delta))",
                   "_said(entry)")),
             "limited end", check_limited_end),
    Mutation("verify takes every entry for one of another accountant",
             line(verify, "_judge", ('body.get("accountant") != ACCOUNTANT', "True")),
             "accountant", check_accountant),
    Mutation("verify takes any number of another accountant",
             line(verify, "_judge", ("found <= (1 + REFINED) * said", "True")),
             "accountant", check_accountant),
    Mutation("an unrecorded run says nothing",
             returning(charging, "recorded", lambda _: "recorded"),
             "unrecorded", check_unrecorded),
    Mutation("a cap counts in every view",
             line(recipe.Recipe, "max_participations",
                  ('(view or self.view) != "models"', "False")),
             "caps", check_caps),
    Mutation("a cap counts in no view",
             line(recipe.Recipe, "max_participations", ('(view or self.view) != "models"', "True")),
             "caps", check_caps),
    Mutation("fair coins count on the adversary's cap",
             line(recipe.Recipe, "participation_mixture",
                  ("max_participations(rounds, view)", 'max_participations(rounds, "models")')),
             "caps", check_caps),
    Mutation("the adversary may bound messages",
             returning(statement.Statement, "_bounding",
                       lambda _: "every message is bounded, by its client or by who receives it"),
             "assumed", check_assumed),
    Mutation("a reception takes masked messages",
             returning(reception, "_refuse_masked", lambda _: None), "masked", check_masked),
    Mutation("an unknown cohort is everyone",
             returning(Cohort, "describe", Everyone.describe),
             "sampling", check_sampling),
    Mutation("lost rounds do not raise a cap",
             returning(recipe.Recipe, "cap", property(lambda self: self.cohort.cap)),
             "lost cap", check_lost_cap),
    Mutation("lost rounds do not raise a cap in the ledger",
             line(together.Way, "redrawn", ("self.most + lost", "self.most")),
             "lost cap", check_lost_cap),
    Mutation("versions of a round are charged once",
             line(Stream, "charged", ("drawn + extra", "drawn")),
             "versions", check_versions),
    Mutation("versions of a round do not come on top of a cap or of correlated noise",
             line(Stream, "charged", ("plan.redrawn(extra) if extra else plan", "plan")),
             "versions over a cap", check_capped_versions),
    Mutation("an equal run pays for a run's own rounds",
             line(charging, "_keep_own_budget", ("session.drew(", "session.reserved(")),
             "equal run", check_equal_run),
    Mutation("two processes at once are not noticed",
             line(session.Session, "_committed", ("self._differs(round, digest)", "False")),
             "two processes at once", check_at_once),
    Mutation("a stale copy of the ledger has a total cost",
             line(costs, "_own_streams", ("ledger.check_trace(trace)", "pass")),
             "stale", check_stale),
    Mutation("a crashed run is listed with its plan",
             returning(stated, "redrawn", lambda *_: 0), "listed", check_listed),
    Mutation("versions of a round are stated once",
             returning(session, "repeated", lambda _: 0), "versions", check_versions),
    Mutation("versions of a round are published beyond a run's own ε",
             returning(session.Session, "repeats", lambda *_: False),
             "unpublished", check_unpublished),
    Mutation("a stranger says when its cap is reached",
             line(recipe.Recipe, "spent", ("() if foreign(self.cohort) else ", "")),
             "unasked", check_unasked),
    Mutation("an unknown memory is amplified",
             returning(Memory, "amplified", True),
             "memory", check_memory),
    Mutation("a stranger's removal is blanking out",
             line(together, "covered", ("any(map(foreign, parts))", "False")),
             "neighbours", check_neighbours),
    Mutation("the server tops up a stranger's noise",
             line(recipe.Recipe, "noise_shares", ("or self.noise.topped_up", "or True")),
             "shares", check_shares),
    Mutation("a fitted encoder is forgotten by the ledger",
             line(together, "_unnoised", ("if origin.exclusions", "if False")),
             "exclusions", check_exclusions),
    Mutation("a run does not tell the ledger where its data come from",
             line(charging, "facts_of", (", view, origin)", ", view)")),
             "exclusions", check_exclusions),
    Mutation("a sampled release counts a fifth in a filter",
             line(together, "_once",
                  ("_of_pure(accounting.subsampled(pure, rate), orders)",
                   "_of_pure(accounting.subsampled(pure, rate / 5), orders)")),
             "sampled filter", check_sampled_filter),
    Mutation("a count with too little noise is blamed on the budget",
             returning(calibrate, "_refuse_precise_count", lambda *_: None),
             "precise count", check_precise_count),
    Mutation("every update counts as long where messages are whole numbers",
             line(Total, "no_longer_than", ("return self.short or 0", "return 0")),
             "count", check_count),
    Mutation("a message need not say whether it was short",
             line(reception.Reception, "_refused",
                  ("self._told and not isinstance(message.short, bool)", "False")),
             "count", check_count),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_guard_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
