"""Mistakes in what several runs compose to, each caught by a test of the ledger's rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fedveil.privacy import composition as together
from fedveil.privacy.composition import Charged
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.unit.privacy import test_together as rule


def check_rule() -> None:
    rule.test_several_kinds_are_counted_by_the_rule([4.0, 9.0], 3, 2.0)


def check_aside() -> None:
    rule.test_what_releases_set_aside_is_held_to_a_quarter_of_what_is_left(1.0, 0.0)


def check_distance() -> None:
    rule.test_what_releases_set_aside_is_held_to_a_quarter_of_what_is_left(0.0, 1.0)


def shared_cap(patch: pytest.MonkeyPatch) -> None:
    condition = "(alike and repeatable)"
    mutate(patch, together, "epsilon", (condition, "alike"))
    patch.setattr(rule, "epsilon", together.epsilon)  # which the guard knows by name


def as_chosen(runs: Sequence[Charged], delta: float, target: float | None = None) -> float:
    """As if what was chosen had been chosen beforehand: the exact composition at all of δ."""
    assert target is not None
    kinds = [(run.plan.ways[0].event.epsilon, run.rounds) for run in runs]  # type: ignore[union-attr]
    (one, i), (other, j) = kinds
    return target if rule.composed(one, other, i, j, target) <= delta else math.inf


MUTATIONS = [
    Mutation(
        "composition of what was chosen",
        returning(rule, "epsilon", as_chosen),
        "test_no_analyst_gets_more_out_of_a_budget_than_it_allows",
        lambda: rule.test_no_analyst_gets_more_out_of_a_budget_than_it_allows(
            0.2, 0.5, 6, 1.5, 0.01
        ),
    ),
    Mutation(
        "Rényi orders do not share δ",
        line(together, "_by_orders", ("0.75 * delta / m", "0.75 * delta")),
        "check_rule",
        check_rule,
    ),
    Mutation(
        "Rényi orders have all of δ",
        line(together, "_by_orders", ("0.75 * delta / m", "delta / m")),
        "check_rule",
        check_rule,
    ),
    Mutation(
        "what is set aside is not held to δ/4",
        line(together, "_by_orders", ("if aside <= delta / 4 else math.inf", "")),
        "check_aside",
        check_aside,
    ),
    Mutation(
        "distances paid for at the ε that was spent",
        line(together, "_by_orders", ("max(found, target or 0.0)", "found")),
        "check_distance",
        check_distance,
    ),
    Mutation(
        "orders chosen afterwards",
        line(
            together,
            "_by_orders",
            ("if target is None else [_useful(target, delta)]", ""),
        ),
        "test_orders_are_fixed_by_the_target",
        rule.test_orders_are_fixed_by_the_target_and_not_by_what_was_spent,
    ),
    Mutation(
        "orders beyond the useful ones left out of the share",
        line(together, "_useful", ("for order in ORDERS) + 1", "for order in ORDERS)")),
        "check_rule",
        check_rule,
    ),
    Mutation(
        "two capped streams share one cap",
        shared_cap,
        "test_two_capped_streams_have_two_caps",
        rule.test_two_capped_streams_have_two_caps,
    ),
    Mutation(
        "a capped run's proof chosen by the rounds it has drawn",
        line(together, "_way", ("_divergence(way, run.planned)", "_divergence(way, run.rounds)")),
        "test_the_proof_of_a_capped_run_is_chosen_by_its_plan",
        rule.test_the_proof_of_a_capped_run_is_chosen_by_its_plan,
    ),
    Mutation(
        "later runs narrow the adjacency of a budget",
        line(together, "adjacency", ("runs[:1] if budgeted else runs", "runs")),
        "test_under_a_budget_the_first_run_fixes_the_adjacency",
        rule.test_under_a_budget_the_first_run_fixes_the_adjacency,
    ),
    Mutation(
        "runs without a common adjacency are added up",
        line(together, "adjacency", ("found and found[0] in common(runs)", "found")),
        "test_under_a_budget_the_first_run_fixes_the_adjacency",
        rule.test_under_a_budget_the_first_run_fixes_the_adjacency,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
