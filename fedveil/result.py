"""What a training ends with: the model, the records, the statement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedveil.privacy.statement import Guarantee, Statement
from fedveil.recipe import Recipe
from fedveil.records import Record
from fedveil.runs.codec import to_plain
from fedveil.runs.versions import versions


@dataclass(frozen=True, repr=False)
class Result:
    """A trained model and what can be said of it."""

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

    def __repr__(self) -> str:
        return (
            f"<Result of {self.recipe.name} on {self.data}: accuracy {self.accuracy:.4g}, loss "
            f"{self.loss:.4g}, epsilon {self.guarantee.epsilon:.4g}>"
        )

    @property
    def guarantee(self) -> Guarantee:
        """Towards the view that the recipe is for."""
        return self.statement.main

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "algorithm": self.recipe.name,
            "data": self.data,
            "fingerprint": self.fingerprint,
            "accuracy": None if math.isnan(self.accuracy) else self.accuracy,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "rounds": len(self.records),
            "rounds_planned": self.rounds,
            "privacy": self.statement.plain(),
            "bytes_sent": sum(record.sent for record in self.records),
            "void_rounds": sum(record.void for record in self.records),
            "rejected": sum(record.rejected for record in self.records),
            "seconds": sum(record.seconds for record in self.records),
            "seed": self.seed,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "noise": to_plain(self.recipe.noise),
            "versions": versions(),
            **({"class_names": list(self.class_names)} if self.class_names else {}),
        }
