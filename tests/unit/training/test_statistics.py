"""`fv.statistics` and `fedveil stats`: releases with error bars, charged to the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedveil as fv
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.session import BudgetError
from fedveil.ledger.verify import verify
from fedveil.privacy.calibrate import Budget
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
    assert 0.99 < books.spent(account, "models", first.delta) <= 1.0001
    assert np.isinf(books.spent(account, "messages", first.delta))
    books.grant(account, "models", Budget(1.5, first.delta), "table", "0" * 64)
    books.close()
    with pytest.raises(BudgetError, match="would bring what is spent"):
        asked(tmp_path, 1.0, **given, seed=1)
    books = Ledger(tmp_path / "l.sqlite")
    assert verify(books).problems == []
    books.close()


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
