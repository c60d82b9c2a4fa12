"""Rules about the model's answers: one class only, classes it never answers, a useless model."""

from __future__ import annotations

from dataclasses import replace

from fedveil.diagnosis.rule import Finding, Numbers, Rule
from fedveil.diagnosis.run import DiagnosedRun
from fedveil.training.metrics import shown, titled
from fedveil.training.scoring import ClassResult, Evaluation, MeasuredMetric

RARE = 5  # examples of a class: with fewer, no answer may be chance
FEW = 0.1  # recall below which nearly all examples of a class are missed
RARER = 2  # the most frequent class has this many times the examples of a rare one
MOST_WEIGHT = 100.0  # of a suggested class weight


class AnswerRule(Rule):
    """A rule whose sentence names classes, which are not numbers."""

    def __call__(self, run: DiagnosedRun) -> Finding | None:
        """The finding with the names of the run's classes."""
        found = super().__call__(run)
        if found is None or run.evaluation is None:
            return found
        return replace(found, evidence=EVIDENCE[self.name](run.evaluation))


def _tested(run: DiagnosedRun) -> list[ClassResult]:
    """The classes with enough test examples."""
    found = run.evaluation
    return [] if found is None else [c for c in found.classes if c.examples >= RARE]


def _answers(run: DiagnosedRun) -> Numbers | None:
    tested = _tested(run)
    if run.evaluation is None or not run.evaluation.exact or len(tested) < 2:
        return None  # noise hides classes that are rarely answered
    answered = [c for c in run.evaluation.classes if c.predicted]
    worst = min(tested, key=lambda c: c.recall or 0.0)
    most = max(tested, key=lambda c: c.examples)
    return {
        "answered": float(len(answered)),
        "recall": worst.recall or 0.0,
        "examples": float(worst.examples),
        "weight": min(MOST_WEIGHT, most.examples / worst.examples),
        "classes": float(len(run.evaluation.classes)),
        "place": float(run.evaluation.classes.index(worst)),
        "auc": _ranking(run.evaluation),
        "bounded": float(run.recipe.private),
    }


def _ranking(found: Evaluation) -> float:
    """The AUC of a model of two classes if its interval is above ½, else 0."""
    auc = next((m for m in found.metrics if m.name == "auc"), None)
    sure = auc is not None and auc.value is not None and auc.low is not None and auc.low > 0.5
    return auc.value or 0.0 if auc is not None and sure and len(found.classes) == 2 else 0.0


def _weighted(run: DiagnosedRun, n: Numbers) -> str:
    """A loss with a larger weight for the missed class, for a model of few classes.

    None for a bounded model that ranks well: there weights change little (docs/metrics.md).
    """
    if n["classes"] > 10 or n["weight"] < RARER or (n["auc"] and n["bounded"]):
        return ""
    weights = ["1"] * int(n["classes"])
    weights[int(n["place"])] = f"{n['weight']:.0f}"
    return f"--loss 'cross_entropy(weights=[{','.join(weights)}])'"


def _other_answers(n: Numbers) -> str:
    """Use the ranking if there is one, else weight a rare class; another one needs training."""
    if not n["auc"] and n["weight"] < RARER:
        return (
            "train for more rounds, or follow the advice below. The class is not rare, so a larger "
            "weight for it is no remedy"
        )
    if not n["auc"]:
        return (
            "give the rare class a larger weight in the loss, and rank runs by --metric auc or "
            "balanced_accuracy"
        )
    weights = (
        "class weights change little here, because the bound gives clients without the rare class "
        "as much influence as those with it"
        if n["bounded"]
        else "class weights in the loss also help"
    )
    return (
        f"the model ranks well (AUC {n['auc']:.1%}), so choose the share of rows that it predicts "
        f"as the rare class: fedveil predict RUN TABLE --alert-rate 0.1. {weights.capitalize()}"
    )


def _one_class(found: Evaluation) -> str:
    """`the model predicts 'no' for all 8,012 test examples: 153 of 153 'yes' are missed, …`."""
    only = next(c for c in found.classes if c.predicted)
    missed = [c for c in found.classes if c is not only and c.examples]
    counts = sum(c.examples for c in missed)
    which = f"of '{missed[0].name}'" if len(missed) == 1 else "of other classes"
    total = only.predicted
    return (
        f"the model predicts '{only.name}' for every one of {total:,} test examples. It misses "
        f"{counts:,} of {counts:,} examples {which}. Its accuracy of "
        f"{only.examples / max(1, total):.1%} is only the share of '{only.name}'"
    )


def _missed(found: Evaluation) -> str:
    """The class that is missed most, with its counts."""
    worst = min((c for c in found.classes if c.examples >= RARE), key=lambda c: c.recall or 0.0)
    gone = worst.examples - round((worst.recall or 0.0) * worst.examples)
    others = [c for c in found.classes if c.examples >= RARE and (c.recall or 0.0) < FEW]
    more = f". {len(others)} classes are missed in this way" if len(others) > 1 else ""
    rare = 2 * worst.examples * len(found.classes) < sum(c.examples for c in found.classes)
    hidden = ". Accuracy hides this, because the class is rare" if rare else ""
    return (
        f"the model misses {gone:,} of {worst.examples:,} test examples of '{worst.name}'"
        f"{more}{hidden}"
    )


def _useless(found: Evaluation) -> str:
    main = _judging(found)
    assert main is not None
    return (
        f"the model is not measurably better than a constant prediction: {titled(main.name)} "
        f"{shown(main.value, main.share)} (95% interval {shown(main.low, main.share)} to "
        f"{shown(main.high, main.share)}), against {shown(main.baseline, main.share)}"
    )


EVIDENCE = {"one class": _one_class, "missed class": _missed, "no better than constant": _useless}


def _judging(found: Evaluation) -> MeasuredMetric | None:
    """The main metric, or for classes balanced accuracy, that a constant prediction cannot win."""
    fair = ("auc", "balanced_accuracy", "r2")
    known = [m for m in found.metrics if m.name in (found.metric, *fair)]
    usable = [m for m in known if None not in (m.value, m.low, m.high, m.baseline)]
    return next((m for m in usable if m.name in fair), next(iter(usable), None))


def _margin(run: DiagnosedRun) -> Numbers | None:
    main = None if run.evaluation is None else _judging(run.evaluation)
    if main is None or main.low is None or main.high is None or main.baseline is None:
        return None
    sign = 1.0 if main.higher_is_better else -1.0
    ends = sorted((sign * main.low, sign * main.high))
    alone = _answers(run)
    return {
        "margin": ends[0] - sign * main.baseline,
        "told": float(alone is not None and alone["answered"] <= 1),
    }


ONE_CLASS = AnswerRule(
    "one class",
    _answers,
    lambda n: n["answered"] <= 1,
    lambda n: "the model predicts one class only",
    lambda n: _other_answers(n),
    command=_weighted,
)

MISSED = AnswerRule(
    "missed class",
    _answers,
    lambda n: n["answered"] > 1 and n["recall"] < FEW,
    lambda n: "the model misses a class",
    lambda n: _other_answers(n),
    command=_weighted,
)

USELESS = AnswerRule(
    "no better than constant",
    _margin,
    lambda n: n["margin"] <= 0 and not n["told"],
    lambda n: "the model is not measurably better than a constant prediction",
    lambda n: "train for more rounds, or follow the advice below",
)


def one_class(found: Evaluation | None) -> str | None:
    """The sentence on a model that predicts one class only; None for any other model."""
    if found is None or not found.exact or sum(c.predicted > 0 for c in found.classes) != 1:
        return None
    return _one_class(found) if sum(c.examples > 0 for c in found.classes) > 1 else None


RULES = (ONE_CLASS, MISSED, USELESS)
