"""RunSpec: everything about a run that is fixed before its first round, and its recipe.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedveil.engines.task import Task
from fedveil.ledger.charging import Terms
from fedveil.privacy.statement import Setting
from fedveil.serialization.codec import to_plain
from fedveil.training.metrics import CLASSES, Chosen
from fedveil.training.private_evaluation import EvaluationPlan, evaluated_rounds


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSpec(Terms):
    """What to train: the terms that the ledger charges, and how to compute and save rounds."""

    task: Task
    model: str | None  # its name; None for a module given as an object
    seed: int
    engine: str  # as requested; which one `auto` chose is private
    evaluate_every: int  # rounds between evaluations
    device: str = "auto"  # as requested
    checkpoint_every: int = 0  # rounds between checkpoints; 0: at every evaluation
    diagnostics: bool = False  # whether per-client diagnostics are recorded
    named: Mapping[str, Any] = field(default_factory=dict)  # settings that recipe.toml repeats
    metrics: Chosen = Chosen(CLASSES["accuracy"], tuple(CLASSES.values()))
    evaluation: EvaluationPlan | None = None  # None: evaluations carry no noise
    patience: int | None = None  # evaluations without a better result before the run stops
    setting: Setting = ()  # what the statement adds about a federation

    @property
    def allowed(self) -> float | None:
        """The ε of the run's own budget, if it has one."""
        return None if self.budget is None else self.budget.epsilon

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """The rounds after which the model is evaluated."""
        return frozenset(evaluated_rounds(self.rounds, self.evaluate_every))

    @property
    def _metric(self) -> str | None:
        """The main metric by name, if the user chose it; a function of a module is in `named`."""
        name = self.metrics.main.name
        return self.named.get("metric", name) if self.metrics.named else None

    def plain(self) -> dict[str, Any]:
        """recipe.toml: everything needed to train the run again that can be named."""
        from fedveil import __version__

        known = {
            "model": self.model,
            "account": self.account_name,
            "epsilon": self.allowed,
            "checkpoint_every": self.checkpoint_every or None,
            "metric": self._metric,
            "patience": self.patience,
            "private_evaluation": None if self.evaluation is None else self.evaluation.epsilon,
            "loss": None if self.data.loss in ("cross_entropy", "half_squared") else self.data.loss,
            "device": None if self.device == "auto" else self.device,
            "diagnostics": self.diagnostics if self.diagnostics == self.secret else None,
        }
        return {
            **self.named,
            "fedveil": __version__,
            "rounds": self.rounds,
            "seed": self.seed,
            "delta": self.delta,
            "engine": self.engine,
            "evaluate_every": self.evaluate_every,
            "noise": "secure" if self.secret else "seeded",
            **{name: value for name, value in known.items() if value is not None},
            "recipe": to_plain(self.recipe),
        }
