"""Metrics: scores of predictions on test examples, computed by scikit-learn, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedveil.errors import UserError, told, unknown
from fedveil.serialization.arguments import check_fields

Score = Callable[[np.ndarray, np.ndarray], float]  # (targets, outputs)
BINS = 15  # of confidence, for the calibration error
TOP = 5


@dataclass(frozen=True)
class Metric:
    """score(targets, outputs) of test examples.

    For classes, targets are numbers [n] and outputs are probabilities [n, classes]. For binary
    labels, both are [n] or [n, labels]. For numeric targets, both are [n]. `share` says that it is
    shown in percent, and `compared` that a constant prediction is a meaningful baseline.

    >>> Metric("cost", lambda targets, outputs: float(abs(targets - outputs).sum()),
    ...        higher_is_better=False, share=False).name
    'cost'
    """

    name: str
    score: Score
    higher_is_better: bool = True
    share: bool = False  # whether it lies between 0 and 1, and is shown in percent
    compared: bool = True  # whether a constant prediction is a meaningful baseline

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, targets: np.ndarray, outputs: np.ndarray) -> float:
        """The score; NaN where it is not defined, such as an AUC of examples of one class."""
        from sklearn import config_context

        if not len(targets):
            return math.nan
        with config_context(assume_finite=True, skip_parameter_validation=True):
            return self._number(self.score(targets, outputs))

    def _number(self, found: Any) -> float:
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UserError(
                f"The metric '{self.name}' returned {told(found)}. Return a number."
            ) from None


def _predicted(outputs: np.ndarray) -> np.ndarray:
    """The most probable class, or for binary labels whether the probability exceeds ½."""
    return np.asarray(outputs.argmax(-1))


def _accuracy(targets: np.ndarray, outputs: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(targets, _predicted(outputs)))


def _balanced_accuracy(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The mean recall of the classes that occur."""
    from sklearn.metrics import recall_score

    return float(
        recall_score(
            targets, _predicted(outputs), labels=np.unique(targets), average="macro",
            zero_division=0,
        )
    )  # fmt: skip


def _of_classes(name: str) -> Score:
    """Precision, recall or F1 of the second of two classes; of more, the mean over classes."""

    def score(targets: np.ndarray, outputs: np.ndarray) -> float:
        from sklearn import metrics

        labels = [1] if outputs.shape[-1] == 2 else np.unique(targets)
        found = getattr(metrics, f"{name}_score")(
            targets, _predicted(outputs), labels=labels, average="macro", zero_division=0
        )
        return float(found)

    return score


def _ranking(name: str) -> Score:
    """A ranking score of the second of two classes; of more, the mean of each against the rest."""

    def score(targets: np.ndarray, outputs: np.ndarray) -> float:
        from sklearn import metrics

        if not np.isfinite(outputs).all():
            return math.nan
        compute = getattr(metrics, name)
        known = np.unique(targets)
        if len(known) < 2:
            return math.nan
        classes = known[known == 1] if outputs.shape[-1] == 2 else known
        return float(np.mean([compute(targets == c, outputs[:, c]) for c in classes]))

    return score


def _of_labels(name: str) -> Score:
    """A ranking score of binary labels: the mean over the labels that occur with both values."""

    def score(targets: np.ndarray, outputs: np.ndarray) -> float:
        from sklearn import metrics

        truth, found = targets.reshape(len(targets), -1), outputs.reshape(len(outputs), -1)
        mixed = [k for k in range(truth.shape[1]) if 0 < truth[:, k].mean() < 1]
        compute = getattr(metrics, name)
        if not mixed or not np.isfinite(found).all():
            return math.nan
        return float(np.mean([compute(truth[:, k] > 0.5, found[:, k]) for k in mixed]))

    return score


def _labels_right(targets: np.ndarray, outputs: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score((targets > 0.5).ravel(), (outputs > 0.5).ravel()))


def _labels_f1(targets: np.ndarray, outputs: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    truth, found = (part.reshape(len(part), -1) > 0.5 for part in (targets, outputs))
    several = truth.shape[1] > 1
    kind = "macro" if several else "binary"
    return float(
        f1_score(
            truth if several else truth[:, 0], found if several else found[:, 0], average=kind,
            zero_division=0,
        )
    )  # fmt: skip


def _calibration_error(targets: np.ndarray, outputs: np.ndarray) -> float:
    """Σ share of a bin · |accuracy − confidence|, over bins of the predicted probability."""
    from sklearn.calibration import calibration_curve

    confidence = outputs.max(-1).clip(0, 1)
    if not np.isfinite(confidence).all():
        return math.nan
    right = _predicted(outputs) == targets
    edges = np.linspace(0, 1, BINS + 1)
    counts = np.bincount(np.searchsorted(edges[1:-1], confidence), minlength=BINS)
    accuracy, mean = calibration_curve(right, confidence, n_bins=BINS, pos_label=True)
    return float((counts[counts > 0] * np.abs(accuracy - mean)).sum() / len(targets))


def _top(targets: np.ndarray, outputs: np.ndarray) -> float:
    from sklearn.metrics import top_k_accuracy_score

    classes = np.arange(outputs.shape[-1])
    if len(classes) <= TOP:
        return 1.0
    return float(top_k_accuracy_score(targets, outputs, k=TOP, labels=classes))


def _perplexity(targets: np.ndarray, outputs: np.ndarray) -> float:
    """exp of the mean −log p(target)."""
    from sklearn.metrics import log_loss

    if not np.isfinite(outputs).all():
        return math.nan
    whole = outputs.astype(np.float64)
    whole /= whole.sum(-1, keepdims=True)
    return math.exp(log_loss(targets, whole, labels=np.arange(outputs.shape[-1])))


def _number(name: str) -> Score:
    def score(targets: np.ndarray, outputs: np.ndarray) -> float:
        from sklearn import metrics

        if not np.isfinite(outputs).all():
            return math.nan
        if name == "r2_score" and len(targets) < 2:
            return math.nan
        return float(getattr(metrics, name)(targets, outputs))

    return score


def _measured_elsewhere(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The loss is the mean of the losses that training minimizes (scoring.py)."""
    return math.nan


LOSS = Metric("loss", _measured_elsewhere, higher_is_better=False)
CLASSES = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _accuracy, share=True),
        Metric("balanced_accuracy", _balanced_accuracy, share=True),
        Metric("auc", _ranking("roc_auc_score"), share=True),
        Metric("average_precision", _ranking("average_precision_score"), share=True),
        Metric("f1", _of_classes("f1"), share=True),
        Metric("precision", _of_classes("precision"), share=True),
        Metric("recall", _of_classes("recall"), share=True),
        Metric("calibration_error", _calibration_error, False, share=True, compared=False),
        Metric("top5", _top, share=True),
        Metric("perplexity", _perplexity, higher_is_better=False),
        LOSS,
    )
}
LABELS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _labels_right, share=True),
        Metric("auc", _of_labels("roc_auc_score"), share=True),
        Metric("average_precision", _of_labels("average_precision_score"), share=True),
        Metric("f1", _labels_f1, share=True),
        LOSS,
    )
}
NUMBERS = {
    metric.name: metric
    for metric in (
        Metric("rmse", _number("root_mean_squared_error"), higher_is_better=False),
        Metric("mae", _number("mean_absolute_error"), higher_is_better=False),
        Metric("r2", _number("r2_score")),
        LOSS,
    )
}
KNOWN: dict[str, dict[str, Metric]] = {"class": CLASSES, "label": LABELS, "number": NUMBERS}
TITLES = {
    "auc": "AUC", "average_precision": "average precision", "f1": "F1", "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy", "calibration_error": "calibration error",
    "mae": "mean absolute error", "rmse": "root mean squared error", "r2": "R²",
}  # fmt: skip


def titled(name: str) -> str:
    """The name of a metric in a sentence.

    >>> titled("auc"), titled("own_cost")
    ('AUC', 'own cost')
    """
    return TITLES.get(name, name.replace("_", " "))


def usual(target: str, classes: int, sequence: bool) -> list[Metric]:
    """The metrics that are reported for a task unless the user chooses others."""
    if target != "class":
        return list(KNOWN[target].values())
    if sequence:
        names = ["accuracy", "top5", "perplexity", "loss"]
    elif classes == 2:
        names = ["accuracy", "balanced_accuracy", "auc", "average_precision", "f1"]
        names += ["calibration_error", "loss"]
    else:
        names = ["accuracy", "balanced_accuracy", "f1", "top5", "calibration_error", "loss"]
    return [CLASSES[name] for name in names if name != "top5" or classes > TOP]


@dataclass(frozen=True)
class Chosen:
    """The metric that ranks runs, and all metrics that are reported."""

    main: Metric
    every: tuple[Metric, ...]
    named: bool = False  # whether the user chose the main metric


def chosen(
    metric: str | Metric | Score | None,
    own: Mapping[str, Score] | Iterable[Metric] | None,
    target: str,
    classes: int,
    sequence: bool = False,
) -> Chosen:
    """The usual metrics of a task, the user's own, and the main one: accuracy or loss by default.

    `metric` is a name, a `Metric`, a function (targets, outputs), or package.module:function.
    """
    extra = _own(own)
    every = {m.name: m for m in (*usual(target, classes, sequence), *extra)}
    if metric is None:
        main = every.get("accuracy", LOSS)
    elif callable(metric):
        main = as_metric(_name_of(metric), metric)
    else:
        main = every.get(metric) or _named(metric, target, extra)
    return Chosen(main, tuple({**every, main.name: main}.values()), metric is not None)


def _named(name: str, target: str, own: Sequence[Metric]) -> Metric:
    if not isinstance(name, str):
        raise UserError(
            f"metric is {name!r}. Give the name of a metric, such as 'auc', or a fedveil.Metric."
        )
    if ":" in name:
        from fedveil.serialization.imports import imported

        return as_metric(name.partition(":")[2], imported(name, "metric", "function", "mine:cost"))
    known = KNOWN[target]
    if name in known:
        return known[name]
    others = [kind for kind, metrics in KNOWN.items() if name in metrics]
    if others:
        raise UserError(
            f"The metric '{name}' is for targets of kind '{others[0]}', but these are of kind "
            f"'{target}'. Use one of {', '.join(known)}."
        )
    raise unknown("metric", name, [*known, *(m.name for m in own), "package.module:function"])


def _own(given: Mapping[str, Score] | Iterable[Metric] | None) -> list[Metric]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [as_metric(str(name), score) for name, score in given.items()]
    if isinstance(given, str | Metric | Tensor | np.ndarray) or callable(given):
        raise UserError("metrics is not a dict. Give metrics={'name': function}.")
    return [as_metric(_name_of(score), score) for score in given]


def _name_of(score: Any) -> str:
    """A function's own name; "metric" of one without a name, such as a lambda."""
    name = str(getattr(score, "__name__", ""))
    return name if name.isidentifier() else "metric"


def as_metric(name: str, score: Any) -> Metric:
    """A function (targets, outputs) → float as a metric; higher is better unless it says so."""
    if isinstance(score, Metric):
        return score
    if not callable(score) or isinstance(score, type):
        raise UserError(
            f"The metric '{name}' is a {type(score).__name__}. Give a function of targets and "
            "outputs that returns a number, or a fedveil.Metric."
        )
    return Metric(name, score, bool(getattr(score, "higher_is_better", True)))


def shown(value: float | None, share: bool) -> str:
    """A score for reading.

    >>> shown(0.98123, True), shown(12.3456, False), shown(None, True)
    ('98.1%', '12.35', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1%}" if share else f"{value:.4g}"
