"""Mistakes in private evaluation, each made on purpose."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fedveil import recipe as recipes
from fedveil.aggregates import desk, outcomes
from fedveil.aggregates.allowance import Allowance
from fedveil.errors import UserError
from fedveil.ledger import charging, session
from fedveil.training import prepare, private_evaluation, run
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.unit.aggregates import test_outcomes
from tests.unit.training import test_private_evaluation as tested


def check_short() -> None:
    """Contributions of odd values, and of many examples, are not longer than 1."""
    for kind in test_outcomes.MAKERS:
        odd = np.array(test_outcomes.ODD)
        zeros = np.zeros(len(odd), np.int64)
        test_outcomes.check_short(kind, odd, zeros, zeros)
        test_outcomes.check_short(kind, odd, zeros, zeros + 1)
    test_outcomes.test_units_count_once()


def check_numbers() -> None:
    for weight in (math.nan, 2.0**50):
        given = desk.Contributions(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([weight]))
        try:
            with np.errstate(invalid="ignore"):
                desk.Desk(Allowance(1.0, 0.0), np.random.default_rng(0)).sums(given, 1, 1.0)
        except UserError:
            continue
        raise AssertionError("it was not refused")


def check_coverage() -> None:
    test_outcomes.test_intervals_cover_the_true_mean(200, 25.0, 0.8)
    test_outcomes.test_intervals_cover_the_true_mean(2000, 0.0004, 0.9)


def check_apart() -> None:
    """A model that mixes its batch sees one client at a time."""
    with pytest.MonkeyPatch.context() as patch:
        tested.test_one_client_moves_every_table_by_at_most_one(-5.0, "mixing", 2, patch)


def check_exact() -> None:
    with pytest.MonkeyPatch.context() as patch:
        tested.test_no_result_is_computed_without_noise(patch)


def check_stopped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        tested.test_a_stopped_run_spends_no_more_than_planned(patch)


def check_paid() -> None:
    training = tested._prepared(**tested.LOUD)
    spent = training.recipe.spent(8, 40, 4)
    without = recipes.replace(training.recipe, evaluation=None).spent(8, 40, 4)
    assert spent != without
    assert "contributes to an evaluation" in str(training.recipe.release(8, 40, "messages"))


def check_planned() -> None:
    tested.test_all_evaluations_together_have_their_epsilon()


def check_adjacency() -> None:
    tested.test_the_epsilon_of_evaluations_is_that_of_the_adjacency(tested.FixedSize(20))


def check_versions() -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVEIL_LEDGER", str(Path(place) / "ledger.sqlite"))
        require = tested.test_no_round_is_evaluated_in_two_versions_after_a_crash
        try:
            require(Path(place), patch)
        except pytest.fail.Exception as missed:
            raise AssertionError(str(missed)) from missed


def check_noise() -> None:
    tested.test_different_releases_never_share_noise()


def without_labels(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, private_evaluation, "identity", ("digest(test.labels), ", ""))
    patch.setattr(prepare, "evaluated_on", private_evaluation.identity)


def with_the_number_of_evaluations(patch: pytest.MonkeyPatch) -> None:
    counted = "str(plan).replace(str(plan.rounds), str(len(plan.rounds)))"
    mutate(patch, private_evaluation, "identity", ("str(plan)", counted))
    patch.setattr(prepare, "evaluated_on", private_evaluation.identity)


def check_beyond() -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            tested.test_nothing_is_trained_or_evaluated_beyond_the_plan(patch)
        except pytest.fail.Exception as failure:
            raise AssertionError(failure.msg) from None


def without_plan(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, prepare, "prepare", ("evaluated_on(plan, data)", "()"))
    patch.setattr(tested, "prepare", prepare.prepare)


MUTATIONS = [
    Mutation(
        "a NaN loss as it is",
        line(outcomes, "unit_interval", ("np.nan_to_num(np.asarray(values, dtype=np.float64), "
                                         "nan=1.0)", "np.asarray(values, dtype=np.float64)")),
        "no unit is longer than 1",
        check_short,
    ),
    Mutation(
        "losses above their limit",
        line(outcomes, "unit_interval", (", 0.0, 1.0)", ", 0.0, 3.0)")),
        "no unit is longer than 1",
        check_short,
    ),
    Mutation(
        "the moments of a row are taken for shorter than they are",
        line(outcomes, "moments", ("1 / math.sqrt(3)", "1 / 2")),
        "no unit is longer than 1",
        test_outcomes.test_the_longest_contribution_of_every_table_is_one,
    ),
    Mutation(
        "a unit counts by its examples",
        line(outcomes.Outcomes, "shares", (" / (rows[unit] *", " / (rows.min() *")),
        "no unit is longer than 1",
        check_short,
    ),
    Mutation(
        "a wrong answer counts twice in full",
        line(outcomes, "by_class", ("np.where(hit, 1.0, 0.5)", "np.where(hit, 1.0, 1.0)")),
        "no unit is longer than 1",
        check_short,
    ),
    Mutation(
        "three numbers of an example in full",
        line(outcomes, "moments", ("weights / 3", "weights")),
        "no unit is longer than 1",
        check_short,
    ),
    Mutation(
        "weights that are no numbers",
        line(desk.Contributions, "whole", ("not (np.abs(self.weight) <= LONGEST).all()", "False")),
        "the desk refuses them",
        check_numbers,
    ),
    Mutation(
        "an interval without the choice of units",
        line(outcomes, "share", ("max(table.units, 1.0) * theta * (1 - theta)", "0.0")),
        "intervals cover the truth",
        check_coverage,
    ),
    Mutation(
        "an interval without the noise",
        line(outcomes, "share", ("table.sigma**2 * ((1", "0.01 * ((1")),
        "intervals cover the truth",
        check_coverage,
    ),
    Mutation(
        "all clients in one call of the module",
        line(private_evaluation, "_batches", ("if together:", "if True:")),
        "a client moves its own contribution only",
        check_apart,
    ),
    Mutation(
        "an exact evaluation beside the noisy one",
        line(run.Training, "_record", ("self.spec.evaluation is not None", "False")),
        "nothing is computed without noise",
        check_exact,
    ),
    Mutation(
        "evaluations outside the accounting",
        line(recipes.Recipe, "_first", ("besides is None", "self.statistics is None")),
        "the recipe's ε has them",
        check_paid,
    ),
    Mutation(
        "evaluations that a server may see",
        line(recipes.Recipe, "_exposed", ("self.evaluation is not None and", "False and")),
        "the recipe's ε has them",
        check_paid,
    ),
    Mutation(
        "every evaluation as precise as the final one",
        line(private_evaluation.EvaluationPlan, "precision", (" if final else", " if True else")),
        "all together have their ε",
        check_planned,
    ),
    Mutation(
        "a stop that repeats the final evaluation's precision",
        line(
            private_evaluation.EvaluationPlan, "precision",
            ("FINAL * self.whole if", "self.whole if"),
        ),
        "a stopped run spends what was planned",
        check_stopped,
    ),
    Mutation(
        "replacing a client as removing it",
        line(private_evaluation, "released", ("/= 2 if", "/= 1 if")),
        "ε is that of the adjacency",
        check_adjacency,
    ),
    Mutation(
        "one noise for different test sets",
        without_labels,
        "different releases share no noise",
        check_noise,
    ),
    Mutation(
        "a key without the plan of evaluations",
        without_plan,
        "different releases share no noise",
        check_noise,
    ),
    Mutation(
        "a key with the number of evaluations, and not their rounds",
        with_the_number_of_evaluations,
        "different releases share no noise",
        check_noise,
    ),
    Mutation(
        "versions of a round are evaluated",
        line(charging, "check", ("terms.recipe.evaluation is not None", "False")),
        "no round is evaluated in two versions",
        check_versions,
    ),
    Mutation(
        "an evaluated round is committed after it was published",
        line(session.Session, "commit", ("if once", "if False")),
        "no round is evaluated in two versions",
        check_versions,
    ),
    Mutation(
        "rounds beyond the plan",
        returning(run.Training, "_refuse_finished", lambda training: None),
        "nothing is released beyond the plan",
        check_beyond,
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
