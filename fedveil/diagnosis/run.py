"""A run as its directory tells it: the recipe, a row for each round, a row for each participant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Bound, Clip
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory, lost, reading

if TYPE_CHECKING:
    from polars import DataFrame

Part = Literal["all", "early", "late"]
EARLY = 0.25  # of the rounds: while the model still moves
LATE = 0.5  # of the rounds: what the run settled down to


@dataclass(frozen=True, eq=False)
class Run:
    """What is known of a run; a number that was not recorded is None."""

    path: Path
    recipe: Recipe
    rows: list[dict[str, Any]]
    clients: DataFrame | None = None
    population: int | None = None
    dim: int | None = None
    planned: int | None = None

    @property
    def rounds(self) -> int:
        """Rounds played."""
        return len(self.rows)

    @property
    def recorded(self) -> bool:
        """Whether diagnostics were recorded."""
        return bool(np.isfinite(self.column("norm_median")).any())

    def column(self, name: str, part: Part = "all") -> np.ndarray:
        """A column of metrics.parquet over a part of the rounds; NaN where there is no number."""
        first, last = self._span(part)
        values = [row.get(name) for row in self.rows[first:last] if not row.get("void")]
        return np.array([math.nan if value is None else float(value) for value in values])

    def mean(self, name: str, part: Part = "late") -> float | None:
        """The mean over a part of the rounds."""
        return _mean(self.column(name, part))

    def quantile(self, share: float, part: Part = "late") -> float | None:
        """Of the norms of all updates in a part of the rounds."""
        norms = self._of_clients("norm", part)
        return None if norms is None or not len(norms) else float(np.quantile(norms, share))

    def bounded(self, part: Part = "late") -> float | None:
        """The mean norm of a bounded update, mean s_i·‖w_i‖."""
        norms, scales = self._of_clients("norm", part), self._of_clients("scale", part)
        return None if norms is None or scales is None else _mean(norms * scales)

    @cached_property
    def clip(self) -> float | None:
        """The C that updates were clipped at, of an adaptive clip its late mean."""
        bound: Bound = self.recipe.bound
        if isinstance(bound, AdaptiveClip):
            return self.mean("threshold")
        return bound.norm if isinstance(bound, Clip) else None

    @cached_property
    def reach(self) -> float:
        """What a bounded update is at most."""
        return self.clip or float(self.recipe.bound.norms(1).l2)

    @cached_property
    def signal_to_noise(self) -> float | None:
        """The late median of ‖Σ messages‖ / ‖noise‖.  Das et al. 2022, Figure 2."""
        signal, noise = self.column("signal", "late"), self.column("noise", "late")
        felt = (noise > 0) & (self.column("participants", "late") > 0)
        return float(np.median(signal[felt] / noise[felt])) if felt.any() else None

    def cosine(self, part: Part) -> float | None:
        """Mean cosine of clients' updates to the clean part of the last global update."""
        return self._without_noise(self.mean("cosine", part))

    def persistence(self, part: Part = "late") -> float | None:
        """Mean cosine of the mean bounded update to the clean part of the last global update.

        ⟨mean b, e⟩ = mean s_i·‖w_i‖·cos_i, which a round's signal ‖mean b‖ divides. Near 1 the
        model goes on in one direction, below 0 it goes back and forth.
        """
        import polars

        if self.clients is None or self.recipe.memory.kept:
            return None
        first, last = self._span(part)
        along = (polars.col("norm") * polars.col("scale") * polars.col("cosine")).sum()
        rows = self.clients.filter(polars.col("round").is_between(max(first, 1) + 1, last))
        ratios = []
        for round, total, count in rows.group_by("round").agg(along, polars.len()).iter_rows():
            signal = self.rows[round - 1]["signal"]
            if signal > 0:
                ratios.append(total / (self._denominator(count) * signal))
        return self._without_noise(_mean(np.array(ratios)))

    def _denominator(self, came: int) -> float:
        known = self.population
        return float(came) if known is None else self.recipe.cohort.expected(known)

    def _without_noise(self, cosine: float | None) -> float | None:
        """In many dimensions noise is at right angles to everything: it makes a cosine smaller by
        the factor ρ/√(1 + ρ²), ρ the signal to noise."""
        ratio = self.signal_to_noise
        if cosine is None or ratio is None:
            return cosine
        return float(np.clip(cosine * math.sqrt(1 + ratio**2) / max(ratio, 1e-9), -1, 1))

    def _span(self, part: Part) -> tuple[int, int]:
        count = self.rounds
        early, late = max(2, math.ceil(EARLY * count)), math.floor((1 - LATE) * count)
        return {"all": (0, count), "early": (0, early), "late": (late, count)}[part]

    def _of_clients(self, name: str, part: Part) -> np.ndarray | None:
        import polars

        if self.clients is None:
            return None
        first, last = self._span(part)
        inside = polars.col("round").is_between(first + 1, last)
        found = self.clients.filter(inside & polars.col("norm").is_not_null())
        return found[name].to_numpy().astype(np.float64)


def read(path: Path) -> Run:
    """The run in a directory; half-written, foreign and newer ones are refused in one sentence."""
    from fedveil.runs.participants import load
    from fedveil.settings import read_settings, resolve_recipe

    directory = RunDirectory.open(path)
    settings = read_settings(path / "recipe.toml", {})
    rows = directory.load_metrics()
    metrics, ended = path / "metrics.parquet", (path / "summary.json").is_file()
    if not metrics.is_file() and (ended or directory.rounds_played()):
        raise lost(metrics)
    if not rows:
        raise UserError(
            f"{path} has no rounds yet, so there is nothing to diagnose; go on with it by "
            f"`fedveil train --resume {path}`."
        )
    with reading(path / "metrics.parquet"):
        if not {"round", "participants", "shrunk", "signal", "noise"} <= rows[0].keys():
            raise ValueError("it has not the columns of a run's metrics")
    population, dim = _size(directory)
    return Run(
        path, resolve_recipe(settings), rows, load(directory, len(rows)), population, dim,
        settings.rounds,
    )  # fmt: skip


def _size(directory: RunDirectory) -> tuple[int | None, int | None]:
    """How many clients or examples there are, and the model's dimension, where the run ended."""
    if not (directory.path / "summary.json").is_file():
        return None, None
    with reading(directory.path / "summary.json"):
        facts = directory.load_summary()["privacy"]
        return int(facts["population"]), int(facts["dimension"])


def _mean(numbers: np.ndarray) -> float | None:
    found = numbers[~np.isnan(numbers)]
    return float(found.mean()) if len(found) else None
