"""A run as recorded in its directory: recipe, a row per round, a row per participation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedveil.errors import UserError
from fedveil.planning.signal import Spread
from fedveil.recipe import Recipe
from fedveil.runs.saved import EVALUATION, METRICS, RECIPE, SUMMARY, SavedRun, lost, reading
from fedveil.training.scoring import Evaluation, from_confusion

if TYPE_CHECKING:
    from polars import DataFrame

Part = Literal["all", "early", "late"]
EARLY = 0.25  # of the rounds, from the first
LATE = 0.5  # of the rounds, to the last
DOUBLE = 0.5  # p above which a step twice as long would have been better: 1/(1 − p) > 2
FIRST = 3  # rounds that give the initial signal-to-noise ratio


class Slope(NamedTuple):
    """A persistence p and its standard error."""

    value: float
    error: float


class _Round(NamedTuple):
    number: int
    along: float  # ⟨mean b, e⟩, e the direction of the previous global step
    signal: float
    noise: float
    agreed: float  # ‖E mean b‖²: the squared signal without sampling variance


@dataclass(frozen=True, eq=False)
class DiagnosedRun:
    """A run to diagnose; numbers that were not recorded are None."""

    path: Path
    recipe: Recipe
    rows: list[dict[str, Any]]
    clients: DataFrame | None = None
    population: int | None = None
    dim: int | None = None
    planned: int | None = None
    budget: tuple[float, float] | None = None  # (ε, δ) of the run, for its own view
    federated: bool = False  # whether its clients have data of their own
    evaluation: Evaluation | None = None  # of the final model

    @property
    def rounds(self) -> int:
        """Completed rounds."""
        return len(self.rows)

    @property
    def total_rounds(self) -> int:
        """Planned rounds, or completed ones if there are more."""
        return max(self.planned or 0, self.rounds)

    @property
    def recorded(self) -> bool:
        """Whether diagnostics were recorded."""
        return bool(np.isfinite(self.column("norm_median")).any())

    def column(self, name: str, part: Part = "all") -> np.ndarray:
        """A column of metrics.parquet over a part of the rounds; NaN for missing values."""
        first, last = self._span(part)
        values = [row.get(name) for row in self.rows[first:last] if not row.get("aborted")]
        return np.array([math.nan if value is None else float(value) for value in values])

    def mean(self, name: str, part: Part = "late") -> float | None:
        """The mean over a part of the rounds."""
        return _mean(self.column(name, part))

    def quantile(self, share: float, part: Part = "late") -> float | None:
        """A quantile of the norms of all updates in a part of the rounds."""
        norms = self.norms(part)
        return None if norms is None or not len(norms) else float(np.quantile(norms, share))

    def norms(self, part: Part = "late") -> np.ndarray | None:
        """Norms of all updates before the bound, in a part of the rounds."""
        return self._client_column("norm", part)

    def bounded(self, part: Part = "late") -> float | None:
        """The mean norm of a bounded update, mean s_i·‖w_i‖."""
        norms, scales = self._client_column("norm", part), self._client_column("scale", part)
        return None if norms is None or scales is None else _mean(norms * scales)

    @cached_property
    def clip(self) -> float | None:
        """The clipping threshold C; for an adaptive clip, its late mean."""
        bound = self.recipe.bound
        return self.mean("threshold") if bound.adapts else bound.threshold

    @cached_property
    def reach(self) -> float:
        """The largest norm of a bounded update."""
        return self.clip or float(self.recipe.bound.norms(self.dim or 1).l2)

    @cached_property
    def signal_to_noise(self) -> float | None:
        """The late median of ‖Σ messages‖ / ‖noise‖.  Das et al. 2022, Figure 2."""
        signal, noise = self.column("signal", "late"), self.column("noise", "late")
        noisy = (noise > 0) & (self.column("participants", "late") > 0)
        return float(np.median(signal[noisy] / noise[noisy])) if noisy.any() else None

    def cosine(self, part: Part) -> float | None:
        """Mean cosine of clients' updates to the previous global update without its noise."""
        return self._without_noise(self.mean("cosine", part))

    @cached_property
    def run_ratio(self) -> float | None:
        """√K·signal/noise of the first rounds, the criterion of a plan's verdict.

        K is the number of planned rounds, also for a run that was stopped early.
        """
        signal, noise = self.column("signal"), self.column("noise")
        noisy = np.flatnonzero((noise > 0) & (signal > 0))[:FIRST]
        if not len(noisy):
            return None
        return math.sqrt(self.total_rounds) * float(np.median(signal[noisy] / noise[noisy]))

    def persistence(self, part: Part = "late") -> Slope | None:
        """The slope of the loss at the end of a global step, over that at its start.

        p = ⟨mean b_{k+1}, e_k⟩ / ⟨E mean b_k, e_k⟩ with e_k the direction of the step. The mean
        bounded update stands for the gradient, so both are slopes along e_k. At p = 1 the slope did
        not decrease, at 0 the step ended at the minimum, and below 0 it was too long. A parabola
        through both slopes has its minimum at 1/(1 − p) of the step.
        """
        inertia = self.recipe.server.inertia
        unknown = self.recipe.memory.kept or self.recipe.by_record  # there, signals are noisy
        if self.clients is None or unknown or inertia is None:
            return None
        ends, starts = [], []
        rounds = self._rounds(part)
        for before, here in pairwise(rounds):
            if before.number + 1 == here.number and before.signal > 0:
                ends.append(here.along)
                starts.append(_start(before, inertia))
        return _slope(np.array(ends), np.array(starts))

    @cached_property
    def onward(self) -> bool:
        """Whether late steps were too short: steps twice as long would have been better."""
        slope = self.persistence()
        return slope is not None and slope.value - slope.error > DOUBLE

    def _rounds(self, part: Part) -> list[_Round]:
        """The rounds of a part, measured along the previous global step."""
        import polars

        assert self.clients is not None
        first, last = self._span(part)
        bounded = polars.col("norm") * polars.col("scale")
        found = (
            self.clients.filter(polars.col("round").is_between(max(first, 1), last))
            .group_by("round")
            .agg(
                (bounded * polars.col("cosine")).sum().alias("along"),
                bounded.pow(2).mean().alias("square"),
                polars.len(),
            )
            .sort("round")
        )
        return [self._round(*row) for row in found.iter_rows()]

    def _round(self, number: int, along: float, square: float | None, participants: int) -> _Round:
        row = self.rows[number - 1]
        signal, agreed = row["signal"], row["signal"] ** 2
        if self.population is not None and square is not None:
            agreed = Spread.measured(signal, square, self.recipe.cohort, self.population).mean
        return _Round(number, along / self._denominator(participants), signal, row["noise"], agreed)

    def _denominator(self, participants: int) -> float:
        known = self.population
        return float(participants) if known is None else self.recipe.cohort.expected(known)

    def _without_noise(self, cosine: float | None) -> float | None:
        """Correct a cosine for noise, which in many dimensions is orthogonal to everything.

        It reduces the cosine by ρ/√(1 + ρ²), ρ the signal-to-noise ratio.
        """
        ratio = self.signal_to_noise
        if cosine is None or ratio is None:
            return cosine
        return float(np.clip(cosine * math.sqrt(1 + ratio**2) / max(ratio, 1e-9), -1, 1))

    def _span(self, part: Part) -> tuple[int, int]:
        count = self.rounds
        early, late = max(2, math.ceil(EARLY * count)), math.floor((1 - LATE) * count)
        return {"all": (0, count), "early": (0, early), "late": (late, count)}[part]

    def _client_column(self, name: str, part: Part) -> np.ndarray | None:
        import polars

        if self.clients is None:
            return None
        first, last = self._span(part)
        inside = polars.col("round").is_between(first + 1, last)
        found = self.clients.filter(inside & polars.col("norm").is_not_null())
        return found[name].to_numpy().astype(np.float64)


def read(path: Path) -> DiagnosedRun:
    """Read the run in a directory; refuse incomplete, foreign and newer ones."""
    from fedveil.training.settings import read_settings, resolve_recipe

    run = SavedRun.open(path)
    settings = read_settings(run.file(RECIPE), {})
    rows = run.rows
    if run.metrics is None and (run.ended or run.rounds):
        raise lost(run.file(METRICS))
    if not rows:
        raise UserError(
            f"{path} has no rounds yet, so there is nothing to diagnose. Resume it with "
            f"`fedveil train --resume {path}`."
        )
    with reading(run.file(METRICS)):
        if not {"round", "participants", "clipped_fraction", "signal", "noise"} <= rows[0].keys():
            raise ValueError("it lacks columns of a run's metrics")
    population, dim, budget = _size(run)
    return DiagnosedRun(
        path, resolve_recipe(settings), rows, run.clients(len(rows)), population, dim,
        settings.rounds, budget, settings.federation is not None, _evaluation(run),
    )  # fmt: skip


def _evaluation(run: SavedRun) -> Evaluation | None:
    """The metrics of the final model; of an earlier version's run, its confusion matrix."""
    if not run.ended:
        return None
    with reading(run.file(SUMMARY)):
        known = run.summary.get("evaluation")
        if known is not None:
            return Evaluation.from_plain(known)
    if run.evaluation is None:
        return None
    with reading(run.file(EVALUATION)):
        table = run.evaluation["confusion"]
        return None if table is None else from_confusion(run.evaluation["classes"], table)


def _size(run: SavedRun) -> tuple[int | None, int | None, tuple[float, float] | None]:
    """Population, dimension and (ε, δ), if the run ended."""
    if not run.ended:
        return None, None, None
    with reading(run.file(SUMMARY)):
        facts = run.summary["privacy"]
        kept = facts["views"][facts["view"]]["epsilon"]
        budget = None if kept is None else (float(kept), float(facts["delta"]))
        return int(facts["population"]), int(facts["dimension"]), budget


def _start(before: _Round, inertia: float) -> float:
    """⟨E mean b, e⟩, e along s + ξ (with momentum: their sums), noise ξ orthogonal to s.

    E mean b excludes the sampling variance, which is part of the signal s.
    """
    clean, noisy = 1 / (1 - inertia), 1 / math.sqrt(1 - inertia**2)
    length = math.hypot(before.signal * clean, before.noise * noisy)
    return before.agreed * clean / length


def _slope(ends: np.ndarray, starts: np.ndarray) -> Slope | None:
    """The ratio of the means; None if the mean of the starts is not positive."""
    if len(ends) < 2 or not np.isfinite(ends).all() or not starts.mean() > 0:
        return None
    value = float(ends.mean() / starts.mean())
    spread = float(np.std(ends - value * starts, ddof=1)) / math.sqrt(len(ends))
    return Slope(value, spread / float(starts.mean()))


def _mean(numbers: np.ndarray) -> float | None:
    found = numbers[~np.isnan(numbers)]
    return float(found.mean()) if len(found) else None
