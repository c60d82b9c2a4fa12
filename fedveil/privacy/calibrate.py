"""Calibrate noise, rounds or cohort to a budget: within 0.5%, and never above ε."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.rounding import rounded_up, short
from fedveil.errors import UserError
from fedveil.parts.cohort import Cohort
from fedveil.privacy.guarantee import guarantee
from fedveil.recipe import UNKNOWN, Recipe

Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")
TOLERANCE = 0.005
LEAST_LEVEL, LARGEST_LEVEL = 2.0**-20, 2.0**40  # of the noise levels that are tried
DIGITS = 6  # of a level: later ones depend on the processor, and noise is seeded by all of them
MOST_ROUNDS = 1_000_000  # more are never trained, and accounting for them is slow


class _Remembered(Generic[Rest, Answer]):
    """A function of a recipe whose answers are cached, unless it has parts that may change."""

    def __init__(self, function: Callable[Concatenate[Recipe, Rest], Answer]) -> None:
        self._asked, self._cached = function, functools.lru_cache(maxsize=256)(function)
        self.cache_clear = self._cached.cache_clear
        functools.update_wrapper(self, function)

    def __call__(self, recipe: Recipe, *rest: Rest.args, **named: Rest.kwargs) -> Answer:
        if recipe.foreign:
            return self._asked(recipe, *rest, **named)
        return self._cached(recipe, *rest, **named)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Budget:
    """(ε, δ) that a run may spend.

    >>> Budget(epsilon=4.0, delta=1e-5)
    Budget(epsilon=4.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        accounting.check_epsilon(self.epsilon)
        accounting.check_delta(self.delta)


def calibrated(
    recipe: Recipe, budget: Budget | None, rounds: int, dim: int, population: int
) -> Recipe:
    """The recipe with noise calibrated to the budget, or with its own noise if within it."""
    recipe = recipe.planned(rounds, population)
    if budget is None:
        if not recipe.noise.calibrated:
            raise UserError(
                f"{recipe.name} has no privacy budget. Pass --epsilon, or the amount of noise, "
                "such as --noise-multiplier."
            )
        return recipe
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise, so it cannot meet ε = {short(budget.epsilon)}. "
            "Use a private algorithm such as dp_fedavg, or remove epsilon."
        )
    if recipe.noise.calibrated:
        return _within(recipe, budget, rounds, dim, population)
    return calibrate(recipe, budget, rounds, dim, population)


def _within(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """The recipe, if its calibrated noise meets the budget; else an error."""
    spent = guarantee(recipe, dim, population, rounds, budget.delta)
    if not spent.private:
        raise UserError(
            f"{recipe.name} cannot meet ε = {short(budget.epsilon, 3)}, since "
            f"{spent.reason}. Remove epsilon, or use another algorithm."
        )
    if spent.epsilon > budget.epsilon:
        raise UserError(
            f"{recipe.name} with the given noise spends ε = {rounded_up(spent.epsilon)} in "
            f"{rounds} rounds, more than the budget of {short(budget.epsilon, 3)}. Remove the "
            "amount of noise to calibrate it, or train fewer rounds."
        )
    return recipe


@_Remembered
def calibrate(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """The recipe with the least noise that spends at most the budget over all rounds.

    The budget applies to the recipe's view. Truncated noise may use up a part of δ.
    """
    if recipe.by_record:
        return _in_each_silo(recipe, budget, rounds, dim, population)
    share = budget.delta / max(rounds, 1)

    def at(level: float) -> Recipe:
        return recipe.with_noise(level, dim, population, budget.epsilon, share)

    def exact(level: float) -> float:
        return accounting.epsilon(at(level).spent(dim, population, rounds), budget.delta)

    _refuse_hopeless(at(1.0), dim, population)
    _refuse_costly_statistics(recipe, budget)
    _refuse_precise_count(recipe, budget, rounds, dim, population)
    return at(least_level(exact, budget.epsilon, _guess(recipe, budget, rounds, dim, population)))


def _in_each_silo(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """The least noise for each silo by itself, by its own sampling and its own budget."""
    steps, loud = rounds * recipe.local.inner_steps, recipe.noise.with_multipliers
    found = [
        calibrate(
            replace(one, statistics=recipe.statistics, evaluation=recipe.evaluation),
            Budget(budget.epsilon * recipe.noise.share(silo), budget.delta),
            steps, dim, UNKNOWN,
        )
        for silo, one in enumerate(recipe.insides(population))
    ]  # fmt: skip
    return replace(recipe, noise=loud(tuple(one.noise.noise_multiplier or 0.0 for one in found)))


def _guess(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> float:
    """An estimate of the level from Rényi divergences, if they are fast to compute; else 1."""
    alike = replace(recipe, noise=recipe.noise.stand_in())
    share = budget.delta / max(rounds, 1)

    def rough(level: float) -> float:
        calibrated = alike.with_noise(level, dim, population, budget.epsilon, share)
        spent = calibrated.spent(dim, population, rounds)
        found = accounting.quick_epsilon(spent, budget.delta)
        return budget.epsilon / level if found is None else found

    try:
        return least_level(rough, budget.epsilon, 1.0)
    except UserError:  # the exact accounting may succeed where Rényi divergences fail
        return 1.0


def _refuse_hopeless(recipe: Recipe, dim: int, population: int) -> None:
    """Refuse a recipe that has no guarantee in its view, whatever the noise."""
    release = recipe.release(dim, population)
    if isinstance(release, events.NonPrivate) and recipe.noise.at == "server":
        other = "Use noise at the clients, or view 'models'"
        raise UserError(
            f"{recipe.name} has no guarantee in view '{recipe.view}', since {release.reason}. "
            f"{'Use another part' if recipe.view == 'models' else other}."
        )


def _refuse_costly_statistics(recipe: Recipe, budget: Budget) -> None:
    """Refuse statistics or evaluations that alone exceed the budget, whatever the noise."""
    advice = {
        "The statistics of the data": "Spend less on statistics, or declare public ranges, "
        "categories and classes",
        "The private evaluations": "Give a smaller private_evaluation",
        "The statistics and the private evaluations": "Spend less on both",
    }
    both = recipe.statistics is not None and recipe.evaluation is not None
    releases = (
        recipe.statistics,
        recipe.evaluation,
        recipe.statistics.and_(recipe.evaluation) if both and recipe.statistics else None,
    )
    for (what, remedy), release in zip(advice.items(), releases, strict=True):
        if release is None:
            continue
        alone = accounting.epsilon(release.event(recipe.adjacency()), budget.delta)
        if alone >= budget.epsilon:
            raise UserError(
                f"{what} alone spend ε = {rounded_up(alone)}, and the budget is "
                f"{short(budget.epsilon)}. {remedy}."
            )


def _refuse_precise_count(
    recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int
) -> None:
    """Refuse an adaptive bound whose count alone exceeds the budget, whatever the sum's noise."""
    given = recipe.bound.own_noise(recipe.cohort.expected(population))
    if given is None:
        return

    def alone(deviation: float) -> float:
        counting = replace(recipe, bound=recipe.bound.with_own_noise(deviation))
        loud = counting.with_noise(LARGEST_LEVEL, dim, population, budget.epsilon, budget.delta)
        return accounting.epsilon(loud.spent(dim, population, rounds), budget.delta)

    if alone(given) <= budget.epsilon:
        return
    enough = 1.5 * least_level(alone, budget.epsilon, given)
    raise UserError(
        f"{recipe.name}: the count of short updates has noise with standard deviation "
        f"{short(given, 3)} [default: cohort/20]. The count alone spends more than ε = "
        f"{short(budget.epsilon)} in {rounds} rounds. Give count_noise = {rounded_up(enough, 2)} "
        "or more, or a larger cohort."
    )


def least_level(epsilon: Callable[[float], float], target: float, guess: float = 1.0) -> float:
    """The least level with epsilon(level) ≤ target, for an ε that decreases with the level.

    It is bracketed from the guess and then found by secants on logarithmic scales. Every level
    that is tried has six digits, so that the result is the same on every processor.

    >>> 2.0 <= least_level(lambda level: 6.0 / level, 3.0) <= 2.0 * (1 + TOLERANCE)
    True
    """
    low, high = _bracket(epsilon, target, guess)
    while high.level / low.level > 1 + TOLERANCE:
        root = _secant(low, high, target)
        for near in (root * (1 + 0.4 * TOLERANCE), root * (1 - 0.4 * TOLERANCE)):
            level = _in_digits(near)
            if low.level < level < high.level:
                found = _Tried(level, epsilon(level))
                low, high = (low, found) if found.epsilon <= target else (found, high)
    return high.level


def _in_digits(level: float) -> float:
    return float(f"{level:.{DIGITS}g}")


class _Tried(NamedTuple):
    level: float
    epsilon: float


def _bracket(
    epsilon: Callable[[float], float], target: float, guess: float
) -> tuple[_Tried, _Tried]:
    """One level that spends too much and one that does not, by growing steps."""
    first = _in_digits(guess)
    here, step = _Tried(first, epsilon(first)), 1.05
    while True:
        enough = here.epsilon <= target
        leap = min(max(here.epsilon / target, 1 / 8), 8.0)  # ε is about proportional to 1/level
        level = _in_digits(here.level * leap / step if enough else here.level * leap * step)
        if not LEAST_LEVEL < level < LARGEST_LEVEL:
            break
        there = _Tried(level, epsilon(level))
        if enough != (there.epsilon <= target):
            return (there, here) if enough else (here, there)
        here, step = there, min(step**2, 4.0)
    if enough:
        return _Tried(here.level, math.inf), here
    raise UserError("No amount of noise meets this budget. Give a larger epsilon or delta.")


def _secant(low: _Tried, high: _Tried, target: float) -> float:
    """The level where the secant, on logarithmic scales, meets the target; else the middle."""
    middle = math.sqrt(low.level * high.level)
    if not math.isfinite(low.epsilon) or high.epsilon <= 0 or high.level / low.level > 4:
        return middle
    share = math.log(low.epsilon / target) / math.log(low.epsilon / high.epsilon)
    root = low.level * (high.level / low.level) ** share
    inside = low.level * (1 + 0.6 * TOLERANCE) < root < high.level * (1 - 0.6 * TOLERANCE)
    return root if inside or high.level / low.level < 1 + 3 * TOLERANCE else middle


@_Remembered
def most_rounds(recipe: Recipe, budget: Budget, dim: int, population: int) -> int:
    """The largest number of rounds of a recipe with calibrated noise within the budget."""

    def within(rounds: int) -> bool:
        spent = recipe.spent(dim, population, rounds)
        return accounting.epsilon(spent, budget.delta) <= budget.epsilon

    if not within(1):
        raise UserError(
            f"{recipe.name}: a single round already spends more than ε = "
            f"{short(budget.epsilon)}. Use more noise."
        )
    high = 2
    while within(high):
        high *= 2
        if high > MOST_ROUNDS:
            return MOST_ROUNDS
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


@_Remembered
def largest_cohort(
    recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int
) -> Recipe:
    """The recipe with the largest cohort that meets the budget with its noise.

    For a Poisson cohort, this is the rate, within 0.5%. For a fixed size, it is the number of
    clients. It is found by bisection, above the recipe's own cohort if that meets the budget, else
    below it. A larger cohort usually costs more, except where the noise of clients adds up.
    """

    def within(cohort: Cohort) -> bool:
        spent = replace(recipe, cohort=cohort).spent(dim, population, rounds)
        return accounting.epsilon(spent, budget.delta) <= budget.epsilon

    best = _largest(recipe.cohort, population, within)
    if best is None:
        raise UserError(
            f"{recipe.name}: even the smallest cohort exceeds ε = {short(budget.epsilon)} "
            "with this noise. Use more noise or fewer rounds."
        )
    return replace(recipe, cohort=best)


def _largest(cohort: Cohort, population: int, within: Callable[[Cohort], bool]) -> Cohort | None:
    """Bisection over whole clients for a fixed size, else on a logarithmic scale."""

    def of(size: float) -> Cohort:
        found = cohort.with_size(size, population)
        if found is None:
            kind = type(cohort).__name__
            raise UserError(
                f"The size of cohort {kind} cannot be chosen, because it does not define "
                "`with_size`. Use Poisson or FixedSize."
            )
        return found

    low, high = (0.0 if cohort.fixed else 1 / 1000), float(population)
    if within(of(high)):
        return of(high)
    if within(cohort):
        low = cohort.expected(population)
    elif not cohort.fixed and not within(of(low)):
        return None
    while (high - low > 1) if cohort.fixed else (high / low > 1 + TOLERANCE):
        middle = (low + high) // 2 if cohort.fixed else math.sqrt(low * high)
        low, high = (middle, high) if within(of(middle)) else (low, middle)
    return of(low) if low else None


sensible_delta = accounting.sensible_delta
