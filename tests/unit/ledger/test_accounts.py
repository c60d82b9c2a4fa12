"""Accounts: a budget follows people, not the bytes of one export of their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedveil import algorithms
from fedveil.commands.python import train
from fedveil.data.federated import Federated
from fedveil.data.partition import ByKey, Iid
from fedveil.data.save import save_federated
from fedveil.data.saved import open_federated
from fedveil.data.table import load_table
from fedveil.errors import UserError
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.resembling import resembling
from fedveil.ledger.session import BudgetError
from fedveil.privacy.calibrate import Budget
from fedveil.training.result import Result

DECLARED: dict[str, Any] = {
    "classes": ["0", "1"],
    "ranges": {"age": (0, 100)},
    "holdout": "rows",
}


def ehr(patients: int = 60) -> pl.DataFrame:
    rng, who = np.random.default_rng(0), np.repeat(np.arange(patients), 5)
    count = len(who)
    return pl.DataFrame(
        {
            "who": [f"p{i}" for i in who],
            "age": rng.integers(20, 90, count),
            "bmi": rng.normal(25, 3, count).round(1),
            "ill": rng.integers(0, 2, count),
        }
    )


def data(frame: pl.DataFrame) -> Federated:
    return load_table(frame, "who", "ill", **DECLARED).split(ByKey())


EXPORTS = {
    "shuffled rows": lambda frame: frame.sample(fraction=1, shuffle=True, seed=1),
    "other rows": lambda frame: frame.head(frame.height - 100),
    "other columns": lambda frame: frame.drop("bmi"),
    "other cells": lambda frame: frame.with_columns(bmi=pl.col("bmi") + 1),
}


def granted(path: Path, given: Federated, account: str | None = None) -> Ledger:
    books = open_ledger(path)
    sketches = given.resemblance(), books.people(given)
    budget = Budget(2.0, 1e-5)
    books.grant(Account.of(given, account), "models", budget, "ehr", given.contents(), *sketches)
    return books


def run(given: Federated, ledger: Path, save: Path, **more: Any) -> Result:
    recipe = algorithms.dp_fedavg(clip=1.0, rate=0.2, noise_multiplier=2.5)
    return train(recipe, given, "softmax", 4, save=save, ledger=ledger, diagnostics=False, **more)


def test_shuffled_rows_are_the_same_account() -> None:
    frame = ehr()
    mixed = frame.sample(fraction=1, shuffle=True, seed=1)
    assert Account.of(data(frame)) == Account.of(data(mixed))
    again = load_table(frame, "who", "ill", holdout="rows", seed=3, classes=["0", "1"])
    assert Account.of(data(frame)) == Account.of(again.split(ByKey()))  # encoding and hold-out


@pytest.mark.parametrize("export", list(EXPORTS)[1:])
def test_another_export_needs_the_name_of_an_account(tmp_path: Path, export: str) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr())).close()
    with pytest.raises(UserError, match="about clients of 'ehr'") as refused:
        run(data(EXPORTS[export](ehr())), ledger, tmp_path / "a")
    assert "name it with account" in str(refused.value)
    assert not (tmp_path / "a").exists()


def test_a_named_account_counts_every_export(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr()), "ehr").close()
    spent, ended = [], 0
    for number, frame in enumerate([ehr(), *(change(ehr()) for change in EXPORTS.values())] * 2):
        try:
            run(data(frame), ledger, tmp_path / f"{number}", account="ehr", seed=number)
        except BudgetError:
            ended += 1
        books = Ledger(ledger)
        spent.append(books.spent(Account.of(data(frame), "ehr"), "models", 1e-5, 2.0))
        books.close()
    assert spent == sorted(spent)
    assert spent[1] > spent[0]
    assert spent[-1] <= 2.0
    assert ended > 0


def test_a_saved_copy_is_about_the_same_people(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr())).close()
    other = load_table(ehr(), "who", "ill", **{**DECLARED, "seed": 1})
    save_federated(other.split(ByKey()), tmp_path / "copy")
    for given in (open_federated(tmp_path / "copy"), other.split(Iid(10))):
        with pytest.raises(UserError, match="about clients of 'ehr'"):
            run(given, ledger, tmp_path / "a")
    granted(tmp_path / "m.sqlite", open_federated(tmp_path / "copy")).close()
    with pytest.raises(UserError, match="about clients of 'ehr'"):
        run(data(ehr()), tmp_path / "m.sqlite", tmp_path / "b")


def test_other_clients_of_the_same_rows_need_a_budget(tmp_path: Path) -> None:
    ledger, frame = tmp_path / "l.sqlite", ehr().with_row_index("visit")
    granted(ledger, data(frame)).close()
    others = load_table(frame, "visit", "ill", classes=["0", "1"], columns=["age"])
    save_federated(others.split(ByKey()), tmp_path / "copy")
    with pytest.raises(UserError, match="for another unit or split"):
        run(others.split(ByKey()), ledger, tmp_path / "a")
    with pytest.raises(UserError, match="about clients of 'ehr'"):
        run(open_federated(tmp_path / "copy"), ledger, tmp_path / "a")


def test_other_people_have_their_own_account(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr())).close()
    others = ehr().with_columns(who="q" + pl.col("who"), age=pl.col("age") + 1)
    run(data(others), ledger, tmp_path / "a")


@pytest.mark.parametrize("export", EXPORTS)
def test_a_budget_on_a_named_account_covers_exports_without_a_name(
    tmp_path: Path, export: str
) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr()), "ehr").close()
    with pytest.raises(UserError, match=r"clients of ehr .*Charge the run to it: account ehr"):
        run(data(EXPORTS[export](ehr())), ledger, tmp_path / "a")


@pytest.mark.parametrize("export", EXPORTS)
def test_a_second_account_of_the_same_people_needs_a_budget(tmp_path: Path, export: str) -> None:
    ledger, other = tmp_path / "l.sqlite", data(EXPORTS[export](ehr()))
    granted(ledger, data(ehr()), "ehr").close()
    with pytest.raises(UserError, match="a second account study on purpose, set its budget first"):
        run(other, ledger, tmp_path / "a", account="study")
    assert not (tmp_path / "a").exists()
    granted(ledger, other, "study").close()
    run(other, ledger, tmp_path / "b", account="study")


def test_people_of_a_later_run_belong_to_the_account(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr(30)), "ehr").close()
    later = ehr().filter(pl.col("who").str.slice(1).cast(int) >= 30)
    run(data(later), ledger, tmp_path / "a", account="ehr")
    with pytest.raises(UserError, match="clients of ehr"):
        run(data(later.drop("bmi")), ledger, tmp_path / "b")


def test_reappearing_clients_are_told(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr()), "ehr").close()
    told = resembling(data(EXPORTS["other cells"](ehr())), "another study", ledger)
    assert "about 100% of the rows or clients are the same" in told
    assert resembling(data(ehr()), "ehr", ledger) == ""


def test_two_accounts_of_the_same_people_are_told(tmp_path: Path) -> None:
    ledger = tmp_path / "l.sqlite"
    granted(ledger, data(ehr())).close()
    granted(ledger, data(EXPORTS["other cells"](ehr())), "ehr").close()
    told = resembling(data(EXPORTS["other cells"](ehr())), "ehr", ledger)
    assert "About 100% of these clients also have the account" in told
    assert "is not counted in the account ehr" in told
    others = ehr().with_columns(who="q" + pl.col("who"), age=pl.col("age") + 1)
    granted(ledger, data(others), "others").close()
    assert resembling(data(others), "others", ledger) == ""


def test_names_are_kept_as_hashes_of_one_ledger(tmp_path: Path) -> None:
    one, two = (granted(tmp_path / name, data(ehr())) for name in ("a.sqlite", "b.sqlite"))
    mine, theirs = one.people(data(ehr())), two.people(data(ehr()))
    assert len(mine) == len(theirs) == 60
    assert not set(mine) & set(theirs)
    assert "p17" not in (tmp_path / "a.sqlite").read_bytes().decode("latin1")
    one.close()
    two.close()
