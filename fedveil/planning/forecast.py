"""Forecast the signal-to-noise ratio of a planned run, per round and over the run.

The noise is calibrated as for a real run (`privacy/calibrate.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.checks import count
from fedveil.planning.noise import noise_norm
from fedveil.planning.signal import Spread, UpdateModel
from fedveil.privacy.calibrate import Budget, calibrated, sensible_delta
from fedveil.recipe import Recipe

MANY = 1_000_000  # clients, if their number does not matter
VARIED = ("clients", "cohort", "rounds", "epsilon", "dim", "clip")


@dataclass(frozen=True)
class Case:
    """A planned run: everything its noise depends on, and a model of its updates."""

    recipe: Recipe
    dim: int
    population: int
    rounds: int
    updates: UpdateModel
    epsilon: float | None = None  # None: the recipe's own noise, if any
    delta: float | None = None  # None: the default for the population
    per_round: bool = False  # whether ε and δ are for a single round
    rough: bool = False  # approximate binomial noise by a discrete Gaussian: faster to calibrate

    def __post_init__(self) -> None:
        for name in ("dim", "population", "rounds"):
            count("The plan", name, getattr(self, name))
        self.recipe.cohort.expected(self.population)  # refuses a cohort larger than the population

    @property
    def resolved_delta(self) -> float:
        """δ as given, or the default for the population."""
        return sensible_delta(self.population) if self.delta is None else self.delta

    @property
    def budget(self) -> Budget | None:
        """The target (ε, δ), if any."""
        return None if self.epsilon is None else Budget(self.epsilon, self.resolved_delta)


@dataclass(frozen=True)
class Forecast:
    """Signal and noise of a case, in the first round and in later rounds that a pilot measured."""

    recipe: Recipe  # with calibrated noise
    noise: float | None  # ‖noise on the mean‖; None if the noise part does not tell its deviation
    signals: tuple[float, ...]  # ‖mean of bounded updates‖ in the rounds that are known
    rounds: int
    below_cap: float = 1.0  # ratio of an average round over that of one where nobody is at a cap

    @property
    def signal(self) -> float:
        """The signal of the first round, from an untrained model."""
        return self.signals[0]

    @property
    def ratio(self) -> float | None:
        """Signal-to-noise ratio of the first round; None if the noise is not known."""
        if self.noise is None:
            return None
        return self.signal / self.noise if self.noise > 0 else math.inf

    @property
    def mean_ratio(self) -> float | None:
        """Mean signal-to-noise ratio; rounds after the pilot are assumed to be like its last fifth.

        None if only the first round is known. Updates cancel as the model approaches an optimum, so
        a small value is not a bad sign.
        """
        if len(self.signals) < 2 or not self.noise:
            return None
        last = self.signals[-max(1, len(self.signals) // 5) :]
        unseen = max(self.rounds - len(self.signals), 0) * sum(last) / len(last)
        mean = (sum(self.signals) + unseen) / max(self.rounds, len(self.signals))
        return self.below_cap * mean / self.noise

    @property
    def run_ratio(self) -> float | None:
        """√K·ratio: while rounds agree, the signal grows as K and the noise as √K.

        With a cap, √K·(ratio of an average round).
        """
        return None if self.ratio is None else math.sqrt(self.rounds) * self.below_cap * self.ratio


@functools.lru_cache(maxsize=1024)
def forecast(case: Case) -> Forecast:
    """Calibrate the noise and compare it with the signal."""
    recipe = with_noise(case)
    spreads = case.updates.spreads(recipe.bound, case.dim)
    signals = tuple(spread.signal(recipe, case.dim, case.population) for spread in spreads)
    noise = noise_norm(recipe, case.dim, case.population, case.rounds)
    return Forecast(recipe, noise, signals, case.rounds, _below_cap(recipe, spreads[0], case))


def _below_cap(recipe: Recipe, spread: Spread, case: Case) -> float:
    """The ratio at the mean number of participants over that at the expected number."""
    size = (case.dim, case.population)
    present = recipe.cohort.participants(case.population, case.rounds).mean
    if present == recipe.cohort.expected(case.population):
        return 1.0
    share = spread.signal(recipe, *size, present) / (spread.signal(recipe, *size) or 1.0)
    noise = noise_norm(recipe, *size, case.rounds)
    later = noise_norm(recipe, *size, case.rounds, present)
    return share * noise / later if noise and later else share


def with_noise(case: Case) -> Recipe:
    """The recipe with its noise calibrated as in training.

    A Gaussian's multiplier depends neither on the dimension nor on the bound. With Poisson sampling
    and a trusted server it does not depend on the population either. One calibration serves all.
    """
    recipe = case.recipe.planned(case.rounds, case.population)
    rounds = 1 if case.per_round else case.rounds
    if case.rough and not recipe.noise.calibrated:
        alike = replace(recipe, noise=recipe.noise.stand_in())
        found = _calibrated(alike, case, rounds).noise
        return replace(recipe, noise=recipe.noise.like(found))
    return _calibrated(recipe, case, rounds)


def _calibrated(recipe: Recipe, case: Case, rounds: int) -> Recipe:
    if recipe.foreign or recipe.noise.calibrated or not recipe.noise.scale_free:
        return calibrated(recipe, case.budget, rounds, case.dim, case.population)
    if recipe.bound.adapts:
        return calibrated(recipe, case.budget, rounds, 1, case.population)
    alike = replace(recipe, bound=Clip(1.0))
    trusted = not recipe.cohort.fixed and recipe.noise.at == "server"
    people = MANY if trusted else case.population
    return replace(recipe, noise=calibrated(alike, case.budget, rounds, 1, people).noise)


def varied(case: Case, name: str, value: float) -> Case | None:
    """The case with one quantity changed; None if the value is impossible.

    Changing the number of clients keeps the sampling rate. Changing the cohort keeps the clients.
    """
    case = replace(case, rough=True)
    match name:
        case "clients":
            return _with_clients(case, round(value))
        case "cohort":
            return _with_cohort(case, value)
        case "rounds":
            return replace(case, rounds=round(value))
        case "epsilon":
            return None if case.epsilon is None else replace(case, epsilon=value)
        case "dim":
            return replace(case, dim=round(value))
        case "clip":
            bound = case.recipe.bound.stretched(value / (bound_of(case) or 1.0))
            return None if bound is None else _with(case, bound=bound)
        case _:
            raise UserError(f"A plan cannot vary '{name}'. Choose one of {', '.join(VARIED)}.")


def current(case: Case, name: str) -> float | None:
    """The value of a quantity in this case; None if it cannot be varied."""
    size = case.recipe.cohort.expected(case.population)
    return {
        "clients": None if _with_clients(case, case.population) is None else case.population,
        "cohort": None if _with_cohort(case, size) is None else size,
        "rounds": float(case.rounds),
        "epsilon": case.epsilon,
        "dim": float(case.dim),
        "clip": bound_of(case),
    }[name]


def bound_of(case: Case) -> float | None:
    """C, if the bound has one."""
    stretchable = case.recipe.bound.stretched(1.0)
    return None if stretchable is None else stretchable.norms(case.dim).l2


def _with(case: Case, **parts: object) -> Case:
    return replace(case, recipe=replace(case.recipe, **parts))  # type: ignore[arg-type]


def _with_clients(case: Case, population: int) -> Case | None:
    """The case with another population and the same sampling rate; None if not known."""
    if population < 1:
        return None
    factor = population / case.population
    cohort = case.recipe.cohort.with_population(factor)
    if cohort is None:
        return None
    share = factor * case.recipe.cohort.expected(case.population)
    try:
        if abs(cohort.expected(population) - share) > max(1.0, 0.01 * share):
            return None
    except UserError:  # too few clients for such a cohort
        return None
    recipe = replace(case.recipe, cohort=cohort)
    return replace(case, recipe=recipe, population=population)


def _with_cohort(case: Case, size: float) -> Case | None:
    """The case with another expected cohort size; None if it exceeds the population."""
    if not 1 <= size <= case.population:
        return None
    cohort = case.recipe.cohort
    scaled = cohort.with_population(size / cohort.expected(case.population)) or cohort
    found = scaled.with_size(size, case.population)
    return None if found is None else _with(case, cohort=found)
