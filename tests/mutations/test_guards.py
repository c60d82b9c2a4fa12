"""Mistakes by which rounds would be counted nowhere, or ε be read without what it leaves out."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.commands import bench, runs
from fedveil.commands import comparison_table as table
from fedveil.commands import plan_output as show
from fedveil.comparing.members import planned
from fedveil.comparing.outcome import ACCURACY, MemberResult
from fedveil.data.federated import Federated
from fedveil.data.origin import MARK, REAL, SIMULATED, Origin
from fedveil.errors import UserError
from fedveil.ledger import charging, session
from fedveil.ledger.ledger import Account, open_ledger
from fedveil.planning import facts, plan
from fedveil.privacy.calibrate import Budget
from fedveil.recipe import Recipe
from fedveil.runs import listing
from fedveil.training.prepare import prepare
from fedveil.training.settings import read_settings
from fedveil.training.start import train
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.mutations.test_tables import small

RECIPE: Recipe = algorithms.dp_fedavg(noise_multiplier=9.0, rate=0.5, steps=1)
DIGITS = {"data": {"dataset": "digits"}, "epsilon": 3.0}


def granted(data: Federated, ledger: Path) -> None:
    """A budget for data, in their own unit and split."""
    books = open_ledger(ledger)
    account = Account(data.fingerprint(), data.unit)
    books.grant(account, "models", Budget(3.0, 1e-5), data.name, data.contents())
    books.close()


def check_kin(saved: bool) -> None:
    """A budget for single examples ends a run on their clients, recorded or not."""
    with tempfile.TemporaryDirectory() as name:
        ledger = Path(name) / "l.sqlite"
        begun = prepare(RECIPE, small(), rounds=3, delta=1e-5)
        begun.enrol(ledger, saved=saved)
        begun.step()
        granted(small().by_example(), ledger)
        said = ""
        try:
            begun.step()
        except UserError as refusal:
            said = str(refusal)
        if begun.session is not None:
            begun.session.close()
    assert "a budget was set for" in said


def check_bench(patch: pytest.MonkeyPatch) -> None:
    """No rounds are timed on data with a budget."""
    data = small()
    begun = prepare(RECIPE, data, rounds=3, delta=1e-5)
    with tempfile.TemporaryDirectory() as name, patch.context() as inside:
        inside.setenv("FEDVEIL_LEDGER", f"{name}/l.sqlite")
        inside.setattr("fedveil.training.settings.from_settings", lambda _: begun)
        granted(data, Path(name) / "l.sqlite")
        said = ""
        try:
            bench.bench(algorithm="dp_fedavg", dataset="digits", rounds=1)
        except UserError as refusal:
            said = str(refusal)
    assert "a benchmark's rounds would not be charged to it" in said


def check_plan() -> None:
    """A plan for made-up clients has an ε with a footnote."""
    known = facts.PublicFacts(
        2, 2.0, "client", 1, data=replace(small(), origin=Origin(True, ("a",)))
    )
    assert known.origin == Origin(True, ("a",))
    assert replace(known, unit="example").origin == Origin(False, ("a",))
    made = plan.make(read_settings(None, DIGITS), plan.PlanOptions())
    assert MARK in show.privacy(made)
    assert any(MARK in text and "simulated" in text for _, text in show.lines(made))


def check_listed() -> None:
    """A run's origin comes from its summary to the tables; a run that goes on has none yet."""
    with tempfile.TemporaryDirectory() as name:
        played = train(
            RECIPE, replace(small(), origin=SIMULATED), rounds=1, delta=1e-5, save=Path(name) / "a"
        )
        run = listing.listed(Path(name) / "a")
        assert played.guarantee.origin == run.origin == SIMULATED
        assert MARK in runs._numbers(run)[2]
        (Path(name) / "a" / "summary.json").unlink()
        assert listing.listed(Path(name) / "a").origin.mark


def check_table() -> None:
    """A member's ε, and the sum of all, are marked."""
    standing = MemberResult("a", "a", {}, ("a-s0",), (0,), (0.5,), (1.0,), mean=0.5, epsilon=2.0)
    standing = replace(standing, origin=SIMULATED)
    cost = dict.fromkeys(("epsilon", "delta", "account"), 1.0)
    told = table._total_cost(
        {
            **cost,
            "runs": 1,
            "view": "",
            "adjacency": "",
            "others": 0,
            "unrecorded": 0,
            "reason": "of a leak",
        },
        standing.origin.mark,
    )
    assert MARK in told
    assert "because of a leak" in told
    comparison = planned([], ["dp_fedavg"], DIGITS, [], [0])
    assert any(MARK in text for _, text in table.notes(comparison, [standing], ACCURACY, None))
    (cell,) = table.table(comparison, [standing], ACCURACY).columns[-1].cells
    assert MARK in str(cell)


MUTATIONS = [
    Mutation(
        "a plan takes all clients for real ones",
        returning(facts.PublicFacts, "origin", REAL),
        "a plan is marked",
        check_plan,
    ),
    Mutation(
        "a plan's guarantee does not know its data",
        line(plan, "make", ("origin=known.origin,", "")),
        "a plan is marked",
        check_plan,
    ),
    Mutation(
        "a plan's mark has no footnote",
        line(show, "lines", ("plan.guarantee.origin.mark:", "False:")),
        "a plan is marked",
        check_plan,
    ),
    Mutation(
        "a run is listed as if its clients were real",
        line(listing, "_ended", ('Origin.from_plain(privacy.get("origin"))', "REAL")),
        "lists are marked",
        check_listed,
    ),
    Mutation(
        "a run that has not ended is listed as if its clients were real",
        line(listing, "_unfinished", ("origin=PENDING,", "")),
        "lists are marked",
        check_listed,
    ),
    Mutation(
        "lists show ε alone",
        line(runs, "_numbers", ("{run.origin.mark}", "")),
        "lists are marked",
        check_listed,
    ),
    Mutation(
        "a comparison shows ε alone",
        line(table, "_epsilon", ("{s.origin.mark}", "")),
        "comparisons are marked",
        check_table,
    ),
    Mutation(
        "a comparison has no footnote",
        line(table, "notes", ('lines.append(("Note", note))', "pass")),
        "comparisons are marked",
        check_table,
    ),
    Mutation(
        "all runs together show ε alone",
        line(table, "_total_cost", ("{rounded_up(cost['epsilon'])}{mark}", "{cost['epsilon']}")),
        "comparisons are marked",
        check_table,
    ),
    Mutation(
        "a new budget is looked for in one account",
        line(
            charging,
            "_refuse_on_new_budget",
            (" or ledger.related_budget(contents) is not None", ""),
        ),
        "a budget in another unit ends an unrecorded run",
        lambda: check_kin(saved=False),
    ),
    Mutation(
        "a recorded run asks for budgets of its own account alone",
        line(session.Session, "reserve", ("self._refuse_related(round)", "pass")),
        "a budget in another unit ends a recorded run",
        lambda: check_kin(saved=True),
    ),
    Mutation(
        "a run does not say what its examples are",
        line(charging, "_session", ("run, completed, contents)", "run, completed)")),
        "a budget in another unit ends a recorded run",
        lambda: check_kin(saved=True),
    ),
    Mutation(
        "a benchmark on any data",
        line(bench, "bench", ('refuse_on_budget(training.data, "a benchmark\'s rounds")', "pass")),
        "no benchmark where a budget stands",
        lambda: check_bench(pytest.MonkeyPatch()),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
