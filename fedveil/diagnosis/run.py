"""A run as its directory tells it: the recipe, a row for each round, a row for each participant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Bound, Clip
from fedveil.planning.signal import Spread
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory, lost, reading

if TYPE_CHECKING:
    from polars import DataFrame

Part = Literal["all", "early", "late"]
EARLY = 0.25  # of the rounds: while the model still moves
LATE = 0.5  # of the rounds: what the run settled down to
DOUBLE = 0.5  # p above which a step twice as long would have been better: 1/(1 − p) > 2
FIRST = 3  # rounds whose signal to noise is that of the start


class Slope(NamedTuple):
    """A persistence p and its standard error."""

    value: float
    error: float


class _Round(NamedTuple):
    number: int
    along: float  # ⟨mean b, e⟩, e the direction of the last global step
    signal: float
    noise: float
    agreed: float  # ‖E mean b‖²: the signal's square without what the draw adds


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
    budget: tuple[float, float] | None = None  # (ε, δ) that it keeps, towards its own view

    @property
    def rounds(self) -> int:
        """Rounds played."""
        return len(self.rows)

    @property
    def whole(self) -> int:
        """Rounds planned, or played where none were."""
        return max(self.planned or 0, self.rounds)

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
        norms = self.norms(part)
        return None if norms is None or not len(norms) else float(np.quantile(norms, share))

    def norms(self, part: Part = "late") -> np.ndarray | None:
        """Of all updates in a part of the rounds, before the bound."""
        return self._of_clients("norm", part)

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

    @cached_property
    def run_ratio(self) -> float | None:
        """√K·signal/noise of the first rounds, by which a plan gives its verdict.

        With K the planned rounds: for a run that was stopped it is what it was going to have.
        """
        signal, noise = self.column("signal"), self.column("noise")
        felt = np.flatnonzero((noise > 0) & (signal > 0))[:FIRST]
        if not len(felt):
            return None
        return math.sqrt(self.whole) * float(np.median(signal[felt] / noise[felt]))

    def persistence(self, part: Part = "late") -> Slope | None:
        """The slope of the loss at the end of a global step, over that at its start.

        p = ⟨mean b_{k+1}, e_k⟩ / ⟨E mean b_k, e_k⟩ with e_k the direction of the step: as the mean
        bounded update stands for the gradient, both are slopes along e_k. 1: nothing was used up;
        0: the step ended where it was best; below 0: it went too far. A parabola through both
        slopes is least at 1/(1 − p) of the step.
        """
        if self.clients is None or self.recipe.memory.kept:
            return None
        ends, starts = [], []
        rounds = self._rounds(part)
        for before, here in pairwise(rounds):
            if before.number + 1 == here.number and before.signal > 0:
                ends.append(here.along)
                starts.append(self._start(before))
        return _slope(np.array(ends), np.array(starts))

    @cached_property
    def onward(self) -> bool:
        """Whether late steps were surely too short: twice as long would have been better."""
        slope = self.persistence()
        return slope is not None and slope.value - slope.error > DOUBLE

    def _start(self, before: _Round) -> float:
        """⟨E mean b, e⟩, e along s + ξ (with momentum: their sums), noise ξ at right angles to s.

        Chance of the draw, a part of the signal s, is not in E mean b.
        """
        inertia = getattr(self.recipe.server, "momentum", 0.0)
        clean, noisy = 1 / (1 - inertia), 1 / math.sqrt(1 - inertia**2)
        length = math.hypot(before.signal * clean, before.noise * noisy)
        return before.agreed * clean / length

    def _rounds(self, part: Part) -> list[_Round]:
        """What the rounds of a part say along the last global step."""
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

    def _round(self, number: int, along: float, square: float | None, came: int) -> _Round:
        row = self.rows[number - 1]
        signal, agreed = row["signal"], row["signal"] ** 2
        if self.population is not None and square is not None:
            agreed = Spread.seen(signal, square, self.recipe.cohort, self.population).mean
        return _Round(number, along / self._denominator(came), signal, row["noise"], agreed)

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
    population, dim, budget = _size(directory)
    return Run(
        path, resolve_recipe(settings), rows, load(directory, len(rows)), population, dim,
        settings.rounds, budget,
    )  # fmt: skip


def _size(directory: RunDirectory) -> tuple[int | None, int | None, tuple[float, float] | None]:
    """How many clients or examples, the model's dimension and (ε, δ), where the run ended."""
    if not (directory.path / "summary.json").is_file():
        return None, None, None
    with reading(directory.path / "summary.json"):
        facts = directory.load_summary()["privacy"]
        kept = facts["views"][facts["view"]]["epsilon"]
        budget = None if kept is None else (float(kept), float(facts["delta"]))
        return int(facts["population"]), int(facts["dimension"]), budget


def _slope(ends: np.ndarray, starts: np.ndarray) -> Slope | None:
    """The ratio of the means; None where starts are lost in chance."""
    if len(ends) < 2 or not np.isfinite(ends).all() or not starts.mean() > 0:
        return None
    value = float(ends.mean() / starts.mean())
    spread = float(np.std(ends - value * starts, ddof=1)) / math.sqrt(len(ends))
    return Slope(value, spread / float(starts.mean()))


def _mean(numbers: np.ndarray) -> float | None:
    found = numbers[~np.isnan(numbers)]
    return float(found.mean()) if len(found) else None
