"""Metrics agree with scikit-learn, have baselines and intervals that cover, and rank runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import fedveil as fv
from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.training import scoring
from fedveil.training.metrics import CLASSES, NUMBERS, Metric, chosen
from fedveil.training.prepare import prepare
from fedveil.training.scoring import Answers, Evaluation, evaluated, jackknife, scored, wilson
from fedveil.training.start import train


@pytest.fixture(autouse=True)
def _all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals as users get them; other tests have fewer groups (tests/conftest.py)."""
    monkeypatch.setattr(scoring, "GROUPS", 20)


def answers(n: int, classes: int, seed: int = 0, positives: float = 0.5) -> Answers:
    """Scores that are informative, but not perfect."""
    rng = np.random.default_rng(seed)
    shares = [1 - positives, positives] if classes == 2 else None
    targets = rng.choice(classes, n, p=shares)
    logits = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[targets]
    outputs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(outputs[np.arange(n), targets])
    return Answers("class", targets, outputs, losses)


def test_two_classes_are_scored_by_the_second() -> None:
    found = answers(500, 2, positives=0.1)
    y, p = found.flat()
    assert CLASSES["auc"](y, p) == pytest.approx(sk.roc_auc_score(y, p[:, 1]))
    assert CLASSES["average_precision"](y, p) == pytest.approx(
        sk.average_precision_score(y, p[:, 1])
    )
    assert CLASSES["f1"](y, p) == pytest.approx(sk.f1_score(y, p.argmax(1)))
    assert CLASSES["recall"](y, p) == pytest.approx(sk.recall_score(y, p.argmax(1)))


def test_more_classes_are_scored_one_against_the_rest() -> None:
    y, p = answers(800, 4).flat()
    ovr = sk.roc_auc_score(y, p, multi_class="ovr")
    assert CLASSES["auc"](y, p) == pytest.approx(ovr)
    assert CLASSES["balanced_accuracy"](y, p) == pytest.approx(
        sk.balanced_accuracy_score(y, p.argmax(1))
    )
    assert CLASSES["perplexity"](y, p) == pytest.approx(math.exp(sk.log_loss(y, p)))


def test_a_calibrated_model_has_a_small_calibration_error_and_a_boastful_one_a_large() -> None:
    rng = np.random.default_rng(1)
    p = rng.uniform(0.5, 1, 20_000)
    y = (rng.random(len(p)) > p).astype(int)  # class 0 with probability p
    honest, boastful = np.stack([p, 1 - p], 1), np.stack([p**0.01, 1 - p**0.01], 1)
    assert CLASSES["calibration_error"](y, honest) < 0.02
    assert CLASSES["calibration_error"](y, boastful) == pytest.approx(0.25, abs=0.02)


def test_what_is_not_defined_is_nan() -> None:
    one = np.zeros(5, dtype=np.int64), np.full((5, 2), 0.5)
    assert math.isnan(CLASSES["auc"](*one))
    assert math.isnan(CLASSES["accuracy"](np.zeros(0), np.zeros((0, 2))))
    assert math.isnan(NUMBERS["rmse"](np.zeros(2), np.array([1.0, np.nan])))


def test_the_baseline_is_a_constant_answer() -> None:
    found = evaluated(answers(1000, 2, positives=0.03), chosen("auc", None, "class", 2))
    known = {m.name: m for m in found.metrics}
    share = sum(c.examples for c in found.classes if c.name == "0") / found.examples
    assert known["accuracy"].baseline == pytest.approx(share)
    assert known["auc"].baseline == 0.5
    assert known["balanced_accuracy"].baseline == 0.5
    assert known["average_precision"].baseline == pytest.approx(1 - share)
    assert known["calibration_error"].baseline is None
    assert found.main is known["auc"]


def test_numbers_are_compared_with_their_mean() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(5, 2, 400)
    found = Answers("number", targets, targets + rng.normal(0, 1, 400), np.zeros(400))
    known = {m.name: m for m in evaluated(found, chosen(None, None, "number", 1)).metrics}
    assert known["rmse"].value == pytest.approx(1, abs=0.15)
    assert known["rmse"].baseline == pytest.approx(targets.std())
    assert known["r2"].baseline == pytest.approx(0, abs=1e-9)
    assert not known["rmse"].higher_is_better


@pytest.mark.parametrize("name", ["auc", "balanced_accuracy", "f1", "loss"])
def test_jackknife_intervals_are_as_wide_as_the_spread_over_test_sets(name: str) -> None:
    """A test set's own interval against 60 others: within 40%, the error of 20 groups is 16%."""
    metric = CLASSES[name]
    values = [scored(metric, answers(600, 2, seed=s, positives=0.2)) for s in range(60)]
    own = [jackknife(metric, answers(600, 2, seed=s, positives=0.2)) for s in range(5)]
    assert float(np.mean(own)) / 2.09 == pytest.approx(np.std(values), rel=0.4)


def test_wilson_intervals_do_not_vanish_at_the_ends() -> None:
    assert wilson(153, 153)[0] < 0.98
    assert wilson(0, 153)[1] > 0.02


def test_ignored_positions_do_not_count() -> None:
    targets = np.array([[0, 1, 9], [1, 9, 9]])
    outputs = np.full((2, 3, 2), 0.5)
    outputs[..., 0] += 0.1
    found = Answers("class", targets, outputs, np.zeros(2), ignored=(9,))
    assert CLASSES["accuracy"](*found.flat()) == pytest.approx(1 / 3)


def test_a_metric_of_another_task_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'rmse' is for targets of kind 'number'"):
        chosen("rmse", None, "class", 2)
    with pytest.raises(UserError, match="Did you mean 'auc'"):
        chosen("auk", None, "class", 2)
    with pytest.raises(UserError, match="Give a function"):
        chosen(None, {"cost": 3}, "class", 2)  # type: ignore[dict-item]
    with pytest.raises(UserError, match="metrics is not a dict"):
        chosen(None, "auc", "class", 2)  # type: ignore[arg-type]


def rare(positives: int = 40, n: int = 600) -> Federated:
    """Two classes, of which the second is rare and hard to tell."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.zeros(n, dtype=torch.int64)
    labels[torch.randperm(n, generator=rng)[:positives]] = 1
    inputs = torch.randn(n, 3, generator=rng)
    inputs[:, 0] += labels
    test = Examples(inputs, labels)
    return Federated("rare", inputs, labels, torch.arange(0, n + 1, 20), test, 2)


def test_the_chosen_metric_is_recorded_saved_and_read(tmp_path: Path) -> None:
    def missed(targets: np.ndarray, outputs: np.ndarray) -> float:
        return float(((targets == 1) & (outputs.argmax(1) == 0)).sum())

    missed.higher_is_better = False  # type: ignore[attr-defined]
    result = train(
        algorithms.fedavg(), rare(), rounds=3, save=tmp_path / "a", metric="auc",
        metrics={"missed": missed},
    )  # fmt: skip
    assert result.evaluation is not None
    plain = json.loads((tmp_path / "a/summary.json").read_text())["evaluation"]
    assert Evaluation.from_plain(plain) == result.evaluation
    assert plain["metric"] == "auc"
    assert result.records[-1].metric == pytest.approx(result.evaluation["auc"])
    known = {m.name: m for m in result.evaluation.metrics}
    assert known["missed"].value == 40
    assert not known["missed"].higher_is_better
    assert 'metric = "auc"' in (tmp_path / "a/recipe.toml").read_text()


def test_a_metric_object_says_how_it_ranks() -> None:
    cost = Metric("cost", lambda y, p: float(len(y)), higher_is_better=False)
    found = chosen(cost, None, "class", 2)
    assert found.main is cost
    assert cost in found.every


def swapped(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The order of a loss."""
    return float((outputs.argmax(1) == targets).mean())


def lonely(targets: np.ndarray) -> float:
    return float(targets.mean())


def wordy(targets: np.ndarray, outputs: np.ndarray) -> str:
    return "good"


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (swapped, r"'swapped' failed .* AxisError: .* takes \(targets, outputs\), in this order"),
        (lonely, "'lonely' failed .* TypeError: .* takes 1 positional argument but 2 were given"),
        (wordy, "'wordy' failed .* returned 'good'. Return a number"),
    ],
)
@pytest.mark.parametrize("main", [True, False])
def test_a_faulty_metric_is_refused_before_round_1(
    score: Callable[..., float], says: str, main: bool
) -> None:
    metric = Metric(score.__name__, score)
    given: dict[str, Any] = {"metric": metric} if main else {"metrics": [metric]}
    with pytest.raises(UserError, match=says):
        prepare(algorithms.fedavg(), rare(), rounds=1, **given)


@pytest.mark.parametrize("target", ["class", "sequence", "label", "labels", "number"])
def test_a_metric_is_tried_on_answers_of_the_shapes_of_real_ones(target: str) -> None:
    """Every class occurs, shares add up to 1, and labels are 0 or 1."""
    wide = {"class": 3, "sequence": 3, "label": 1, "labels": 2, "number": 1}[target]
    shape = {"sequence": (4,), "labels": (2,)}.get(target, ())
    kind = {"sequence": "class", "labels": "label"}.get(target, target)
    labels = torch.randint(3 if kind == "class" else 2, (12, *shape))
    labels = labels if kind == "class" else labels.float()
    loss = {"class": "cross_entropy", "label": "binary", "number": "mse"}[kind]
    inputs = torch.randn(12, 5)
    data = Federated(
        "x", inputs, labels, torch.arange(0, 13, 4), Examples(inputs, labels), wide, loss
    )
    outputs = math.prod(shape) * (wide if kind == "class" else 1)
    tail = (*shape, wide) if kind == "class" else (shape or (1,))
    module = torch.nn.Sequential(torch.nn.Linear(5, outputs), torch.nn.Unflatten(1, tail))
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def kept(targets: np.ndarray, outputs: np.ndarray) -> float:
        seen.append((targets, outputs))
        return 0.0

    result = train(algorithms.fedavg(), data, module, rounds=1, metrics=[Metric("kept", kept)])
    assert result.evaluation is not None
    (targets, outputs_), (real_targets, real_outputs) = seen[0], seen[1]
    assert targets.shape[1:] == real_targets.shape[1:]
    assert outputs_.shape[1:] == real_outputs.shape[1:]
    assert (targets.dtype, outputs_.dtype) == (real_targets.dtype, real_outputs.dtype)
    if kind == "class":
        assert set(targets.tolist()) == {0, 1, 2}
        assert outputs_.sum(1) == pytest.approx(1)
    if kind == "label":
        assert set(targets.flatten().tolist()) == {0.0, 1.0}


def test_a_metric_that_fails_on_real_answers_is_null_and_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(targets: np.ndarray, outputs: np.ndarray) -> float:
        if len(targets) == 600:
            raise ValueError("too many patients")
        return 0.5

    recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=3.0, rate=0.5)
    result = train(
        recipe, rare(), rounds=2, save=tmp_path / "a", metric=Metric("picky", picky),
        ledger=tmp_path / "ledger.sqlite",
    )  # fmt: skip
    assert result.evaluation is not None
    assert result.evaluation.main.value is None
    known = json.loads((tmp_path / "a/summary.json").read_text())["evaluation"]["metrics"]
    assert {m["name"]: m["value"] for m in known}["picky"] is None
    assert "'picky' failed on the test examples" in caplog.text
    assert "ValueError: too many patients" in caplog.text


def test_a_function_is_a_metric_of_its_own_name() -> None:
    def cost(targets: np.ndarray, outputs: np.ndarray) -> float:
        return float((targets != outputs.argmax(1)).mean())

    cost.higher_is_better = False  # type: ignore[attr-defined]
    found = chosen(cost, None, "class", 2).main
    assert (found.name, found.higher_is_better) == ("cost", False)
    assert chosen(lambda targets, outputs: 0.0, None, "class", 2).main.name == "metric"
    result = fv.train(algorithms.fedavg(), rare(), rounds=1, metric=cost, quiet=True)
    assert result.evaluation is not None
    assert result.evaluation.metric == "cost"
