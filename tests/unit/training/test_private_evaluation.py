"""With private evaluation, everything that is said of test examples carries noise and is paid."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil import algorithms
from fedveil.accounting import accountant
from fedveil.aggregates.desk import GRID, Contributions, Desk
from fedveil.aggregates.outcomes import Interval, Table
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import Origin
from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.ledger.ledger import Account, open_ledger
from fedveil.ledger.session import BudgetError
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.privacy.calibrate import Budget
from fedveil.runs.listing import listed
from fedveil.training import private_evaluation, run, scoring
from fedveil.training.checkpoint import write_round
from fedveil.training.prepare import prepare
from fedveil.training.private_evaluation import EvaluationPlan
from fedveil.training.result import Result
from fedveil.training.start import finish, resume, start
from tests.unit.ledger.test_stopping import Changing

CLIENTS, TESTED = 40, 60
DP = replace(algorithms.dp_fedavg(clip=1.0, steps=1), cohort=Everyone())  # cheap to account for
LOUD: dict[str, Any] = {
    "recipe": replace(algorithms.dp_fedavg(clip=1.0, noise_multiplier=2.0), cohort=Everyone()),
    "epsilon": None,
}


def population(classes: int = 2, owners: bool = True, seed: int = 0) -> Federated:
    """Clients whose examples can be learned, and 60 test examples of 30 of them."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, 4 * CLIENTS + TESTED)
    x = (rng.standard_normal((len(y), 3)) + 2 * y[:, None]).astype(np.float32)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    names = np.arange(TESTED) // 2 if owners else None
    test = Examples(inputs[:TESTED], labels[:TESTED], owners=names)
    offsets = torch.arange(0, 4 * CLIENTS + 1, 4)
    return Federated("people", inputs[TESTED:], labels[TESTED:], offsets, test, classes)


def trained(data: Federated | None = None, **options: Any) -> Result:
    given: dict[str, Any] = {"rounds": 4, "epsilon": 20.0, "private_evaluation": 5.0, **options}
    return fv.train(given.pop("recipe", DP), data or population(), **given)


def test_no_result_is_computed_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact evaluation is not called at all, also not for the result."""

    def never(*given: object, **options: object) -> None:
        raise AssertionError("an exact evaluation")

    training = prepare(DP, population(), rounds=4, epsilon=20.0, private_evaluation=5.0)
    monkeypatch.setattr(Task, "evaluate", never)
    monkeypatch.setattr(run, "answers", never)
    monkeypatch.setattr("fedveil.training.start.answers", never)
    result = finish(training)
    found = result.evaluation
    assert found is not None
    assert found.epsilon == 5.0
    assert result.accuracy == found["accuracy"] == result.records[-1].accuracy
    assert [m.name for m in found.metrics] == [
        "accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "loss",
    ]  # fmt: skip


def test_files_have_the_noisy_results_only(tmp_path: Path) -> None:
    result = trained(save=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = pl.read_parquet(tmp_path / "run" / "metrics.parquet")
    plain = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert plain["confusion"] is None
    assert summary["accuracy"] == summary["evaluation"]["metrics"][0]["value"] == result.accuracy
    assert summary["evaluation"]["epsilon"] == 5.0
    assert "the noise and the choice of units" in summary["evaluation"]["interval"]
    assert rows["accuracy"].to_list() == [r.accuracy for r in result.records]
    assert (rows["metric_low"] <= rows["metric_high"]).all()
    test = population().test
    exact = Task(result.model, "cross_entropy").evaluate(_flat(result.model), test)
    assert not set(exact) & {*rows["accuracy"], *rows["loss"], summary["accuracy"]}


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([leaf.detach().reshape(-1) for leaf in module.parameters()])


def test_all_evaluations_together_have_their_epsilon() -> None:
    """Precisions of all tables of all evaluations add up to μ², and to no more."""
    for rounds, every in ((1, 1), (10, 3), (100, 5)):
        training = prepare(
            DP, population(), rounds=rounds, epsilon=20.0, evaluate_every=every,
            private_evaluation=5.0,
        )  # fmt: skip
        plan = training.spec.evaluation
        assert plan is not None
        done = [k for k in range(1, rounds + 1) if training.evaluates(k)]
        assert plan.rounds == tuple(done)
        spent = sum(sum(plan.tables_of(k == rounds).values()) for k in done)
        assert spent == pytest.approx(plan.whole)
        event = training.recipe.evaluation
        assert event is not None
        assert event.ratio == pytest.approx(spent**-0.5)
        alone = accountant.epsilon(event.event("zero-out"), training.delta)
        assert 0.999 * 5.0 < alone <= 5.0


@pytest.mark.parametrize("cohort", [Everyone(), Poisson(0.5), FixedSize(20)])
def test_the_epsilon_of_evaluations_is_that_of_the_adjacency(cohort: Cohort) -> None:
    """Also for replacing a client, which moves the sums by √2."""
    recipe = replace(LOUD["recipe"], cohort=cohort)
    training = prepare(recipe, population(), rounds=2, private_evaluation=1.0)
    found, plan = training.recipe.evaluation, training.spec.evaluation
    assert found is not None
    assert plan is not None
    assert found.ratio == pytest.approx(plan.whole**-0.5)
    alone = accountant.epsilon(found.event(recipe.adjacency()), training.delta)
    assert 0.999 < alone <= 1.0


def test_one_epsilon_covers_training_and_evaluation(tmp_path: Path) -> None:
    """More noise than without, the same ε, and the ledger and the statement agree."""
    plain = fv.train(DP, population(), rounds=4, epsilon=8.0)
    result = trained(epsilon=8.0, save=tmp_path / "run")
    ours, theirs = result.recipe.noise, plain.recipe.noise
    assert ours.noise_multiplier > 1.01 * theirs.noise_multiplier  # type: ignore[operator]
    assert 7.5 < result.guarantee.epsilon <= 8.0
    spent = replace(result.recipe, evaluation=None).spent(8, CLIENTS, 4)
    assert accountant.epsilon(spent, result.guarantee.delta) < 0.95 * result.guarantee.epsilon
    text = result.statement.text()
    assert "all planned evaluations together have ε = 5 at the same δ" in text
    assert "every model of 4 rounds, the noisy evaluations" in text.lower()
    for view in ("sum", "messages"):
        assert not result.statement.towards(view).private  # type: ignore[arg-type]


class Mixing(nn.Module):
    """Centers its batch: the output of one example depends on the others in the call."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0, keepdim=True))


HOSTILE = [  # one client at a time is less to go wrong: it has one value of each kind
    *((value, "softmax", 3) for value in (math.nan, math.inf, -math.inf, 1e38, 0.0, -5.0)),
    *((value, "mixing", 2) for value in (math.nan, 1e38, -5.0)),
]


@pytest.mark.parametrize(("value", "model", "classes"), HOSTILE)
def test_one_client_moves_every_table_by_at_most_one(
    value: float, model: str, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a client's held-out examples are, no other client's contribution changes."""
    seen: list[tuple[Contributions, int]] = []
    real = Desk.sums

    def listening(desk: Desk, given: Contributions, cells: int, precision: float) -> np.ndarray:
        seen.append((given, cells))
        return real(desk, given, cells, precision)

    monkeypatch.setattr(Desk, "sums", listening)
    data = population(classes)
    inputs = data.test.inputs[:].clone()
    inputs[:2] = value  # of client 0
    hostile = replace(data, test=Examples(inputs, data.test.labels, owners=data.test.owners))
    found = []
    for one in (data, hostile):
        module = "softmax" if model == "softmax" else Mixing(classes)
        torch.manual_seed(0)
        training = prepare(
            DP, one, module, rounds=1, epsilon=20.0, private_evaluation=5.0,
            start=torch.linspace(-1, 1, 4 * classes),
        )  # fmt: skip
        assert (training.engine.name == "loop") == (model == "mixing")
        seen.clear()
        plan = training.spec.evaluation
        assert plan is not None
        together = training.engine.name != "loop"
        private_evaluation.evaluate_privately(
            plan, training.spec.metrics, training.task, training.state.model, one, 0, 1, True,
            together,
        )  # fmt: skip
        found.append([_dense(given, cells) for given, cells in seen])
    assert len(found[0]) == len(found[1]) == (4 if classes == 2 else 3)
    for before, after in zip(*found, strict=True):
        assert (before[1:] == after[1:]).all()
        for steps in (before, after):
            assert ((steps.astype(object) ** 2).sum(1) <= GRID**2).all()
        assert ((before - after).astype(object) ** 2).sum() <= 2 * GRID**2


def _dense(given: Contributions, cells: int) -> np.ndarray:
    found = np.zeros((TESTED // 2, cells), dtype=np.int64)
    np.add.at(found, (given.unit, given.cell), given.whole())
    return found


MODELS = (math.nan, math.inf, 1e30, -3.0, 0.0, 0.5)


def test_a_client_moves_a_whole_run_by_at_most_its_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ precision·‖Δ‖² over all tables of all evaluations, with a client's examples and without.

    Whatever the models are: NaN, infinite, huge. The sum is μ² of the Gaussian release; what is
    charged is its bound.
    """
    moved: list[tuple[np.ndarray, float]] = []
    real = Desk.sums

    def listening(desk: Desk, given: Contributions, cells: int, precision: float) -> np.ndarray:
        moved.append((_dense(given, cells).sum(0), precision))
        return real(desk, given, cells, precision)

    monkeypatch.setattr(Desk, "sums", listening)
    data, sums = population(), []
    kept = np.asarray(data.test.owners) != 7
    fewer = Examples(data.test.inputs[:][kept], data.test.labels[:][kept], owners=np.asarray(
        data.test.owners)[kept])  # fmt: skip
    for one in (data, replace(data, test=fewer)):
        training = prepare(DP, one, rounds=len(MODELS), epsilon=20.0, private_evaluation=5.0)
        plan, moved[:] = training.spec.evaluation, []
        assert plan is not None
        for done, value in enumerate(MODELS, 1):
            x = value * torch.linspace(-1, 1, training.task.dim)
            final = done == len(MODELS)
            private_evaluation.evaluate_privately(
                plan, training.spec.metrics, training.task, x, one, 0, done, final, True
            )
        sums.append(list(moved))
    squares = [
        precision * float(((a - b).astype(float) ** 2).sum()) / GRID**2
        for (a, precision), (b, _) in zip(*sums, strict=True)
    ]
    assert training.recipe.evaluation is not None
    charged = training.recipe.evaluation.ratio**-2
    assert 0.5 * charged < sum(squares) <= charged * (1 + 1e-9)


def test_examples_are_their_own_units() -> None:
    recipe = algorithms.dp_sgd(clip=1.0, rate=0.2, noise_multiplier=2.0)
    result = trained(recipe=recipe, epsilon=None, rounds=1)
    assert result.evaluation is not None
    assert result.evaluation.unit == "example"
    assert abs(result.evaluation.examples - TESTED) < 15
    assert "for examples in either. Each example counts once" in result.statement.text()


def test_made_up_clients_own_test_examples_in_turn() -> None:
    data = replace(population(owners=False), origin=Origin(simulated=True))
    assert data.test_units().tolist() == [k % CLIENTS for k in range(TESTED)]
    assert "assigned to the simulated clients" in trained(data).statement.text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": population(owners=False)}, "does not say which client each test example"),
        ({"recipe": algorithms.fedavg(), "epsilon": None}, "adds no noise"),
        ({"recipe": replace(DP, view="sum")}, "does not trust it"),
        ({"metric": "calibration_error"}, "absolute differences, which noise makes larger"),
        ({"metric": "average_precision", "data": population(3)}, "cannot be computed from noisy"),
        ({"metric": "top5"}, "cannot be computed from noisy sums"),
        ({"metric": "perplexity"}, "Use 'loss'"),
        ({"metric": "auc", "data": population(3)}, "accuracy, loss, balanced_accuracy, f1"),
        ({"per_round": True}, "Remove one of them"),
        ({"private_evaluation": 30.0}, "private evaluations alone spend"),
        ({"private_evaluation": 0.0}, "epsilon"),
    ],
)
def test_what_cannot_be_evaluated_privately_is_refused(options: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        trained(**options)


def test_no_test_examples_are_refused() -> None:
    data = population()
    with pytest.raises(UserError, match="no test examples"):
        trained(replace(data, test=Examples(data.inputs[:0], data.labels[:0])))


def test_different_releases_never_share_noise() -> None:
    """Another test set, another plan or another owner of test examples is another run."""
    data = population()
    labels = data.test.labels[:].clone()
    labels[0] = 1 - labels[0]
    flipped = replace(data, test=Examples(data.test.inputs, labels, owners=data.test.owners))
    dealt = replace(data, test=replace(data.test, owners=np.arange(TESTED)))
    options: list[tuple[Federated, dict[str, Any]]] = [
        (data, {}),
        (flipped, {}),
        (dealt, {}),
        (data, {"evaluate_every": 2}),
        (data, {"evaluate_every": 3}),  # as many evaluations, of other models
        (data, {"metric": "auc"}),
        (data, {"private_evaluation": 4.0}),
        (data, {"private_evaluation": None}),
    ]
    keys = [
        prepare(
            DP, each, **{"rounds": 4, "epsilon": 20.0, "private_evaluation": 5.0, **more}
        ).spec.identity
        for each, more in options
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_a_resumed_seeded_run_has_the_same_results(tmp_path: Path) -> None:
    whole = trained(save=tmp_path / "whole")
    begun = start(_prepared(), tmp_path / "run")
    begun.step()
    begun.step()
    begun.close()  # as if killed: no checkpoint after round 0
    result = finish(resume(_prepared(), tmp_path / "run"))
    assert [r.accuracy for r in result.records] == [r.accuracy for r in whole.records]
    assert result.evaluation == whole.evaluation
    again = finish(resume(_prepared(), tmp_path / "run"))
    assert again.evaluation == whole.evaluation


def test_exact_evaluations_after_other_rounds_are_the_same_run() -> None:
    """They draw nothing, so a run may be resumed with another interval."""
    keys = {_prepared(private_evaluation=None, evaluate_every=k).spec.identity for k in (1, 2, 3)}
    assert len(keys) == 1


def test_intervals_that_evaluate_after_the_same_rounds_are_one_run() -> None:
    assert _prepared(evaluate_every=4).spec.identity == _prepared(evaluate_every=9).spec.identity


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_run_is_not_resumed_with_evaluations_after_other_rounds(
    noise: str, tmp_path: Path
) -> None:
    """Two intervals with as many evaluations would together draw more than the plan has."""
    options = {**LOUD, "noise": noise, "rounds": 10, "checkpoint_every": 1}
    begun = start(_prepared(**options, evaluate_every=5), tmp_path / "run")
    write_round(begun, begun.step())
    begun.close()
    with pytest.raises(UserError, match="private evaluations after other rounds"):
        resume(_prepared(**options, evaluate_every=6), tmp_path / "run")
    resumed = resume(_prepared(**options, evaluate_every=5), tmp_path / "run")
    assert resumed.state.round == 1
    resumed.close()


def test_evaluations_under_a_budget_are_charged_by_their_rounds(tmp_path: Path) -> None:
    """A run is repeated for free only if it evaluates the same models."""
    ledger, data = tmp_path / "ledger.sqlite", population()
    options = {**LOUD, "rounds": 10, "delta": 1e-5, "ledger": ledger}
    plan = prepare(data=data, private_evaluation=5.0, **_without(options, "ledger"))
    with contextlib.closing(open_ledger(ledger)) as books:
        account = Account.of(data, None, "client")
        budget = Budget(plan.guarantee().epsilon * 1.01, 1e-5)
        books.grant(account, "models", budget, data.name, data.contents())
    for name in ("first", "again"):
        trained(data, **options, evaluate_every=5, save=tmp_path / name)
    with pytest.raises(BudgetError, match="was not run"):
        trained(data, **options, evaluate_every=6, save=tmp_path / "other")


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def test_nothing_is_trained_or_evaluated_beyond_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round more, and after an early stop a second final evaluation, would not be charged."""
    training = _prepared(**LOUD, rounds=2)
    training.step()
    training.step()
    with pytest.raises(UserError, match="ended after 2 rounds"):
        training.step()
    stopping = _prepared(**LOUD, rounds=8, evaluate_every=1, patience=1)
    monkeypatch.setattr(run.Training, "_stale", lambda run, records: len(records) > 1)
    stopping.step()
    stopping.step()
    with pytest.raises(UserError, match="more patience"):
        stopping.step()


def _prepared(**options: Any) -> run.Training:
    given: dict[str, Any] = {"rounds": 4, "epsilon": 20.0, "private_evaluation": 5.0, **options}
    return prepare(given.pop("recipe", DP), population(), **given)


def test_a_lost_secret_evaluation_is_not_drawn_again(tmp_path: Path) -> None:
    """Two evaluations were drawn and lost: of the three before the final one, one is left."""
    options = {**LOUD, "noise": "secure", "checkpoint_every": 100}
    begun = start(_prepared(**options), tmp_path / "run")
    begun.step()
    begun.step()
    begun.close()
    result = finish(resume(_prepared(**options), tmp_path / "run"))
    known = [r.loss is not None for r in result.records]
    assert known == [True, False, False, True]
    finished = finish(resume(_prepared(**options), tmp_path / "run"))
    assert finished.evaluation == result.evaluation  # from summary.json, not drawn again


def test_a_lost_final_evaluation_is_not_drawn_again(tmp_path: Path) -> None:
    options = {**LOUD, "noise": "secure", "checkpoint_every": 3}
    begun = start(_prepared(**options), tmp_path / "run")
    for _ in range(4):
        record = begun.step()
        if record.round == 3:
            write_round(begun, record)
    begun.close()
    result = finish(resume(_prepared(**options), tmp_path / "run"))
    assert [r.loss is not None for r in result.records] == [True, True, True, False]
    assert result.accuracy == result.records[2].accuracy  # the last one that was released
    assert result.evaluation is not None
    assert result.evaluation.main.low is not None


SHIFTED: dict[str, Any] = {
    "recipe": replace(LOUD["recipe"], noise=Changing(2.0)),
    "epsilon": None,
}


def test_no_round_is_evaluated_in_two_versions_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of the two results would be exact: the noise of an evaluation is the key's."""
    options = {**SHIFTED, "checkpoint_every": 100}
    begun = start(_prepared(**options), tmp_path / "run")
    begun.step()
    begun.close()
    monkeypatch.setattr(Changing, "SHIFT", 1.0)
    again = resume(_prepared(**options), tmp_path / "run")
    with pytest.raises(UserError, match="Round 1 of dp_fedavg was released before with other byt"):
        finish(again)
    assert again.records == []
    assert again.progress.evaluation is None


def test_no_round_is_evaluated_in_two_versions_by_two_runs(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both were drawn before one was committed; the ledger charges one evaluation."""
    one, other = (start(_prepared(**SHIFTED), tmp_path / name) for name in ("a", "b"))
    play = other.play

    def slowly() -> Any:
        one.step()
        monkeypatch.setattr(Changing, "SHIFT", 1.0)
        return play()

    monkeypatch.setattr(other, "play", slowly)
    with pytest.raises(UserError, match="or start a new run with another seed or with secret"):
        other.step()
    assert other.records == []
    monkeypatch.setattr(Changing, "SHIFT", 0.0)
    finish(one)
    other.close()
    with contextlib.closing(open_ledger(ledger)) as books:
        (account,) = books.accounts()
        stated = one.guarantee()
        assert books.spent(account, "models", stated.delta) == stated.epsilon


def test_an_equal_run_evaluates_again(tmp_path: Path) -> None:
    results = [finish(start(_prepared(**LOUD), tmp_path / name)) for name in ("a", "b")]
    assert results[0].evaluation == results[1].evaluation is not None


def stopped_at(scores: list[float], patience: int, monkeypatch: pytest.MonkeyPatch) -> Result:
    """A run whose noisy accuracies are these."""
    left = iter(scores)
    real = private_evaluation.outcomes.share

    def shared(table: Table) -> Interval:
        found = real(table)
        return found if len(drawn) % 2 else Interval(next(left, 0.0), found.low, found.high)

    drawn: list[int] = []
    monkeypatch.setattr(private_evaluation.outcomes, "share", shared)
    monkeypatch.setattr(
        private_evaluation, "_measured", _counting(private_evaluation._measured, drawn)
    )
    return trained(rounds=8, evaluate_every=1, patience=patience, **LOUD)


def _counting(real: Callable[..., Any], drawn: list[int]) -> Callable[..., Any]:
    def counted(plan: Any, metric: Any, *rest: Any) -> Any:
        drawn[:] = [0] if metric.name == "loss" else []
        return real(plan, metric, *rest)

    return counted


def test_a_run_stops_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best in evaluation 2, then none better twice: it stops after 4, and is finished."""
    result = stopped_at([0.5, 0.7, 0.7, 0.6, 0.9, 0.9], 2, monkeypatch)
    assert [r.accuracy for r in result.records] == [0.5, 0.7, 0.7, 0.6]
    assert result.stopped_early
    assert result.summary()["stopped_early"]
    assert result.accuracy == 0.9  # the final evaluation is that of the model it stopped at
    assert "Rounds: 8 planned, 4 run. ε is that of 8 rounds." in result.statement.text()


def test_a_run_that_improves_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    result = stopped_at([0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5], 2, monkeypatch)
    assert len(result.records) == 8
    assert not result.stopped_early


def test_a_stopped_run_spends_no_more_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final evaluation comes on top of that of the same round, once."""
    spent: list[float] = []
    real = Desk.sums

    def listening(desk: Desk, given: Contributions, cells: int, precision: float) -> np.ndarray:
        spent.append(precision)
        return real(desk, given, cells, precision)

    monkeypatch.setattr(Desk, "sums", listening)
    data = population()
    wrong = replace(data, test=Examples(data.test.inputs, 1 - data.test.labels[:],
                                        owners=data.test.owners))  # fmt: skip
    result = trained(wrong, rounds=30, evaluate_every=1, patience=1, **LOUD)
    assert len(result.records) < 30
    assert result.recipe.evaluation is not None
    assert sum(spent) <= result.recipe.evaluation.ratio**-2 * (1 + 1e-9)
    assert sum(spent) > 0.5 * result.recipe.evaluation.ratio**-2


def test_an_exact_stop_on_examples_of_clients_is_refused() -> None:
    data = replace(population(), tested_on_clients=True)
    with pytest.raises(UserError, match="would show them without noise"):
        fv.train(LOUD["recipe"], data, rounds=4, patience=1)
    assert len(fv.train(LOUD["recipe"], population(), rounds=4, patience=3).records) <= 4
    with pytest.raises(UserError, match="at least 1"):
        fv.train(LOUD["recipe"], population(), rounds=4, patience=0)


def test_a_stopped_run_is_listed_as_finished(tmp_path: Path) -> None:
    data = population()
    result = fv.train(
        LOUD["recipe"], data, rounds=40, evaluate_every=1, patience=1, save=tmp_path / "run"
    )
    assert result.stopped_early
    assert listed(tmp_path / "run").state == "finished"
    training = prepare(LOUD["recipe"], data, rounds=40, evaluate_every=1, patience=1)
    again = finish(resume(training, tmp_path / "run"))
    assert len(again.records) == len(result.records)


def test_a_numeric_target_needs_a_range() -> None:
    data = replace(population(), labels=population().labels.float(), loss="half_squared", classes=1)
    data = replace(
        data, test=Examples(data.test.inputs, data.test.labels[:].float(), owners=data.test.owners)
    )
    with pytest.raises(UserError, match="the range of these targets is not known"):
        trained(data, model="linear")


def test_metrics_with_a_table_of_their_own_are_released_if_they_are_asked_for() -> None:
    """Accuracy is not less precise because of top-5 accuracy, which nobody asked for."""
    data = population(8)
    plain = trained(data).evaluation
    assert plain is not None
    assert "top5" not in {one.name for one in plain.metrics}
    found = trained(data, metric="top5", private_evaluation=15.0).evaluation
    assert found is not None
    top, right = (next(m for m in found.metrics if m.name == n) for n in ("top5", "accuracy"))
    assert top.value is not None
    assert right.value is not None
    assert top.low is not None
    assert 0 <= top.low <= top.value <= 1
    ranking = trained(metric="average_precision", private_evaluation=15.0).evaluation
    assert ranking is not None
    assert ranking.metric == "average_precision"


def test_the_best_five_are_those_with_few_better() -> None:
    outputs = torch.tensor([[6.0, 5, 4, 3, 2, 1], [1.0, 1, 1, 1, 1, 1], [math.nan] * 6])
    for label, right in ((0, 1.0), (4, 1.0), (5, 0.0)):
        found = private_evaluation._among_first(outputs, torch.tensor([label] * 3))
        assert found.tolist() == [right, 1.0, 0.0]


@pytest.mark.parametrize("metric", ["rmse", "mae", "r2", "loss"])
def test_numbers_of_a_declared_range_are_evaluated(metric: str, tmp_path: Path) -> None:
    """In the unit of the table: 60 clients' costs between 0 and 200, about 100 ± 60."""
    rng = np.random.default_rng(0)
    rows = [
        f"{row % 60},{x:.3f},{100 + 100 * x:.2f}" for row, x in enumerate(rng.uniform(-1, 1, 240))
    ]
    (tmp_path / "t.csv").write_text("who,x,cost\n" + "\n".join(rows))
    data = fv.load_table(
        tmp_path / "t.csv", client="who", label="cost", target="number", holdout="rows",
        ranges={"cost": (0, 200), "x": (-1, 1)},
    ).split(fv.ByKey())  # fmt: skip
    found = trained(data, model="linear", metric=metric, private_evaluation=15.0).evaluation
    assert found is not None
    values = {one.name: one for one in found.metrics}
    assert set(values) == {"rmse", "mae", "loss"} | ({"r2"} if metric == "r2" else set())
    rmse, mae = values["rmse"], values["mae"]
    assert rmse.value is not None
    assert mae.value is not None
    assert rmse.low is not None
    assert rmse.high is not None
    assert 10 < rmse.low <= rmse.value <= rmse.high < 200
    assert 5 < mae.value < rmse.value + 20
    if metric == "r2":
        assert values["r2"].value is None or -1 <= values["r2"].value <= 1


def test_a_plan_gives_half_to_the_final_evaluation() -> None:
    plan = EvaluationPlan(
        1.0, 0.07, (2, 4, 6, 8, 10), "auc", ("accuracy", "loss", "classes", "scores"), 1.4
    )
    whole = plan.whole
    assert plan.precision(final=True) == pytest.approx(whole / 2)
    assert plan.precision(final=False) == pytest.approx(whole / 8)
    curve, final = plan.tables_of(False), plan.tables_of(True)
    assert set(curve) == {"accuracy", "loss", "scores"}
    assert curve["scores"] == pytest.approx(4 * curve["loss"])
    assert final["scores"] == pytest.approx(whole / 2 * 4 / 7)


@pytest.mark.parametrize("make", [scoring.Evaluation.from_plain])
def test_a_noisy_evaluation_is_read_back(make: Callable[..., scoring.Evaluation]) -> None:
    found = trained().evaluation
    assert found is not None
    assert make(json.loads(json.dumps(found.plain()))) == found
