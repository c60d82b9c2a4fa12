"""A case and what is to be expected of it: signal to noise of a round and of the whole run.

The noise is settled by the same accounting as a run's (`privacy/calibrate.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Clip
from fedveil.parts.checks import count
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.discrete import Binomial, DiscreteGaussian
from fedveil.parts.noise import Gaussian, RoundedGaussian
from fedveil.planning.noise import noise_norm
from fedveil.planning.signal import Updates, stretched
from fedveil.privacy.calibrate import Budget, sensible_delta, settled
from fedveil.recipe import Recipe, foreign

MANY = 1_000_000  # clients, where their number does not matter
VARIED = ("clients", "cohort", "rounds", "epsilon", "dim", "clip")


@dataclass(frozen=True)
class Case:
    """A training that might be: everything its noise depends on, and what its updates are like."""

    recipe: Recipe
    dim: int
    population: int
    rounds: int
    updates: Updates
    epsilon: float | None = None  # None: the recipe's own noise, or none
    delta: float | None = None  # None: what is sensible for the population
    per_round: bool = False  # whether ε and δ are those of a single round
    rough: bool = False  # binomial noise as much as a discrete Gaussian's, which is settled sooner

    def __post_init__(self) -> None:
        for name in ("dim", "population", "rounds"):
            count("The plan", name, getattr(self, name))
        self.recipe.cohort.expected(self.population)  # refuses a cohort larger than the population

    @property
    def sure_delta(self) -> float:
        """δ, given or sensible."""
        return sensible_delta(self.population) if self.delta is None else self.delta

    @property
    def budget(self) -> Budget | None:
        """(ε, δ), if one is to be kept."""
        return None if self.epsilon is None else Budget(self.epsilon, self.sure_delta)


@dataclass(frozen=True)
class Forecast:
    """Signal and noise of a case: at the start, and in later rounds where a pilot saw them."""

    recipe: Recipe  # with settled noise
    noise: float  # ‖noise on the mean‖, of every round
    signals: tuple[float, ...]  # ‖mean of bounded updates‖ of the rounds that are known
    rounds: int

    @property
    def signal(self) -> float:
        """Of the first round: the pull of the data on a model that knows nothing of them."""
        return self.signals[0]

    @property
    def ratio(self) -> float:
        """Signal to noise of the first round."""
        return self.signal / self.noise if self.noise > 0 else math.inf

    @property
    def mean_ratio(self) -> float | None:
        """Signal to noise over all rounds; unseen rounds are taken to be like the last seen ones.

        None where nothing but the start is known. Updates cancel as the model becomes good, so a
        small one is no bad sign.
        """
        if len(self.signals) < 2 or self.noise <= 0:
            return None
        last = self.signals[-max(1, len(self.signals) // 5) :]
        unseen = max(self.rounds - len(self.signals), 0) * sum(last) / len(last)
        return (sum(self.signals) + unseen) / max(self.rounds, len(self.signals)) / self.noise

    @property
    def run_ratio(self) -> float:
        """√K·ratio: while rounds agree, the signal adds up K-fold, the noise √K-fold."""
        return math.sqrt(self.rounds) * self.ratio


@functools.lru_cache(maxsize=1024)
def forecast(case: Case) -> Forecast:
    """Settle the noise and set it against the signal."""
    recipe = with_noise(case)
    spreads = case.updates.spreads(recipe.bound, case.dim)
    signals = tuple(spread.on_the_mean(recipe, case.dim, case.population) for spread in spreads)
    return Forecast(recipe, noise_norm(recipe, case.dim, case.population), signals, case.rounds)


def with_noise(case: Case) -> Recipe:
    """The recipe with its noise settled, as a training would settle it.

    A Gaussian's multiplier depends neither on the dimension nor on the bound, and for Poisson
    cohorts of a trusted server not on the population either: one calibration serves all of them.
    """
    recipe, rounds = case.recipe, 1 if case.per_round else case.rounds
    if case.rough and isinstance(recipe.noise, Binomial) and not recipe.noise.settled:
        alike = replace(recipe, noise=DiscreteGaussian())
        found = settled(alike, case.budget, rounds, case.dim, case.population).noise
        assert isinstance(found, DiscreteGaussian)
        assert found.sigma is not None
        return replace(recipe, noise=Binomial(max(2 * math.ceil(2 * found.sigma**2), 2)))
    own = any(map(foreign, (recipe.noise, recipe.bound, recipe.cohort, recipe.quantize)))
    known = isinstance(recipe.noise, Gaussian | RoundedGaussian) and not own
    if not known or recipe.noise.settled:
        return settled(recipe, case.budget, rounds, case.dim, case.population)
    if isinstance(recipe.bound, AdaptiveClip):
        return settled(recipe, case.budget, rounds, 1, case.population)
    alike = replace(recipe, bound=Clip(1.0))
    trusted = isinstance(recipe.cohort, Poisson) and recipe.noise.at == "server"
    people = MANY if trusted else case.population
    return replace(recipe, noise=settled(alike, case.budget, rounds, 1, people).noise)


def varied(case: Case, name: str, value: float) -> Case | None:
    """The case with one thing changed; None where that makes no sense.

    More clients come with the same share of them in a round; a cohort is part of them.
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
            bound = stretched(case.recipe.bound, value / (bound_of(case) or 1.0))
            return None if bound is None else _with(case, bound=bound)
        case _:
            raise UserError(f"A plan cannot vary '{name}'; it can vary {', '.join(VARIED)}.")


def current(case: Case, name: str) -> float | None:
    """What `varied` would have to be given for the case as it is."""
    cohort = case.recipe.cohort
    return {
        "clients": float(case.population),
        "cohort": None if isinstance(cohort, Everyone) else cohort.expected(case.population),
        "rounds": float(case.rounds),
        "epsilon": case.epsilon,
        "dim": float(case.dim),
        "clip": bound_of(case),
    }[name]


def bound_of(case: Case) -> float | None:
    """C, where the bound has one."""
    stretchable = stretched(case.recipe.bound, 1.0)
    return None if stretchable is None else stretchable.norms(case.dim).l2


def _with(case: Case, **parts: object) -> Case:
    return replace(case, recipe=replace(case.recipe, **parts))  # type: ignore[arg-type]


def _with_clients(case: Case, population: int) -> Case | None:
    """Another population of which the same share takes part."""
    if population < 1:
        return None
    share = population / case.population
    cohort = case.recipe.cohort
    if isinstance(cohort, FixedSize):
        cohort = _resized(cohort, cohort.clients * share)
    elif cohort.honest is not None:
        cohort = replace(cohort, honest=_some(cohort.honest * share))  # type: ignore[type-var]
    recipe = replace(case.recipe, cohort=cohort)
    return replace(case, recipe=recipe, population=population)


def _with_cohort(case: Case, size: float) -> Case | None:
    """So many clients a round, drawn as before; None beyond the population."""
    cohort = case.recipe.cohort
    if isinstance(cohort, Everyone) or not 1 <= size <= case.population:
        return None
    if isinstance(cohort, Poisson):
        share = size / cohort.expected(case.population)
        honest = None if cohort.honest is None else _some(cohort.honest * share)
        return _with(case, cohort=replace(cohort, rate=size / case.population, honest=honest))
    if not isinstance(cohort, FixedSize):
        return None  # of one's own: nobody else knows how to change it
    return _with(case, cohort=_resized(cohort, size))


def _resized(cohort: FixedSize, size: float) -> Cohort:
    honest = None if cohort.honest is None else _some(cohort.honest * size / cohort.clients)
    return replace(cohort, clients=_some(size), honest=honest)


def _some(number: float) -> int:
    return max(1, round(number))
