"""A model that answers one class, misses one, or is no better than chance is told first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.diagnosis.answers import MISSED, ONE_CLASS, USELESS, one_class
from fedveil.diagnosis.diagnose import diagnose
from fedveil.diagnosis.run import DiagnosedRun, read
from fedveil.training.scoring import Evaluation, MeasuredMetric, from_confusion
from fedveil.training.start import train
from tests.unit.training.test_metrics import rare


def run(counts: list[list[int]], *metrics: MeasuredMetric) -> DiagnosedRun:
    names = ["no", "yes", "unknown"][: len(counts)]
    found = from_confusion(names, counts)
    known = replace(found, metrics=(*found.metrics, *metrics))
    return DiagnosedRun(Path("a"), algorithms.fedavg(), [{"round": 1}], evaluation=known)


def test_one_answer_for_every_example_is_told_with_its_counts() -> None:
    found = ONE_CLASS(run([[7_847, 0], [153, 0]]))
    assert found is not None
    assert found.evidence == (
        "the model predicts 'no' for every one of 8,000 test examples. It misses 153 of 153 "
        "examples of 'yes'. Its accuracy of 98.1% is only the share of 'no'"
    )
    assert found.command == "--loss 'cross_entropy(weights=[1,51])'"


def test_a_bounded_model_that_ranks_well_needs_no_weights() -> None:
    auc = MeasuredMetric("auc", 0.83, 0.80, 0.85, 0.5, share=True)
    plain = run([[7_847, 0], [153, 0]], auc)
    found = ONE_CLASS(replace(plain, recipe=algorithms.dp_norm_fedavg(noise_multiplier=1.0)))
    assert found is not None
    assert "ranks well (AUC 83.0%)" in found.advice
    assert "--alert-rate" in found.advice
    assert "weights change little" in found.advice
    assert found.command == ""
    unbounded = ONE_CLASS(plain)
    assert unbounded is not None
    assert unbounded.command == "--loss 'cross_entropy(weights=[1,51])'"
    chance = run([[7_847, 0], [153, 0]], replace(auc, low=0.45))
    told = ONE_CLASS(chance)
    assert told is not None
    assert "ranks well" not in told.advice


def test_a_few_other_answers_do_not_hide_a_missed_class() -> None:
    missing = run([[7_800, 47], [150, 3]])
    assert ONE_CLASS(missing) is None
    found = MISSED(missing)
    assert found is not None
    assert "misses 150 of 153 test examples of 'yes'" in found.evidence


def test_weights_are_suggested_for_a_rare_class_only() -> None:
    rare, usual = MISSED(run([[7_800, 47], [150, 3]])), MISSED(run([[150, 10], [149, 4]]))
    assert rare is not None
    assert usual is not None
    assert (rare.command, usual.command) == ("--loss 'cross_entropy(weights=[1,51])'", "")
    assert "give the rare class a larger weight" in rare.advice
    assert usual.advice.startswith("train for more rounds")


@pytest.mark.parametrize("counts", [[[90, 10], [5, 45]], [[90, 0], [3, 0]], [[90, 10], [0, 0]]])
def test_a_useful_model_and_too_few_examples_are_not_told(counts: list[list[int]]) -> None:
    assert ONE_CLASS(run(counts)) is None
    assert MISSED(run(counts)) is None


def test_an_interval_over_the_baseline_is_useless() -> None:
    bad = MeasuredMetric("auc", 0.52, 0.47, 0.57, 0.5, share=True)
    found = USELESS(run([[60, 40], [20, 30]], bad))
    assert found is not None
    assert "AUC 52.0% (95% interval 47.0% to 57.0%), against 50.0%" in found.evidence
    good = replace(bad, low=0.51)
    assert USELESS(run([[60, 40], [20, 30]], good)) is None


def test_it_is_the_verdict_of_a_real_run_and_of_an_old_one(tmp_path: Path) -> None:
    train(algorithms.fedavg(), rare(), rounds=3, save=tmp_path / "a", metric="auc")
    found = diagnose(tmp_path / "a")
    assert found.verdict().startswith("The model predicts '0' for every one of 600 test examples.")
    assert found.useless[0] is found.wrong[0]
    summary = tmp_path / "a/summary.json"
    new, known = read(tmp_path / "a").evaluation, summary.read_text()
    start = known.index('  "evaluation"')
    summary.write_text(known[:start] + known[known.index('  "rounds"', start) :])
    old = read(tmp_path / "a").evaluation
    assert isinstance(new, Evaluation)
    assert isinstance(old, Evaluation)
    assert one_class(old) == one_class(new)
