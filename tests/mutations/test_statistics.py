"""Mistakes in statistics with noise, each made on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedveil import recipe as recipes
from fedveil.accounting import accountant
from fedveil.aggregates import desk, frequent, histogram
from fedveil.algorithms import dp_fedavg
from fedveil.data import origin, rows, table
from fedveil.errors import UserError
from fedveil.ledger import charging, session
from fedveil.parts import statistics
from fedveil.privacy import composition
from fedveil.training import prepare
from tests.mutations.making import Mutation, in_folder, line, named, require_caught, returning
from tests.unit.accounting import test_first
from tests.unit.aggregates import test_desk, test_frequent
from tests.unit.data import test_learning
from tests.unit.training import test_statistics as released


def check_passing() -> None:
    """A value of one unit passes as rarely as stated."""
    for precision, escape in itertools.product((4.0, 0.0004), (1e-2, 1e-6)):
        test_frequent.test_no_table_of_one_unit_passes_more_often_than_stated(precision, escape, 3)


def check_short() -> None:
    test_desk.test_no_unit_contributes_more_than_one()
    test_desk.test_one_unit_changes_only_its_own_contribution()


def refused(work: Callable[[], Any]) -> None:
    try:
        work()
    except UserError:
        return
    raise AssertionError("it was not refused")


def check_long() -> None:
    long = desk.Contributions(np.zeros(2, np.int64), np.arange(2), np.array([0.8, 0.7]))
    refused(lambda: test_desk.desk().sums(long, 2, 0.1))


def check_limit() -> None:
    refused(lambda: test_desk.desk(1.0).sums(test_desk.one(1.0), 1, 1.1))


def check_noise() -> None:
    noise = test_desk.desk(0.04).sums(test_desk.one(0.0), 40_000, 0.04) / desk.GRID
    assert abs(noise.std() / 5 - 1) < 0.02


def check_recipe() -> None:
    """Statistics are in the ε of a run, in every view."""
    plain = dp_fedavg(clip=1.0, rate=0.1, noise_multiplier=1.0)
    told = recipes.replace(plain, statistics=statistics.Statistics(3.0, 1e-7))
    one, two = (accountant.epsilon(r.spent(10, 100, 5), 1e-5) for r in (plain, told))
    assert two > 1.01 * one
    assert "contributes to the statistics" in str(told.release(10, 100, "messages"))


def check_splitting() -> None:
    test_learning.test_made_up_clients_are_not_covered()
    test_learning.test_an_example_pays_for_a_replaced_client()


def check_other_bytes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        in_folder(released.test_other_bytes_with_the_same_noise_are_refused, patch)()


def renamed(table: pl.DataFrame) -> pl.DataFrame:
    return table.rename({"age": "cost", "cost": "age"})


def merged(table: pl.DataFrame) -> pl.DataFrame:
    return table.with_columns(who=pl.col("who").replace({"007": "7"}))


ANOTHER = released.test_other_columns_and_names_are_another_release
MUTATIONS = [
    Mutation(
        "statistics of several labels share noise",
        line(table, "_encoder", ("run_key(options, rows.", "run_key(rows.")),
        "only one request has the same noise",
        test_learning.test_only_one_request_has_the_same_noise,
    ),
    Mutation(
        "noise of the seed and the cost",
        line(table, "keyed", ("seed, subject, allowance", "seed, allowance")),
        "a missing label changes all noise",
        test_learning.test_a_missing_label_changes_all_noise,
    ),
    Mutation(
        "a second draw that is equal is free",
        line(prepare, "_noise_of", ("(name,) if name else ()", "()")),
        "a second draw is a second release",
        test_learning.test_a_second_draw_is_a_second_release_even_if_it_is_equal,
    ),
    Mutation(
        "the name of the noise is a hash of the data",
        line(table, "_name_of", ("run_key(options, ", "run_key(noise.key, ")),
        "the name of the noise is public",
        test_learning.test_the_name_of_the_noise_is_public,
    ),
    Mutation(
        "noise that ignores the header",
        line(rows, "content_of", ("[client, *frame.columns]", "[client]")),
        "other columns are another release",
        in_folder(ANOTHER, renamed),
    ),
    Mutation(
        "noise that takes two clients for one",
        line(rows, "content_of", ("names_of(frame[client]), ", "")),
        "other names are another release",
        in_folder(ANOTHER, merged),
    ),
    Mutation(
        "other bytes with the same noise",
        line(session.Session, "commit", ("if once", "if False")),
        "other bytes are refused",
        check_other_bytes,
    ),
    Mutation(
        "statistics are written before they are charged",
        returning(charging, "reserve_statistics", lambda *_: None),
        "statistics are charged before they are written",
        in_folder(released.test_statistics_of_a_run_are_charged_before_they_are_written),
    ),
    Mutation(
        "statistics are written beyond a budget",
        returning(charging, "reserve_statistics", lambda *_: None),
        "statistics beyond a budget are not written",
        in_folder(released.test_statistics_beyond_a_budget_are_not_written),
    ),
    Mutation(
        "a threshold for one value only",
        line(frequent, "threshold", ("math.log1p(-escape) / counts", "math.log1p(-escape)")),
        "values of one unit pass rarely",
        check_passing,
    ),
    Mutation(
        "a threshold without the unit's own weight",
        line(frequent, "threshold", ("1 / np.sqrt(counts) + ", "")),
        "values of one unit pass rarely",
        check_passing,
    ),
    Mutation(
        "all values of a unit count",
        line(frequent, "spread", ("- first < most", "- first < len(unit)")),
        "values of one unit pass rarely",
        check_passing,
    ),
    Mutation(
        "a whole vote for each value",
        line(frequent, "spread", ("1 / np.sqrt(sizes[unit])", "np.ones(len(unit))")),
        "no contribution is longer than 1",
        check_short,
    ),
    Mutation(
        "rows instead of shares",
        line(histogram, "shares", ("times / rows[unit]", "1.0 * times")),
        "no contribution is longer than 1",
        check_short,
    ),
    Mutation(
        "shares of all rows",
        line(histogram, "shares", ("times / rows[unit]", "times / rows.max()")),
        "one unit changes its own contribution only",
        check_short,
    ),
    Mutation(
        "long contributions pass",
        line(desk.Contributions, "whole", ("(squares > GRID * GRID).any()", "False")),
        "a long contribution is refused",
        check_long,
    ),
    Mutation(
        "less noise than stated",
        line(desk.Desk, "sums", ("rounded_gaussian(GRID", "rounded_gaussian(0.9 * GRID")),
        "noise has its deviation",
        check_noise,
    ),
    Mutation(
        "a desk without a limit",
        line(desk.Desk, "_spend", ("more > slack", "False and more > slack")),
        "a desk refuses to overspend",
        check_limit,
    ),
    Mutation(
        "only what was used is charged",
        line(
            desk.Desk,
            "spent",
            ("1 / math.sqrt(self.allowance.precision)", "1 / math.sqrt(self.precision)"),
        ),
        "the whole allowance is charged",
        test_desk.test_what_is_charged_does_not_depend_on_what_was_asked,
    ),
    Mutation(
        "replacing counts as removing",
        line(statistics.Statistics, "event", ('adjacency != "replace-one"', "True")),
        "replacing a unit counts for more",
        test_first.test_replacing_a_unit_counts_for_more,
    ),
    Mutation(
        "statistics are free",
        line(recipes.Recipe, "_first", ("besides is None", "self.evaluation is None")),
        "statistics are in the ε of a run",
        check_recipe,
    ),
    Mutation(
        "statistics in front of the adversary",
        line(recipes.Recipe, "_exposed", ("if self.statistics is not None and", "if False and")),
        "no guarantee where the server is the adversary",
        check_recipe,
    ),
    Mutation(
        "one charge for several runs",
        line(composition, "epsilon", ("first.plan.first is None and ", "")),
        "every run pays",
        test_first.test_every_run_pays_for_its_own_first_release,
    ),
    Mutation(
        "the aside of statistics is forgotten",
        line(
            accountant,
            "_loss",
            (
                "Aside(_composed(release, count, by.ratio), escape, distance)",
                "_composed(release, count, by.ratio)",
            ),
        ),
        "a first release and rounds are one Gaussian, plus the aside",
        test_first.test_a_first_release_and_gaussian_rounds_are_one_gaussian,
    ),
    Mutation(
        "made-up clients are covered",
        line(origin.Origin, "split", ("(*self.exclusions, *self.released)", "self.exclusions")),
        "statistics are for the clients of the data",
        check_splitting,
    ),
    Mutation(
        "examples pay as clients do",
        line(origin.Origin, "by_example", ("self.statistics.of_examples()", "self.statistics")),
        "an example pays for a replaced client",
        check_splitting,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
