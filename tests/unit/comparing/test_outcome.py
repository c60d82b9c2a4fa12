"""Means, errors and tests against those of scipy, on numbers and on runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedveil.commands.comparison_table import notes, table
from fedveil.comparing.members import Comparison, Member
from fedveil.comparing.outcome import (
    ACCURACY,
    LOSS,
    MemberResult,
    averaged,
    holm,
    judged,
    paired,
    plain,
)
from fedveil.runs.listing import NOISY_NOTE
from fedveil.training.settings import Settings


def standing(
    label: str, *values: float | None, seeds: tuple[int, ...] | None = None
) -> MemberResult:
    chosen = tuple(range(len(values))) if seeds is None else seeds
    names = tuple(f"{label}-s{seed}" for seed in chosen)
    made = MemberResult(label, label, {}, names, chosen, values, tuple(0.1 for _ in values))
    return averaged(made, ACCURACY)


def test_the_test_is_scipy_s_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    for size in (3, 4, 10):
        a, b = rng.normal(size=(2, size))
        found = paired(dict(enumerate(a)), dict(enumerate(b)))
        assert found == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_only_seeds_of_both_are_paired() -> None:
    one, other = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}, {2: 1.0, 1: 1.5, 0: 0.0}
    assert paired(one, other) == pytest.approx(stats.ttest_rel([1, 2, 4], [0, 1.5, 1]).pvalue)


def test_equal_and_constantly_different_values() -> None:
    three = {0: 1.0, 1: 2.0, 2: 3.0}
    assert paired(three, three) == 1.0
    assert paired(three, {0: 0.5, 1: 1.5, 2: 2.5}) == 0.0


def test_two_seeds_are_not_tested() -> None:
    assert paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.4}) is None


def test_holm_never_falls_and_is_never_above_one() -> None:
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_the_best_is_marked_and_the_others_are_tested_against_it() -> None:
    good, near, bad = (
        standing("good", 0.90, 0.92, 0.91, 0.93),
        standing("near", 0.91, 0.90, 0.92, 0.90),
        standing("bad", 0.50, 0.51, 0.52, 0.51),
    )
    found = {s.label: s for s in judged([bad, near, good], ACCURACY)}
    assert [s.best for s in found.values()] == [False, False, True]
    assert found["good"].significant is None
    assert found["bad"].significant is True
    assert found["near"].significant is False
    raw = stats.ttest_rel([0.90, 0.92, 0.91, 0.93], [0.50, 0.51, 0.52, 0.51]).pvalue
    assert found["bad"].p == pytest.approx(2 * raw)
    assert good.mean == pytest.approx(0.915)
    assert good.standard_error == pytest.approx(stats.sem([0.90, 0.92, 0.91, 0.93]))


def test_one_seed_has_no_error_and_no_mark() -> None:
    found = judged([standing("a", 0.9), standing("b", 0.1)], ACCURACY)
    assert [s.standard_error for s in found] == [None, None]
    assert [s.significant for s in found] == [None, None]
    assert [s.best for s in found] == [True, False]


def test_the_smallest_loss_is_the_best() -> None:
    made = [
        averaged(MemberResult(n, n, {}, (n,), (0,), (None,), (loss,)), LOSS)
        for n, loss in (("a", 2.0), ("b", 1.0))
    ]
    assert [s.best for s in judged(made, LOSS)] == [False, True]


def test_a_run_that_diverged_counts_as_the_worst() -> None:
    assert standing("a", 0.9, None).mean == pytest.approx(0.45)
    diverged = averaged(MemberResult("b", "b", {}, ("b",), (0,), (None,), (None,)), LOSS)
    assert diverged.mean is None
    assert [s.best for s in judged([diverged], LOSS)] == [False]


def compared(*member_results: MemberResult) -> Comparison:
    members = tuple(Member(s.label, Settings()) for s in member_results)
    return Comparison(members, member_results[0].seeds)


COST = {
    "epsilon": 12.61, "delta": 1e-5, "view": "models", "adjacency": "zero-out", "runs": 12,
    "account": 13.0, "others": 2, "unrecorded": 0,
}  # fmt: skip


def test_with_one_seed_the_notes_say_that_nothing_was_tested() -> None:
    found = judged([standing("a", 0.9), standing("b", 0.1)], ACCURACY)
    said = dict(notes(compared(*found), found, ACCURACY, None))
    assert said["Marks"].startswith("not tested: a test needs two configurations")
    assert said["Privacy"].startswith("no ledger here records these runs")
    said = dict(notes(compared(*found), found, ACCURACY, "It is another ledger."))
    unknown = "the total cost of these runs is unknown. It is another ledger. It is more than"
    assert said["Privacy"].startswith(unknown)
    saved = plain(compared(*found), found, ACCURACY, "It is another ledger.")
    assert saved["together"] is None


def test_the_notes_say_what_all_cost_and_what_choosing_means() -> None:
    found = judged([standing("a", 0.9, 0.8, 0.9), standing("b", 0.1, 0.2, 0.4)], ACCURACY)
    said = dict(notes(compared(*found), found, ACCURACY, COST))
    assert said["Total cost"] == (
        "all 12 runs together have spent ε = 12.7 at δ = 1e-5 in view 'models' (zero-out); with 2 "
        "earlier runs on these data, ε = 13, according to the ledger. This is for information "
        "only: a guarantee needs a budget set before the runs."
    )
    assert "costs their composed ε" in said["Choosing"]
    assert "paired t-test" in said["Marks"]
    unfit = dict(notes(compared(*found), found, ACCURACY, {**COST, "epsilon": None}))
    assert "ε = ∞" in unfit["Total cost"]


def test_noisy_scores_are_marked() -> None:
    found = judged([standing("a", 0.9, 0.8, 0.9), standing("b", 0.1, 0.2, 0.4)], ACCURACY)
    mixed = [replace(found[0], noisy=True), found[1]]
    shown = table(compared(*mixed), mixed, ACCURACY)
    assert [cell.endswith("%‡") for cell in shown.columns[2]._cells] == [True, False]
    assert ("Note", NOISY_NOTE) in notes(compared(*mixed), mixed, ACCURACY, COST)
    said = dict(notes(compared(*mixed), mixed, ACCURACY, COST))
    assert "No ε covers an exact score" in said["Choosing"]
    noisy = [replace(each, noisy=True) for each in found]
    assert "exact" not in dict(notes(compared(*noisy), noisy, ACCURACY, COST))["Choosing"]
    assert ("Note", NOISY_NOTE) not in notes(compared(*found), found, ACCURACY, COST)


def test_the_table_has_the_best_first_and_its_plot_in_place() -> None:
    found = judged([standing("bad", 0.1, 0.3, 0.2), standing("good", 0.9, 0.1, 0.8)], ACCURACY)
    shown = table(compared(*found), found, ACCURACY)
    cells = [[str(cell) for cell in column._cells] for column in shown.columns]
    assert cells[0] == ["good", "bad"]
    assert cells[2] == ["60.00 ± 25.17 %", "20.00 ± 5.77 %"]
    assert cells[3] == ["*", "~"]
    assert [line.index("●") for line in cells[4]] == [15, 2]
