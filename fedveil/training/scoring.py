"""Score a model on test examples: metrics with baselines and intervals, and results per class."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.encoding import TableEncoder
from fedveil.data.federated import Examples, Federated
from fedveil.engines.isolation import made_up
from fedveil.engines.task import Task
from fedveil.engines.where import explained
from fedveil.errors import UserError
from fedveil.training.evaluation import BATCH, MOST_CLASSES, evenly
from fedveil.training.metrics import KNOWN, Chosen, Metric

log = logging.getLogger("fedveil")
MOST_NUMBERS = 2**26  # outputs that are kept; of more test examples, evenly spaced ones are scored
MADE_UP, ROWS = 2**20, 32  # outputs that a metric is tried on, at most, and rows, at least
RESAMPLED = 2**20  # outputs that an interval is computed from
GROUPS = 20  # of the jackknife
LEVEL = 0.95
HOW = (
    f"{LEVEL:.0%} over test examples: Wilson intervals for shares of single examples, otherwise a "
    f"jackknife over {GROUPS} groups. Examples of one client are treated as independent."
)
NOISY = (
    f"{LEVEL:.0%} over the noise and the choice of units: test inversion for accuracy and loss, "
    "otherwise error propagation. Examples of one unit may depend on each other."
)


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's outputs on test examples, the first axis; sequences have positions as the second.

    Outputs are probabilities for classes and binary labels, and numbers otherwise.
    """

    target: str  # class, label or number
    targets: np.ndarray
    outputs: np.ndarray
    losses: np.ndarray  # of each example
    ignored: tuple[int, ...] = ()  # the classes of positions that do not count

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def sequence(self) -> bool:
        """Whether every example has several classes."""
        return self.target == "class" and self.targets.ndim > 1

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Targets and outputs with one row per prediction that counts."""
        if self.target != "class":
            return self.targets, self.outputs
        targets = self.targets.reshape(-1)
        outputs = self.outputs.reshape(len(targets), -1)
        if not np.isin(targets, self.ignored).any():
            return targets, outputs
        kept = ~np.isin(targets, self.ignored)
        return targets[kept], outputs[kept]

    def taken(self, rows: np.ndarray) -> Answers:
        """Only these examples."""
        return Answers(
            self.target, self.targets[rows], self.outputs[rows], self.losses[rows], self.ignored
        )

    def constant(self) -> Answers:
        """The same prediction for every example: the shares of the classes, or the mean."""
        targets, outputs = self.flat()
        if self.target == "class":
            best = np.bincount(targets, minlength=outputs.shape[-1]) / max(1, len(targets))
        else:
            best = targets.mean(0, keepdims=True)
        same = np.broadcast_to(best, outputs.shape)
        return Answers(self.target, targets, np.asarray(same), np.full(len(targets), math.nan))


@torch.no_grad()
def answers(task: Task, x: Tensor, data: Federated) -> Answers:
    """The model's outputs on all test examples, or on evenly spaced ones if there are too many.

    Numbers are in the unit of the data, also where training scaled them.
    """
    test = data.test
    parameters, loss = task.at(x), task.loss_of_examples
    rows = torch.from_numpy(evenly(len(test), _affordable(task, x, test)))
    targets, outputs, losses = [], [], []
    for start in range(0, len(rows), BATCH):
        few = rows[start : start + BATCH]
        labels = test.labels[few]
        found = task.outputs(parameters, test.inputs[few].to(task.device)).cpu()
        targets.append(labels.numpy())
        losses.append(loss(found, labels).double().numpy())
        outputs.append(loss.answers(found, labels).numpy())
    whole = [np.concatenate(part) for part in (targets, outputs, losses)]
    if loss.target == "number" and data.encoder is not None:
        encoder = TableEncoder.from_json(data.encoder)
        whole[:2] = [encoder.restored(part) for part in whole[:2]]
    return Answers(loss.target, whole[0], whole[1], whole[2], loss.ignored)


def _affordable(task: Task, x: Tensor, test: Examples) -> int:
    one = task.outputs(task.at(x), test.inputs[:1].to(task.device, copy=True)).numel()
    return max(1, MOST_NUMBERS // max(1, one))


@dataclass(frozen=True)
class MeasuredMetric:
    """One metric of a model; None where it is not defined."""

    name: str
    value: float | None
    low: float | None = None  # of the interval
    high: float | None = None
    baseline: float | None = None  # of a constant prediction
    higher_is_better: bool = True
    share: bool = False


@dataclass(frozen=True)
class ClassResult:
    """Results on the test examples of one class."""

    name: str
    examples: int
    predicted: int  # how often the model predicts this class
    recall: float | None
    low: float | None  # of the interval of the recall
    high: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True)
class Evaluation:
    """All metrics of a model on test examples. Private data, unless they carry noise.

    With noise, the run's ε covers them, every unit counts once, and `examples` and the counts of
    classes are noisy numbers of units.
    """

    metric: str  # the main one
    target: str
    examples: int
    metrics: tuple[MeasuredMetric, ...]
    classes: tuple[ClassResult, ...] = ()
    unit: str = "example"  # what counts once
    epsilon: float | None = None  # of all evaluations of the run, if they carry noise

    @property
    def main(self) -> MeasuredMetric:
        """The metric that ranks runs."""
        return next(m for m in self.metrics if m.name == self.metric)

    def __getitem__(self, name: str) -> float | None:
        return {m.name: m.value for m in self.metrics}[name]

    def plain(self) -> dict[str, Any]:
        """As plain values, for summary.json."""
        lists = {"metrics": [*map(asdict, self.metrics)], "classes": [*map(asdict, self.classes)]}
        found = {**asdict(self), **lists, "interval": HOW if self.exact else NOISY}
        if self.exact:  # as versions before 0.3 write it
            del found["unit"], found["epsilon"]
        return found

    @property
    def exact(self) -> bool:
        """Whether the metrics carry no noise."""
        return self.epsilon is None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Evaluation:
        """Read the output of `plain`."""
        return cls(
            str(plain["metric"]),
            str(plain["target"]),
            int(plain["examples"]),
            tuple(MeasuredMetric(**m) for m in plain["metrics"]),
            tuple(ClassResult(**c) for c in plain["classes"]),
            str(plain.get("unit", "example")),
            plain.get("epsilon"),
        )


def evaluated(found: Answers, metrics: Chosen, names: Sequence[str] = ()) -> Evaluation:
    """Every metric with its baseline and interval, and the results of each class."""
    constant = found.constant()
    measured = tuple(_measured(metric, found, constant) for metric in metrics.every)
    classes = _classes(found, names) if found.target == "class" else ()
    return Evaluation(metrics.main.name, found.target, len(found), measured, classes)


def from_confusion(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Evaluation:
    """What counts[true][predicted] say: accuracy with its baseline, and the recall of classes."""
    table = np.asarray(counts)
    right, examples, predicted = np.diag(table), table.sum(1), table.sum(0)
    total = int(table.sum())
    accuracy = MeasuredMetric(
        "accuracy", int(right.sum()) / max(1, total), *wilson(int(right.sum()), total),
        int(examples.max()) / max(1, total), share=True,
    )  # fmt: skip
    classes = tuple(
        ClassResult(
            str(name), int(examples[k]), int(predicted[k]),
            int(right[k]) / int(examples[k]) if examples[k] else None,
            *wilson(int(right[k]), int(examples[k])),
            int(right[k]) / int(predicted[k]) if predicted[k] else None,
            2 * int(right[k]) / max(1, int(examples[k] + predicted[k])),
        )
        for k, name in enumerate(names)
    )  # fmt: skip
    return Evaluation("accuracy", "class", total, (accuracy,), classes)


def tried(metrics: Chosen, task: Task, data: Federated) -> Chosen:
    """The metrics, if the user's own ones can score made-up answers: real ones cost ε first."""
    known = KNOWN[task.loss_of_examples.target].values()
    own = [metric for metric in metrics.every if metric not in known]
    made = [_made_up(task, data)] if own else []
    for metric, found in itertools.product(own, made):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random answers mean nothing
            _, failure = attempted(metric, found)
        if failure:
            raise UserError(
                f"The metric '{metric.name}' failed on made-up answers. {failure} A metric takes "
                "(targets, outputs), in this order; a loss takes (outputs, targets)."
            )
    return metrics


@torch.no_grad()
def _made_up(task: Task, data: Federated) -> Answers:
    """Random answers in the shapes of real ones: probabilities for every class, or numbers 0…1.

    Numbers are in the unit of the data, and within the range that is declared for them.
    """
    loss, rng = task.loss_of_examples, np.random.default_rng(0)
    if loss.target == "class":
        rows = max(2, min(max(ROWS, 2 * data.classes), MADE_UP // data.classes))
        shares = rng.random((rows, data.classes), dtype=np.float32)
        shares /= shares.sum(1, keepdims=True)
        return Answers("class", np.arange(rows) % data.classes, shares, np.zeros(rows))
    few = made_up(data, ROWS)
    outputs = loss.answers(task.outputs(task.at(task.flatten()), few.inputs[:]), few.labels[:])
    shapes = tuple(few.labels.shape), tuple(outputs.shape)
    targets, answered = (rng.random(shape, dtype=np.float32) for shape in shapes)
    if loss.target == "label":
        targets = targets.round()
    elif data.encoder is not None:
        encoder = TableEncoder.from_json(data.encoder)
        targets, answered = encoder.restored(targets), encoder.restored(answered)
    return Answers(loss.target, targets, answered, np.zeros(ROWS))


def attempted(metric: Metric, found: Answers) -> tuple[float, str]:
    """The value of a metric, NaN where it is not defined, and what it raised; empty if nothing.

    It may be a user's own function, and must not end a run that is charged already.
    """
    try:
        if metric.name == "loss":
            return float(found.losses.mean()) if len(found) else math.nan, ""
        return metric(*found.flat()), ""
    except UserError as problem:
        return math.nan, str(problem)
    except Exception as problem:  # a user's own function may raise anything
        return math.nan, f"{type(problem).__name__}: {explained(problem)}."


def scored(metric: Metric, found: Answers) -> float:
    """The value of a metric; NaN where it is not defined, or fails."""
    return attempted(metric, found)[0]


def _measured(metric: Metric, found: Answers, constant: Answers) -> MeasuredMetric:
    value, failure = attempted(metric, found)
    if failure:
        log.warning(
            "The metric '%s' failed on the test examples and has no value: %s", metric.name, failure
        )
    low, high = _interval(metric, found, value)
    baseline = scored(metric, constant) if metric.compared else math.nan
    ends = _finite(low), _finite(high), _finite(baseline)
    return MeasuredMetric(metric.name, _finite(value), *ends, metric.higher_is_better, metric.share)


def _interval(metric: Metric, found: Answers, value: float) -> tuple[float, float]:
    if not math.isfinite(value):
        return math.nan, math.nan
    if metric.name == "accuracy" and found.target == "class" and not found.sequence:
        return wilson(round(value * len(found)), len(found))
    margin = jackknife(metric, found)
    low, high = value - margin, value + margin
    return (max(low, 0.0), min(high, 1.0)) if metric.share else (low, high)


def wilson(successes: int, of: int) -> tuple[float, float]:
    """The Wilson interval of a share.

    >>> tuple(round(end, 3) for end in wilson(0, 100))
    (0.0, 0.037)
    """
    from scipy.stats import binomtest

    if not of:
        return math.nan, math.nan
    found = binomtest(successes, of).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def jackknife(metric: Metric, found: Answers) -> float:
    """t·√((g−1)/g·Σ(s_i − s̄)²), s_i without group i: half the width of an interval.

    Of many examples, evenly spaced ones give the variance, which shrinks with their number.
    """
    from scipy.special import stdtrit

    each = max(1, found.outputs[0].size)
    rows = evenly(len(found), max(GROUPS, RESAMPLED // each))
    groups = min(GROUPS, len(rows))
    if groups < 2:
        return math.nan
    dealt = np.random.default_rng(0).permutation(len(rows)) % groups  # the same for every metric
    without = [scored(metric, found.taken(rows[dealt != group])) for group in range(groups)]
    scores = np.array(without)
    if not np.isfinite(scores).all():
        return math.nan
    variance = (groups - 1) / groups * float(((scores - scores.mean()) ** 2).sum())
    few = len(rows) / len(found)
    return float(stdtrit(groups - 1, (1 + LEVEL) / 2)) * math.sqrt(variance * few)


def _classes(found: Answers, names: Sequence[str]) -> tuple[ClassResult, ...]:
    """Recall, precision and F1 of every class, unless there are too many to read."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    targets, outputs = found.flat()
    count = outputs.shape[-1]
    if count > MOST_CLASSES or not len(targets):
        return ()
    answers, labels = outputs.argmax(-1), np.arange(count)
    precision, recall, f1, examples = precision_recall_fscore_support(
        targets, answers, labels=labels, zero_division=0
    )
    table = confusion_matrix(targets, answers, labels=labels)
    right, predicted = np.diag(table), table.sum(0)
    known = [*map(str, names)] if len(names) == count else [*map(str, labels)]
    return tuple(
        ClassResult(
            known[k], int(examples[k]), int(predicted[k]),
            float(recall[k]) if examples[k] else None,
            *_recall_interval(found, int(right[k]), int(examples[k])),
            float(precision[k]) if predicted[k] else None,
            float(f1[k]) if examples[k] or predicted[k] else None,
        )
        for k in range(count)
    )  # fmt: skip


def _recall_interval(found: Answers, right: int, of: int) -> tuple[float | None, float | None]:
    """None for sequences, whose positions are not independent."""
    if found.sequence or not of:
        return None, None
    return wilson(right, of)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
