"""The verdict of a report, the metrics with their baselines, and the results of each class."""

from __future__ import annotations

import html

from fedveil.errors import UserError
from fedveil.reporting.chart import ChartTable
from fedveil.reporting.load import ReportMember, Run, Story
from fedveil.training.metrics import shown, titled
from fedveil.training.scoring import (
    HOW,
    NOISY,
    ClassResult,
    Evaluation,
    MeasuredMetric,
    from_confusion,
)


def verdict(story: Story, best: ReportMember) -> str:
    """The sentence of `fedveil diagnose` on the run, or on the best setting of a comparison."""
    from fedveil.diagnosis.diagnose import diagnose

    try:
        found = diagnose(best.first.path)
    except UserError:  # of a run whose parts cannot be imported any more
        return ""
    whom = "" if story.alone else f"{best.label}: "
    kind = "bad" if found.useless else "warn" if found.wrong else "good"
    return f'<p class="verdict {kind}" role="status">{html.escape(whom + found.verdict())}</p>'


def scores_of(run: Run) -> Evaluation | None:
    """A run's metrics; of an earlier version's run, what its confusion matrix says."""
    if run.scores is not None:
        return run.scores
    if run.evaluation is None or run.evaluation["confusion"] is None:
        return None
    return from_confusion(run.evaluation["classes"], run.evaluation["confusion"])


def metrics_table(found: Evaluation) -> ChartTable:
    """Each metric, its interval, and a constant prediction beside it; the main one first."""
    order = sorted(found.metrics, key=lambda m: m.name != found.metric)
    rows = [_metric_row(m) for m in order if m.value is not None]
    return ChartTable(["metric", "value", "95% interval", "constant baseline"], rows)


def _metric_row(m: MeasuredMetric) -> list[str]:
    ends = f"{shown(m.low, m.share)} – {shown(m.high, m.share)}" if m.low is not None else "–"
    better = "" if m.higher_is_better else " (lower is better)"
    return [titled(m.name) + better, shown(m.value, m.share), ends, shown(m.baseline, m.share)]


def classes_table(found: Evaluation) -> ChartTable:
    """Each class: how many test examples it has, how often it is answered, and how well."""
    head = ["class", "examples", "predicted", "recall", "95% interval", "precision"]
    return ChartTable([*head, "F1"], [_class_row(c) for c in found.classes])


def _class_row(c: ClassResult) -> list[str]:
    ends = f"{shown(c.low, True)} – {shown(c.high, True)}" if c.low is not None else "–"
    hits = "–" if c.recall is None else f"{round(c.recall * c.examples):,} of {c.examples:,}"
    recall = "–" if c.recall is None else f"{shown(c.recall, True)} ({hits})"
    return [
        c.name, f"{c.examples:,}", f"{c.predicted:,}", recall, ends, shown(c.precision, True),
        shown(c.f1, True),
    ]  # fmt: skip


def caption(found: Evaluation, several: bool) -> str:
    """What the tables are about."""
    seed = " First seed." if several else ""
    if not found.exact:
        return (
            f"Noisy results of about {found.examples:,} {found.unit}s on their held-out examples, "
            f"each counted once. The run's ε covers them.{seed} Intervals: {NOISY}"
        )
    return f"{found.examples:,} test examples.{seed} Intervals: {HOW}"
