"""Mistakes by which rounds would be counted nowhere, or ε be read without what it leaves out."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fedveil import algorithms, charging, training
from fedveil.commands import bench
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.privacy import session
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.ledger import Account, open_ledger
from fedveil.recipe import Recipe

from .making import Mutation, line, named, require_caught
from .test_tables import small

RECIPE: Recipe = algorithms.dp_fedavg(noise_multiplier=9.0, rate=0.5, steps=1)


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
        begun = training.prepare(RECIPE, small(), rounds=3, delta=1e-5)
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
    assert "A budget was set for" in said


def check_bench(patch: pytest.MonkeyPatch) -> None:
    """No rounds are timed on data with a budget."""
    data = small()
    begun = training.prepare(RECIPE, data, rounds=3, delta=1e-5)
    with tempfile.TemporaryDirectory() as name, patch.context() as inside:
        inside.setenv("FEDVEIL_LEDGER", f"{name}/l.sqlite")
        inside.setattr("fedveil.settings.prepare", lambda _: begun)
        granted(data, Path(name) / "l.sqlite")
        said = ""
        try:
            bench.bench(algorithm="dp_fedavg", dataset="digits", rounds=1)
        except UserError as refusal:
            said = str(refusal)
    assert "a benchmark's rounds would be counted nowhere" in said


MUTATIONS = [
    Mutation(
        "a new budget is looked for in one account",
        line(
            charging,
            "_refuse_on_new_budget",
            (" or ledger.kin(training.data.contents) is not None", ""),
        ),
        "a budget in another unit ends an unrecorded run",
        lambda: check_kin(saved=False),
    ),
    Mutation(
        "a recorded run asks for budgets of its own account alone",
        line(session.Session, "reserve", ("self._refuse_kin(round)", "pass")),
        "a budget in another unit ends a recorded run",
        lambda: check_kin(saved=True),
    ),
    Mutation(
        "a run does not say what its examples are",
        line(charging, "enrol", ("run, played, contents)", "run, played)")),
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
