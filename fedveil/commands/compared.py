"""Comparison: the outcome of `fv.compare`, with a table and charts for notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.serialization import markup
from fedveil.training.metrics import titled

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class ComparisonOutcome:
    """A finished comparison: its directory `path`, and `outcome`, the contents of comparison.json.

    >>> found = {"members": [{"label": "a", "mean": 0.5}], "measure": "accuracy"}
    >>> ComparisonOutcome(Path("comparisons/a"), found)
    <Comparison of 1 members at comparisons/a, best a (0.5)>
    """

    path: Path
    outcome: Mapping[str, Any]

    def __repr__(self) -> str:
        best = self.best
        told = "" if best is None else f", best {best['label']} ({best['mean']:.4g})"
        return f"<Comparison of {len(self.outcome['members'])} members at {self.path}{told}>"

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The member with the best mean."""
        found = [m for m in self.outcome["members"] if m["mean"] is not None]
        lowest = not self.outcome.get("higher_is_better", self.outcome["measure"] != "loss")
        return (min if lowest else max)(found, key=lambda m: m["mean"]) if found else None

    @classmethod
    def read(cls, path: Path) -> ComparisonOutcome:
        """The outcome that is saved in a comparison's directory."""
        from fedveil.comparing.outcome import FILE

        return cls(path, json.loads((path / FILE).read_text("utf-8")))

    def to_frame(self) -> pl.DataFrame:
        """One row per member: label, mean, standard error and ε."""
        import polars as pl

        names = ("label", "algorithm", "mean", "standard_error", "epsilon")
        return pl.DataFrame([{n: m[n] for n in names} for m in self.outcome["members"]])

    def _repr_html_(self) -> str:
        """The members with their means, for notebooks."""
        head = ("setting", titled(self.outcome["measure"]), "± s.e.", "ε")
        names = ("label", "mean", "standard_error", "epsilon")
        rows = [[_cell(m[name]) for name in names] for m in self.outcome["members"]]
        noisy = any(m.get("noisy") for m in self.outcome["members"])
        title = f"Comparison at {self.path}{', with noise' if noisy else ''}"
        return markup.table(rows, head, title)

    def plot(self, chart: str | None = None) -> Any:
        """A chart of the comparison's report as a Plotly figure, by its title."""
        from fedveil.reporting.figures import plot

        return plot(self.path, chart)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
