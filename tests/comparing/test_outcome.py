"""Means, errors and tests against those of scipy, on numbers and on runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedveil.comparing.members import Comparison, Member
from fedveil.comparing.outcome import Standing, averaged, holm, judged, paired
from fedveil.comparing.table import notes, table
from fedveil.settings import Settings


def standing(label: str, *values: float | None, seeds: tuple[int, ...] | None = None) -> Standing:
    chosen = tuple(range(len(values))) if seeds is None else seeds
    names = tuple(f"{label}-s{seed}" for seed in chosen)
    made = Standing(label, label, {}, names, chosen, values, tuple(0.1 for _ in values))
    return averaged(made, "accuracy")


def test_the_test_is_scipy_s_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 10):
        a, b = rng.normal(size=(2, size))
        found = paired(dict(enumerate(a)), dict(enumerate(b)))
        assert found == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_only_seeds_of_both_are_paired() -> None:
    one, other = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}, {2: 1.0, 1: 1.5, 0: 0.0}
    assert paired(one, other) == pytest.approx(stats.ttest_rel([1, 2, 4], [0, 1.5, 1]).pvalue)


def test_equal_and_constantly_different_values() -> None:
    assert paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) == 1.0
    assert paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5}) == 0.0


def test_holm_never_falls_and_is_never_above_one() -> None:
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_the_best_is_marked_and_the_others_are_tested_against_it() -> None:
    good, near, bad = (
        standing("good", 0.90, 0.92, 0.91, 0.93),
        standing("near", 0.91, 0.90, 0.92, 0.90),
        standing("bad", 0.50, 0.51, 0.52, 0.51),
    )
    found = {s.label: s for s in judged([bad, near, good], "accuracy")}
    assert [s.best for s in found.values()] == [False, False, True]
    assert found["good"].significant is None
    assert found["bad"].significant is True
    assert found["near"].significant is False
    raw = stats.ttest_rel([0.90, 0.92, 0.91, 0.93], [0.50, 0.51, 0.52, 0.51]).pvalue
    assert found["bad"].p == pytest.approx(2 * raw)
    assert good.mean == pytest.approx(0.915)
    assert good.standard_error == pytest.approx(stats.sem([0.90, 0.92, 0.91, 0.93]))


def test_one_seed_has_no_error_and_no_mark() -> None:
    found = judged([standing("a", 0.9), standing("b", 0.1)], "accuracy")
    assert [s.standard_error for s in found] == [None, None]
    assert [s.significant for s in found] == [None, None]
    assert [s.best for s in found] == [True, False]


def test_the_smallest_loss_is_the_best() -> None:
    made = [
        averaged(Standing(n, n, {}, (n,), (0,), (None,), (loss,)), "loss")
        for n, loss in (("a", 2.0), ("b", 1.0))
    ]
    assert [s.best for s in judged(made, "loss")] == [False, True]


def test_a_run_that_diverged_counts_as_the_worst() -> None:
    assert standing("a", 0.9, None).mean == pytest.approx(0.45)
    diverged = averaged(Standing("b", "b", {}, ("b",), (0,), (None,), (None,)), "loss")
    assert diverged.mean is None
    assert [s.best for s in judged([diverged], "loss")] == [False]


def compared(*standings: Standing) -> Comparison:
    members = tuple(Member(s.label, Settings()) for s in standings)
    return Comparison(members, standings[0].seeds)


COST = {
    "epsilon": 12.61, "delta": 1e-5, "view": "models", "adjacency": "zero-out", "runs": 12,
    "account": 13.0, "others": 2, "unrecorded": 0,
}  # fmt: skip


def test_with_one_seed_the_notes_say_that_nothing_was_tested() -> None:
    found = judged([standing("a", 0.9), standing("b", 0.1)], "accuracy")
    said = dict(notes(compared(*found), found, "accuracy", None))
    assert said["Marks"].startswith("none: a test needs at least two seeds")
    assert said["Privacy"].startswith("no ledger here knows these runs")


def test_the_notes_say_what_all_cost_and_what_choosing_means() -> None:
    found = judged([standing("a", 0.9, 0.8), standing("b", 0.1, 0.2)], "accuracy")
    said = dict(notes(compared(*found), found, "accuracy", COST))
    assert said["Together"] == (
        "all 12 runs have spent ε = 12.7 at δ = 1e-05 in view 'models' (zero-out); with 2 earlier "
        "ones on these data, ε = 13, by the ledger. This is a figure to look at; only a budget "
        "that is set before the runs is a guarantee."
    )
    assert "costs the ε of all of them together" in said["Choosing"]
    assert "paired t test" in said["Marks"]
    unfit = dict(notes(compared(*found), found, "accuracy", {**COST, "epsilon": None}))
    assert "ε = ∞" in unfit["Together"]


def test_the_table_has_the_best_first_and_its_plot_in_place() -> None:
    found = judged([standing("bad", 0.1, 0.3), standing("good", 0.9, 0.7)], "accuracy")
    shown = table(compared(*found), found, "accuracy")
    cells = [[str(cell) for cell in column._cells] for column in shown.columns]
    assert cells[0] == ["good", "bad"]
    assert cells[2] == ["80.00 ± 10.00 %", "20.00 ± 10.00 %"]
    assert cells[3] == ["*", "~"]
    assert [line.index("●") for line in cells[4]] == [21, 3]
