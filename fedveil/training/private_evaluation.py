"""Private evaluation: metrics with noise, from the clients' own held-out examples.

A run plans its evaluations before the first round. Together they are one Gaussian release, which
the recipe's ε covers (docs/privacy.md, "Private evaluation").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedveil.aggregates import outcomes
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import Desk
from fedveil.aggregates.outcomes import Interval, Outcomes, Table
from fedveil.data.columns import digest
from fedveil.data.encoding import TableEncoder
from fedveil.data.federated import Federated
from fedveil.engines.isolation import made_up
from fedveil.engines.rewriting import Rewriting
from fedveil.engines.task import Parameters, Task
from fedveil.errors import UserError
from fedveil.models.loss import Loss
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.statistics import Statistics
from fedveil.random.streams import Key, run_key, stream
from fedveil.recipe import Recipe
from fedveil.training.metrics import TOP, Chosen, Metric
from fedveil.training.scoring import ClassResult, Evaluation, MeasuredMetric

FINAL = 0.5  # of the precision, for the final evaluation
MAIN = 4.0  # the precision of the main metric's table, over that of another one
BATCH = 2000  # examples at a time
MOST_CLASSES = 50  # of a table of classes: more cells are mostly noise
TABLES = {  # the table that each metric follows from
    "accuracy": "accuracy", "loss": "loss", "balanced_accuracy": "classes", "f1": "classes",
    "precision": "classes", "recall": "classes", "auc": "scores", "average_precision": "scores",
    "top5": "top5", "mae": "absolute", "rmse": "squared", "r2": "moments",
}  # fmt: skip
ASKED = ("top5", "moments")  # tables of one metric, released if it is the main one
LEAST_R2 = -1.0  # a smaller R² is shown as this
UNSOUND = {
    "calibration_error": "It adds up absolute differences, which noise makes larger: a model "
    "without any error would seem to have one.",
    "perplexity": "It grows without limit with the loss of single examples, which a noisy sum must "
    "clip. Use 'loss'.",
}


@dataclass(frozen=True)
class EvaluationPlan:
    """How the precision of all evaluations is divided: half for the final one, the rest equally.

    Each table of an evaluation gets a part, the main metric's table MAIN times that of another.
    """

    epsilon: float  # of all evaluations, by themselves
    whole: float  # their precision together
    rounds: tuple[int, ...]  # after which models are evaluated; after the last one, finally
    metric: str  # the main one
    tables: tuple[str, ...]  # of the final evaluation
    loss_limit: float  # larger losses count as this
    patience: int | None = None  # of the run: it decides which model has the final evaluation

    def precision(self, final: bool) -> float:
        """The share of one evaluation."""
        others = len(self.rounds) - 1
        if not others:
            return self.whole
        return FINAL * self.whole if final else (1 - FINAL) * self.whole / others

    def tables_of(self, final: bool) -> dict[str, float]:
        """The tables of an evaluation and the precision of each.

        A curve needs the loss, the accuracy and the main metric. The final evaluation has all.
        """
        main = TABLES[self.metric]
        kept = [t for t in self.tables if final or t in ("accuracy", "loss", main)]
        parts = {table: MAIN if table == main else 1.0 for table in kept}
        each = self.precision(final) / sum(parts.values())
        return {table: part * each for table, part in parts.items()}


def evaluated_rounds(rounds: int, every: int) -> tuple[int, ...]:
    """The rounds after which a run is evaluated.

    >>> evaluated_rounds(10, 4)
    (4, 8, 10)
    """
    return tuple(sorted({*range(every, rounds, every), rounds}))


def released(epsilon: float, delta: float, recipe: Recipe) -> Statistics:
    """All evaluations as one release that is (ε, δ)-DP under the recipe's adjacency.

    Replacing a unit moves the sums by √2, so they are half as precise.
    """
    precision = Allowance.gaussian(epsilon, delta).precision
    precision /= 2 if recipe.adjacency() == "replace-one" else 1
    return Statistics(precision**-0.5, 0.0)


def planned_evaluation(
    epsilon: float,
    delta: float,
    recipe: Recipe,
    data: Federated,
    loss: Loss,
    metrics: Chosen,
    rounds: tuple[int, ...],
    patience: int | None = None,
) -> EvaluationPlan:
    """The plan of a run's evaluations, after refusing what cannot be evaluated privately."""
    refuse_unfit(recipe)
    if not len(data.test):
        raise UserError(f"'{data.name}' has no test examples to evaluate on. Hold some out.")
    data.test_units()  # refuses examples of unknown owners
    if not any(metric.name == "loss" for metric in metrics.every):
        raise UserError("A private evaluation needs the metric 'loss'. Do not replace it.")
    main = metrics.main.name
    tables = _tables(loss, data)
    known = [name for name, table in TABLES.items() if table in tables]
    if main not in known:
        reason = UNSOUND[main] + " " if main in UNSOUND else ""
        raise UserError(
            f"The metric '{main}' cannot be computed from noisy sums. {reason}For these data, "
            f"a private evaluation has {', '.join(known)}."
        )
    tables = tuple(table for table in tables if table not in ASKED or table == TABLES[main])
    limit = loss_limit(loss, data)
    whole = released(epsilon, delta, recipe).ratio ** -2
    return EvaluationPlan(epsilon, whole, rounds, main, tables, limit, patience)


def refuse_unfit(recipe: Recipe) -> None:
    """Refuse recipes without noise, and those whose server is not trusted."""
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise, so its models have no guarantee that an evaluation "
            "could keep. Use a private algorithm, or remove private_evaluation."
        )
    if recipe.view != "models":
        raise UserError(
            f"A trusted server adds the noise of a private evaluation, but view '{recipe.view}' "
            "does not trust it. Use view 'models'."
        )
    if recipe.unit == "record":
        raise UserError(
            f"{recipe.name} protects records inside silos, whose evaluation a server does not see. "
            "Remove private_evaluation."
        )


def _tables(loss: Loss, data: Federated) -> tuple[str, ...]:
    """The tables that exist for the targets."""
    if loss.target == "number":
        return ("loss", "absolute", "squared", "moments")
    if loss.target == "label" or len(data.labels.shape) > 1:
        return ("accuracy", "loss")
    top = ("top5",) if data.classes > TOP else ()
    if data.classes > MOST_CLASSES:
        return ("accuracy", "loss", *top)
    return ("accuracy", "loss", "classes", *(("scores",) if data.classes == 2 else ()), *top)


def loss_limit(loss: Loss, data: Federated) -> float:
    """Where a loss is clipped: twice that of a uniform guess, or 1 for a scaled number.

    It is a function of public facts: the classes, the loss and its weights.
    """
    if loss.target == "number":
        if _target_range(data) is None:
            raise UserError(
                "A private evaluation clips losses, and the range of these targets is not known. "
                "Declare it, such as --data ranges='{cost=[0,2000]}'."
            )
        return 1.0
    weight: float = max([1.0, *getattr(loss, "weights", ()), getattr(loss, "positive", 1.0)])
    return 2 * weight * math.log(max(data.classes if loss.target == "class" else 2, 2))


def identity(plan: EvaluationPlan, data: Federated) -> tuple[str, ...]:
    """What the run's key must contain: two different releases never share noise."""
    test, units = data.test, data.test_units()
    parts = [digest(test.inputs), digest(test.labels), digest(torch.from_numpy(units))]
    return (str(plan), run_key("tested on", *parts))


def evaluate_privately(
    plan: EvaluationPlan,
    metrics: Chosen,
    task: Task,
    x: Tensor,
    data: Federated,
    key: Key,
    round: int,
    final: bool,
    together: bool,
) -> Evaluation:
    """One evaluation of the model x: noisy tables, and the metrics that follow from them.

    `together` evaluates many units in one call of the module, one example at a time; otherwise the
    module is called for one unit after the other. Either way a unit's outcomes depend on the model
    and its own examples only.
    """
    units, shares = data.test_units(), plan.tables_of(final)
    found = _outcomes(task, x, data, units, together, shares, plan.loss_limit)
    purpose = "final evaluation" if final else "evaluation"
    desk = Desk(Allowance(plan.precision(final), 0.0), stream(key, round, purpose))
    counted = units[found.kept]
    tables = {
        name: outcomes.tabulated(desk, counted, found.tables[name], precision)
        for name, precision in shares.items()
    }
    return _evaluation(plan, metrics, task.loss_of_examples.target, tables, data)


@dataclass(frozen=True, eq=False)
class _Found:
    """The outcomes of the test examples that count, by table."""

    kept: np.ndarray  # bool [test examples]
    tables: dict[str, Outcomes]


@torch.no_grad()
def _outcomes(
    task: Task,
    x: Tensor,
    data: Federated,
    units: np.ndarray,
    together: bool,
    tables: Any,
    limit: float,
) -> _Found:
    """Right or wrong, clipped loss, answered class and score of every test example.

    An example of which no position counts has no outcome.
    """
    loss, test = task.loss_of_examples, data.test
    count, parameters = len(test), task.at(x)
    right, losses, score, top, error, number = (np.zeros(count) for _ in range(6))
    target, answer = (np.zeros(count, dtype=np.int64) for _ in range(2))
    kept = np.zeros(count, dtype=bool)
    with refusing_randomness(task.module):
        for rows in _batches(units, together):
            few = torch.from_numpy(rows)
            labels = test.labels[few]
            outputs = _outputs(task, parameters, test.inputs[few].to(task.device), together).cpu()
            kept[rows] = loss.counted(labels).reshape(len(rows), -1).any(1).numpy()
            losses[rows] = loss(outputs, labels).double().numpy() / limit
            hits = loss.correct(outputs, labels)
            right[rows] = 0.0 if hits is None else hits.double().numpy()
            if "classes" in tables or "scores" in tables:
                target[rows], answer[rows] = labels.numpy(), outputs.argmax(-1).numpy()
                score[rows] = loss.answers(outputs, labels)[:, -1].double().numpy()
            if "top5" in tables:
                top[rows] = _among_first(outputs, labels)
            if loss.target == "number":
                number[rows] = labels.double().numpy()
                error[rows] = np.abs(loss.answers(outputs, labels).double().numpy() - number[rows])
    task.refuse_side_effects()
    makers: dict[str, Callable[[], Outcomes]] = {
        "accuracy": lambda: outcomes.split(right[kept]),
        "loss": lambda: outcomes.split(losses[kept]),
        "classes": lambda: outcomes.by_class(target[kept], answer[kept], data.classes),
        "scores": lambda: outcomes.by_score(target[kept], score[kept]),
        "top5": lambda: outcomes.split(top[kept]),
        "absolute": lambda: outcomes.split(error[kept]),
        "squared": lambda: outcomes.split(outcomes.unit_interval(error[kept]) ** 2),
        "moments": lambda: outcomes.moments(error[kept], number[kept]),
    }
    return _Found(kept, {name: makers[name]() for name in tables})


def _among_first(outputs: Tensor, labels: Tensor) -> np.ndarray:
    """Whether fewer than `TOP` classes have a larger output than the label; not for NaN."""
    own = outputs.gather(-1, labels[:, None])
    return ((outputs > own).sum(-1) < TOP).logical_and(own[:, 0].isfinite()).double().numpy()


def _batches(units: np.ndarray, together: bool) -> Iterator[np.ndarray]:
    """Many rows at a time, or all rows of one unit after the other."""
    if together:
        for start in range(0, len(units), BATCH):
            yield np.arange(start, min(start + BATCH, len(units)))
        return
    order = np.argsort(units, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(units[order])) + 1)


def _outputs(task: Task, parameters: Parameters, inputs: Tensor, together: bool) -> Tensor:
    """The outputs for several examples; of several units, the module sees one at a time."""
    if not together:
        return task.outputs(parameters, inputs)
    with Rewriting():
        found: Tensor = vmap(lambda one: task.outputs(parameters, one[None])[0])(inputs)
    return found


@torch.no_grad()
def can_map(task: Task, data: Federated) -> bool:
    """Whether the module can be mapped over single examples, tried on made-up ones."""
    try:
        _outputs(task, task.at(task.flatten()), made_up(data, 2).inputs[:].to(task.device), True)
    except Exception:  # a user's own module may raise anything
        return False
    return True


def _evaluation(
    plan: EvaluationPlan, metrics: Chosen, target: str, tables: dict[str, Table], data: Federated
) -> Evaluation:
    """The metrics that the tables show, each with its interval and its baseline."""
    known = [m for m in metrics.every if TABLES.get(m.name) in tables]
    found = tuple(_measured(plan, metric, tables, data) for metric in known)
    units = tables["accuracy" if "accuracy" in tables else "loss"].units
    classes = _classes(tables["classes"], data.class_names) if "classes" in tables else ()
    return Evaluation(
        plan.metric, target, max(0, round(units)), found, classes, data.unit, plan.epsilon
    )


def _measured(
    plan: EvaluationPlan, metric: Metric, tables: dict[str, Table], data: Federated
) -> MeasuredMetric:
    """A metric by its table, in its own unit."""
    table, scale = tables[TABLES[metric.name]], 1.0
    baseline: float | None = None
    match metric.name:
        case "loss":
            found, scale = outcomes.share(table), plan.loss_limit
        case "accuracy" | "top5":
            found = outcomes.share(table)
            if metric.name == "accuracy" and "classes" in tables:
                baseline = outcomes.largest_class(tables["classes"])
        case "mae" | "rmse":
            found, scale = outcomes.share(table), _width(data)
            found = outcomes.root(found) if metric.name == "rmse" else found
        case "r2":
            found, baseline = outcomes.measured(table, outcomes.r2, LEAST_R2), 0.0
        case "auc":
            found, baseline = outcomes.measured(table, outcomes.auc), 0.5
        case "average_precision":
            found = outcomes.ranked(table)
        case _:
            found, baseline = _of_classes(metric.name, table, data.classes)
    value, low, high = (end * scale if math.isfinite(found.value) else None for end in found)
    return MeasuredMetric(
        metric.name, value, low, high, baseline, metric.higher_is_better, metric.share
    )


def _of_classes(name: str, table: Table, classes: int) -> tuple[Interval, float | None]:
    """A mean over classes, and its baseline; nothing if noise hides one of them."""
    balanced = name == "balanced_accuracy"
    needed = np.arange(classes) if balanced or classes > 2 else np.array([1])
    kind = outcomes.recall if balanced else getattr(outcomes, name)
    found = outcomes.measured(table, kind(needed))
    if not np.isin(needed, outcomes.present(table)).all():
        found = outcomes.NOTHING
    return found, 1 / classes if balanced else None


def _width(data: Federated) -> float:
    """The width of the declared range, from which a numeric target was scaled."""
    low, high = _target_range(data) or (0.0, 1.0)
    return high - low


def _target_range(data: Federated) -> tuple[float, float] | None:
    return None if data.encoder is None else TableEncoder.from_json(data.encoder).target_range


def _classes(table: Table, names: tuple[str, ...]) -> tuple[ClassResult, ...]:
    """Recall, precision and F1 of every class; nothing for those that noise hides."""
    hits, missed, false = outcomes.per_class(table.cells)
    noise = outcomes.SHOWN * np.sqrt(5) * table.sigma
    there, answered = hits + missed > noise, hits + false > noise
    known = names if len(names) == len(hits) else tuple(map(str, range(len(hits))))
    nothing = Interval(math.nan, math.nan, math.nan)
    found = []
    for k, name in enumerate(known):
        place = np.array([k])
        recall = outcomes.measured(table, outcomes.recall(place)) if there[k] else nothing
        answers = outcomes.measured(table, outcomes.precision(place)) if answered[k] else nothing
        f1 = outcomes.measured(table, outcomes.f1(place)) if there[k] else nothing
        value, low, high = map(_finite, recall)
        weights = _whole(hits[k] + missed[k], there[k]), _whole(hits[k] + false[k], answered[k])
        others = _finite(answers.value), _finite(f1.value)
        found.append(ClassResult(str(name), *weights, value, low, high, *others))
    return tuple(found)


def _whole(weight: float, shown: bool) -> int:
    return max(0, round(float(weight))) if shown else 0


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
