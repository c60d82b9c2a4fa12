"""Result: the trained model, its records and its privacy statement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedveil.privacy.guarantee import Guarantee
from fedveil.privacy.statement import Statement
from fedveil.recipe import Recipe
from fedveil.serialization import markup
from fedveil.serialization.codec import to_plain
from fedveil.serialization.versions import versions
from fedveil.training.metrics import shown, titled
from fedveil.training.records import Record, recent
from fedveil.training.scoring import Evaluation, MeasuredMetric

if TYPE_CHECKING:
    from polars import DataFrame

UNTESTED = "no test examples, so nothing was evaluated"


@dataclass(frozen=True, repr=False)
class Result:
    """A trained model with its evaluation, records and privacy statement.

    Args:
        recipe: The recipe, with calibrated noise.
        model: The trained module.
        data: Name of the data.
        accuracy: Test accuracy; NaN for numeric targets.
        loss: Mean loss of the test examples.
        statement: The privacy statement.
        records: One record per round.
        rounds: Number of planned rounds.
        seed: Seed of the run.
        engine: Engine that computed updates.
        engine_reason: Why it was chosen.
        path: Directory of the run, if it was saved.
        fingerprint: Hash of the data.
        class_names: Names of the classes, if they have any.
        stopped_early: Whether the run stopped by its own rule before all planned rounds.
        tested: Whether the data have test examples.
        evaluate: Computes `evaluation`.
        model_of: Gives the model of a client, if clients keep models of their own.

    >>> import fedveil as fv
    >>> data = fv.load("digits").split(fv.Iid(clients=50))
    >>> fv.train(fv.algorithms.fedavg(), data, rounds=2).to_frame().height
    2
    """

    recipe: Recipe
    model: nn.Module
    data: str
    accuracy: float
    loss: float
    statement: Statement
    records: tuple[Record, ...]
    rounds: int
    seed: int
    engine: str
    engine_reason: str = ""
    path: Path | None = None
    fingerprint: str = ""  # of the data
    class_names: tuple[str, ...] = ()
    stopped_early: bool = False  # by its own rule, before all planned rounds
    tested: bool = True  # whether the data have test examples
    evaluate: Callable[[], Evaluation | None] | None = None  # computes `evaluation`
    model_of: Callable[[int], nn.Module] | None = None  # a client's own model, if it keeps one

    def __repr__(self) -> str:
        score = f"loss {self.loss:.4g}"
        if not math.isnan(self.accuracy):
            score = f"accuracy {self.accuracy:.4g}, {score}"
        if self.recipe.evaluation is not None:
            score = f"noisy {score}"
        return (
            f"<Result of {self.recipe.name} on {self.data}: {score if self.tested else UNTESTED}, "
            f"epsilon {self.guarantee.epsilon:.4g}>"
        )

    def _repr_html_(self) -> str:
        """Metrics and guarantee as tables, for notebooks."""
        found = self.evaluation
        rows = [] if found is None else [_row(m) for m in found.metrics if m.value is not None]
        head = ("metric", "value", "95% interval", "constant baseline")
        title = f"{self.recipe.name} on {self.data}, {len(self.records):,} rounds"
        title += "" if found is None or found.exact else ", with noise"
        metrics = markup.table(rows, head, title) if rows else ""
        metrics += "" if self.tested else markup.table([("result", UNTESTED)], caption=title)
        return metrics + self.statement._repr_html_()

    def to_frame(self) -> DataFrame:
        """One row per round: the columns of metrics.parquet, as a polars DataFrame.

        Private data: no ε covers them.
        """
        from polars import DataFrame

        return DataFrame([asdict(record) for record in self.records], infer_schema_length=None)

    def plot(self, chart: str | None = None) -> Any:
        """A chart of the report as a Plotly figure, by its title; `fv.charts(result)` lists them.

        Without a title, the metric that ranks runs over the rounds.
        """
        import fedveil

        return fedveil.plot(self, chart)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee in the recipe's view."""
        return self.statement.main

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """All metrics on the test examples, with baselines and intervals; None without any.

        Computed on first use. Private data: no ε covers them, unless the evaluation is private.
        """
        return None if self.evaluate is None else self.evaluate()

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "algorithm": self.recipe.name,
            "data": self.data,
            "fingerprint": self.fingerprint,
            "accuracy": None if math.isnan(self.accuracy) else self.accuracy,
            "accuracy_last_five": recent([record.accuracy for record in self.records]),
            "loss": self.loss if math.isfinite(self.loss) else None,
            **({} if self.evaluation is None else {"evaluation": self.evaluation.plain()}),
            "rounds": len(self.records),
            "rounds_planned": self.rounds,
            **({"stopped_early": True} if self.stopped_early else {}),
            "privacy": self.statement.plain(),
            "bytes_sent": sum(record.sent for record in self.records),
            "aborted_rounds": sum(record.aborted for record in self.records),
            "rejected": sum(record.rejected for record in self.records),
            "seconds": sum(record.seconds for record in self.records),
            "seed": self.seed,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "noise": to_plain(self.recipe.noise),
            "versions": versions(),
            **({"class_names": list(self.class_names)} if self.class_names else {}),
        }


def _row(m: MeasuredMetric) -> tuple[str, str, str, str]:
    ends = "–" if m.low is None else f"{shown(m.low, m.share)} – {shown(m.high, m.share)}"
    return titled(m.name), shown(m.value, m.share), ends, shown(m.baseline, m.share)
