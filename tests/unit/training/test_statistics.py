"""`fv.statistics` and `fedveil stats`: releases with error bars, charged to the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedveil as fv
from fedveil.accounting import accountant as accounting
from fedveil.aggregates.moments import NoisyEstimate
from fedveil.errors import UserError
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.session import BudgetError
from fedveil.ledger.verify import verify
from fedveil.privacy.calibrate import Budget
from fedveil.training import statistics
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, start
from fedveil.training.statistics import StatisticsReport


def visits(clients: int = 2000) -> pl.DataFrame:
    rng, who = np.random.default_rng(4), np.repeat(np.arange(clients), 3)
    return pl.DataFrame(
        {
            "who": [f"w{i}" for i in who],
            "age": rng.integers(20, 80, clients)[who],
            "cost": rng.lognormal(5, 1, len(who)).round(2),
            "ward": rng.choice(["A", "B", "C", "D"], len(who), p=[0.5, 0.3, 0.19, 0.01]),
        }
    )


def asked(folder: Path, epsilon: float = 2.0, **given: Any) -> StatisticsReport:
    return fv.statistics(visits(), "who", epsilon, ledger=folder / "l.sqlite", **given)


def test_every_kind_of_statistic_is_close(tmp_path: Path) -> None:
    found = asked(
        tmp_path, count=True, sum="cost", mean="age", quantiles="cost", histogram="age",
        frequent=["ward", "who"], ranges={"age": (0, 100), "cost": (0, 1000)}, most_rows=5,
    )  # fmt: skip
    by_kind = {(r.kind, r.column): r for r in found.releases}
    frame = visits()
    rows = by_kind["count", ""]
    assert abs(rows.values["rows"] - 6000) < 3 * rows.error
    ages, costs = frame["age"].to_numpy(), frame["cost"].to_numpy()
    age = by_kind["mean", "age"]
    assert abs(age.values["mean"] - ages.mean()) < 3 * age.error
    assert age.error < 3
    spent = by_kind["sum", "cost"]
    assert abs(spent.values["sum"] - costs.clip(0, 1000).sum()) < 3 * spent.error
    quantiles = by_kind["quantiles", "cost"].values
    assert np.mean(costs < quantiles["50%"]) == pytest.approx(0.5, abs=0.1)
    assert sum(by_kind["histogram", "age"].values.values()) == pytest.approx(2000, rel=0.1)
    assert set(by_kind["frequent", "ward"].values) >= {"A", "B", "C"}
    assert by_kind["frequent", "who"].values == {}
    assert "per client" in found.sentence
    assert found.to_frame().height > 20
    json.dumps(found.plain())


def test_error_bars_hold_for_most_seeds(tmp_path: Path) -> None:
    """95 % of draws are within; fewer than 20 of 25 have probability 1e-3, or 3/4 at half width."""
    table, within = visits(300), 0
    truth = table["age"].to_numpy().mean()
    given: dict[str, Any] = {"mean": "age", "ranges": {"age": (0, 100)}}
    for seed in range(25):
        ledger = tmp_path / "l.sqlite"
        (found,) = fv.statistics(table, "who", 0.5, seed=seed, ledger=ledger, **given).releases
        within += abs(found.values["mean"] - truth) <= found.error
    assert within >= 20


def test_a_release_is_charged_once_and_a_budget_refuses_more(tmp_path: Path) -> None:
    given = {"mean": "age", "ranges": {"age": (0, 100)}}
    first = asked(tmp_path, 1.0, **given)
    again = asked(tmp_path, 1.0, **given)
    assert first == again
    books = open_ledger(tmp_path / "l.sqlite")
    (account,) = books.accounts()
    assert len(books.of(account)) == 1
    assert 0.99 < books.spent(account, "models", first.delta) <= 1
    assert np.isinf(books.spent(account, "messages", first.delta))
    books.grant(account, "models", Budget(1.5, first.delta), "table", "0" * 64)
    books.close()
    with pytest.raises(BudgetError, match="would bring the spending on 'table' to ε"):
        asked(tmp_path, 1.0, **given, seed=1)
    books = Ledger(tmp_path / "l.sqlite")
    assert verify(books).problems == []
    books.close()


RANGED: dict[str, Any] = {"sum": "age", "ranges": {"age": (0, 100)}, "most_rows": 3}


@pytest.mark.parametrize("change", [
    lambda table: table.rename({"age": "cost", "cost": "age"}),
    lambda table: table.rename({"age": "cost", "cost": "age"}).select(table.columns),
    lambda table: table.with_columns(who=pl.col("who").replace({"007": "7"})),
])  # fmt: skip
def test_other_columns_and_names_are_another_release(tmp_path: Path, change: Any) -> None:
    """Cells that change places are the same account, and the same noise would show their sums."""
    table = visits().with_columns(who=pl.col("who").replace({"w7": "7", "w8": "007"}))
    ledger = tmp_path / "l.sqlite"
    for each in (table, change(table)):
        fv.statistics(each, "who", 1.0, ledger=ledger, **RANGED)
    books = open_ledger(ledger)
    (account,) = books.accounts()
    assert len(books.of(account)) == 2
    books.close()


def test_other_bytes_with_the_same_noise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(tmp_path, 1.0, **RANGED)
    found = NoisyEstimate(1.0, 1.0)  # as another version
    monkeypatch.setattr(statistics, "total", lambda *_: found)
    way_out = (
        "released before with other bytes.*or start a new run with another seed or with secret"
    )
    with pytest.raises(UserError, match=way_out):
        asked(tmp_path, 1.0, **RANGED)
    books = Ledger(tmp_path / "l.sqlite")
    assert verify(books).problems == []
    books.close()


@pytest.mark.parametrize("account", [None, "cohort"])
def test_a_budget_of_another_unit_refuses_statistics(tmp_path: Path, account: str | None) -> None:
    table = visits(100).with_row_index("visit")
    data = fv.load_table(table, "who", "ward", classes=["A", "B"], seed=3).split(fv.ByKey())
    for unit, client in ((data.by_example(), "who"), (data, "visit")):
        ledger = tmp_path / f"{client}.sqlite"
        books = open_ledger(ledger)
        budget, known = Budget(0.01, 1e-5), (unit.contents(), unit.resemblance())
        books.grant(Account.of(unit), "models", budget, "ehr", *known, books.people(unit))
        books.close()
        with pytest.raises(UserError, match="for another unit or split"):
            fv.statistics(table, client, 1.0, ledger=ledger, account=account, count=True)


def test_similar_data_with_a_budget_are_told(tmp_path: Path) -> None:
    books = open_ledger(tmp_path / "l.sqlite")
    data = fv.load_table(visits(100), "who", "ward", classes=["A", "B"]).by_example()
    books.grant(Account.of(data), "models", Budget(1.0, 1e-5), "ehr", "", data.resemblance())
    books.close()
    found = fv.statistics(
        visits(100).head(250), "who", 1.0, ledger=tmp_path / "l.sqlite", count=True
    )
    assert "They resemble 'ehr'" in found.note
    assert found.plain()["note"] == found.note


@pytest.mark.parametrize("wrong", [{"mean": "age"}, {"count": True, "ranges": {"age": (9, 1)}}])
def test_a_refused_request_charges_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="range"):
        asked(tmp_path, **wrong)
    assert not open_ledger(tmp_path / "l.sqlite").streams


def test_seeded_noise_is_said_to_be_simulated(tmp_path: Path) -> None:
    told = "Simulated: anyone who knows the seed can reproduce it."
    seeded, secure = (asked(tmp_path, noise=noise, count=True) for noise in ("seeded", "secure"))
    assert told in seeded.text()
    assert told not in secure.text()
    assert [each.plain()["noise"] for each in (seeded, secure)] == ["seeded", "secure"]


def prepared(folder: Path, seed: int = 0, **given: Any) -> Training:
    """A training on a table whose ranges and categories are learned with noise."""
    data = fv.load_table(
        visits(300), "who", "ward", classes=["A", "B"], stats_epsilon=1.0, stats_delta=1e-5,
        seed=seed,
    ).split(fv.ByKey())  # fmt: skip
    settings = {"rounds": 2, "epsilon": 2.0, "delta": 1e-5, "ledger": folder / "l.sqlite", **given}
    return prepare(fv.algorithms.dp_norm_fedavg(), data, "softmax", **settings)


def spent(folder: Path, delta: float = 1e-5) -> list[float]:
    books = Ledger(folder / "l.sqlite")
    found = [books.spent(account, "models", delta) for account in books.accounts()]
    assert verify(books).problems == []
    books.close()
    return found


def test_statistics_of_a_run_are_charged_before_they_are_written(tmp_path: Path) -> None:
    for folder in ("stopped", "whole"):
        (tmp_path / folder).mkdir()
    started = start(prepared(tmp_path / "stopped"), tmp_path / "stopped" / "run")
    started.close()  # stopped before its first round
    assert (tmp_path / "stopped" / "run" / "encoder.json").exists()
    statistics_alone = accounting.epsilon(started.recipe.statistics.event("zero-out"), 1e-5)  # type: ignore[union-attr]
    assert sum(spent(tmp_path / "stopped")) >= statistics_alone > 0.99
    finish(resume(prepared(tmp_path / "stopped"), tmp_path / "stopped" / "run"))
    finish(start(prepared(tmp_path / "whole"), tmp_path / "whole" / "run"))
    assert spent(tmp_path / "stopped") == spent(tmp_path / "whole")  # they are charged once
    assert spent(tmp_path / "whole")[0] <= 2.0


def test_statistics_beyond_a_budget_are_not_written(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    books = open_ledger(tmp_path / "l.sqlite")
    books.grant(first.spec.account, "models", Budget(2.2, 1e-5), "table", first.data.contents())
    books.close()
    for seed in range(4):
        try:
            start(prepared(tmp_path, seed), tmp_path / f"{seed}").close()
        except BudgetError:
            continue
    assert [(tmp_path / f"{seed}").exists() for seed in range(4)] == [True, False, False, False]
    assert spent(tmp_path)[0] <= 2.2


def test_loading_a_table_charges_nothing(tmp_path: Path) -> None:
    finish(start(prepared(tmp_path)))  # not saved, and without a budget
    assert not (tmp_path / "l.sqlite").exists()


def test_statistics_and_training_share_an_account(tmp_path: Path) -> None:
    asked(tmp_path, 1.0, count=True)
    data = fv.load_table(
        visits().with_columns(ill=pl.int_range(pl.len()) % 2), "who", "ill", classes=["0", "1"]
    )
    books = open_ledger(tmp_path / "l.sqlite")
    (account,) = books.accounts()
    assert account != Account.of(data.split(fv.ByKey()))  # one column more is other data
    books.close()
    same = fv.load_table(visits(), "who", "ward", classes=["A", "B", "C"]).split(fv.ByKey())
    assert account == Account.of(same)
