"""Choose noise, rounds or cohort for a budget: to 0.5%, and never on the wrong side of ε."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.discrete import Binomial, DiscreteGaussian
from fedveil.privacy import accounting, events
from fedveil.privacy.statement import guarantee
from fedveil.recipe import Recipe, foreign

TOLERANCE = 0.005
LEAST_LEVEL, LARGEST_LEVEL = 2.0**-20, 2.0**40  # of noise that is tried
MOST_ROUNDS = 1_000_000  # nobody plays more, and the accounting of more takes long


@dataclass(frozen=True)
class Budget:
    """(ε, δ): what a run may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        accounting.check_epsilon(self.epsilon)
        accounting.check_delta(self.delta)


def settled(
    recipe: Recipe, budget: Budget | None, rounds: int, dim: int, population: int
) -> Recipe:
    """The recipe with its noise settled: calibrated to the budget, or as it is and within it."""
    if budget is None:
        if not recipe.noise.settled:
            raise UserError(
                f"{recipe.name} is private but has no noise yet; give epsilon (and delta), "
                "or the amount of noise."
            )
        return recipe
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise, so it cannot keep epsilon = {budget.epsilon}; "
            "use a private algorithm such as dp_fedavg, or leave epsilon out."
        )
    if recipe.noise.settled:
        return _within(recipe, budget, rounds, dim, population)
    return settle(recipe, budget, rounds, dim, population)


def _within(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """Noise that is settled already is kept if it keeps the budget."""
    spent = guarantee(recipe, dim, population, rounds, budget.delta)
    if not spent.private:
        raise UserError(
            f"{recipe.name} cannot keep epsilon = {budget.epsilon:.3g}, since {spent.reason}; "
            "leave epsilon out, or use another algorithm."
        )
    if spent.epsilon > budget.epsilon:
        raise UserError(
            f"{recipe.name} with the noise it was given spends epsilon = {spent.epsilon:.3g} in "
            f"{rounds} rounds, over the budget of {budget.epsilon:.3g}; leave the amount of noise "
            "out to have it calibrated, or play fewer rounds."
        )
    return recipe


@functools.lru_cache(maxsize=256)
def settle(recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int) -> Recipe:
    """The recipe with the least noise that spends at most the budget in all rounds.

    Towards the view the recipe is for. Truncated noise may use up a part of δ.
    """
    share = budget.delta / max(rounds, 1)

    def at(level: float) -> Recipe:
        return recipe.with_noise(level, dim, population, budget.epsilon, share)

    def exact(level: float) -> float:
        return accounting.epsilon(at(level).spent(dim, population, rounds), budget.delta)

    _refuse_hopeless(at(1.0), dim, population)
    if isinstance(recipe.bound, AdaptiveClip):
        _refuse_precise_count(recipe, recipe.bound, budget, rounds, dim, population)
    return at(least_level(exact, budget.epsilon, _guess(at, budget, rounds, dim, population)))


def _guess(
    at: Callable[[float], Recipe], budget: Budget, rounds: int, dim: int, population: int
) -> float:
    """About the level that is sought, by Rényi divergences where they are quick; else 1."""
    quick = at(1.0)
    if isinstance(quick.noise, Binomial):  # as good as a discrete Gaussian of the same deviation
        noise = DiscreteGaussian()
        alike = replace(quick, noise=noise)
        share = budget.delta / max(rounds, 1)

        def at(level: float) -> Recipe:
            return alike.with_noise(level, dim, population, budget.epsilon, share)

    def rough(level: float) -> float:
        spent = at(level).spent(dim, population, rounds)
        found = accounting.quick_epsilon(spent, budget.delta)
        return budget.epsilon / level if found is None else found

    try:
        return least_level(rough, budget.epsilon, 1.0)
    except UserError:  # what Rényi divergences cannot show, the exact accounting may
        return 1.0


def _refuse_hopeless(recipe: Recipe, dim: int, population: int) -> None:
    """Some recipes have no guarantee towards a view, whatever the noise."""
    release = recipe.release(dim, population)
    if isinstance(release, events.NonPrivate) and recipe.noise.at == "server":
        raise UserError(
            f"{recipe.name} has no guarantee in view '{recipe.view}', since {release.reason}; "
            "use noise at the clients, or view 'models'."
        )


def _refuse_precise_count(
    recipe: Recipe, bound: AdaptiveClip, budget: Budget, rounds: int, dim: int, population: int
) -> None:
    """An adaptive clip's count has noise of its own, for which none on the sum makes up."""

    def alone(deviation: float) -> float:
        counting = replace(recipe, bound=replace(bound, count_noise=deviation))
        loud = counting.with_noise(LARGEST_LEVEL, dim, population, budget.epsilon, budget.delta)
        return accounting.epsilon(loud.spent(dim, population, rounds), budget.delta)

    given = bound.deviation(recipe.cohort.expected(population))
    if alone(given) <= budget.epsilon:
        return
    enough = 1.5 * least_level(alone, budget.epsilon, given)
    raise UserError(
        f"{recipe.name}: the count of short updates has noise of deviation {given:.3g} (unless "
        f"given, cohort/20), and alone spends more than epsilon = {budget.epsilon:g} in "
        f"{rounds} rounds; give count_noise = {enough:.2g} or more, or a larger cohort."
    )


def least_level(epsilon: Callable[[float], float], target: float, guess: float = 1.0) -> float:
    """The least level with epsilon(level) ≤ target, for an ε that falls as the level grows.

    It is bracketed from the guess on and then closed in on by secants on logarithmic scales.

    >>> 2.0 <= least_level(lambda level: 6.0 / level, 3.0) <= 2.0 * (1 + TOLERANCE)
    True
    """
    low, high = _bracket(epsilon, target, guess)
    while high.level / low.level > 1 + TOLERANCE:
        root = _secant(low, high, target)
        for level in (root * (1 + 0.4 * TOLERANCE), root * (1 - 0.4 * TOLERANCE)):
            if low.level < level < high.level:
                found = _Tried(level, epsilon(level))
                low, high = (low, found) if found.epsilon <= target else (found, high)
    return high.level


class _Tried(NamedTuple):
    level: float
    epsilon: float


def _bracket(
    epsilon: Callable[[float], float], target: float, guess: float
) -> tuple[_Tried, _Tried]:
    """One level that spends too much and one that does not, by larger and larger steps."""
    here, step = _Tried(guess, epsilon(guess)), 1.05
    while True:
        enough = here.epsilon <= target
        leap = min(max(here.epsilon / target, 1 / 8), 8.0)  # ε falls about as 1/level does
        level = here.level * leap / step if enough else here.level * leap * step
        if not LEAST_LEVEL < level < LARGEST_LEVEL:
            break
        there = _Tried(level, epsilon(level))
        if enough != (there.epsilon <= target):
            return (there, here) if enough else (here, there)
        here, step = there, min(step**2, 4.0)
    if enough:
        return _Tried(here.level, math.inf), here
    raise UserError("No amount of noise meets this budget; allow a larger epsilon or delta.")


def _secant(low: _Tried, high: _Tried, target: float) -> float:
    """Where the line through both, on logarithmic scales, meets the target; the middle if none."""
    middle = math.sqrt(low.level * high.level)
    if not math.isfinite(low.epsilon) or high.epsilon <= 0 or high.level / low.level > 4:
        return middle
    share = math.log(low.epsilon / target) / math.log(low.epsilon / high.epsilon)
    root = low.level * (high.level / low.level) ** share
    inside = low.level * (1 + 0.6 * TOLERANCE) < root < high.level * (1 - 0.6 * TOLERANCE)
    return root if inside or high.level / low.level < 1 + 3 * TOLERANCE else middle


@functools.lru_cache(maxsize=256)
def most_rounds(recipe: Recipe, budget: Budget, dim: int, population: int) -> int:
    """The largest number of rounds that a recipe with settled noise can play within the budget."""

    def within(rounds: int) -> bool:
        spent = recipe.spent(dim, population, rounds)
        return accounting.epsilon(spent, budget.delta) <= budget.epsilon

    if not within(1):
        raise UserError(
            f"{recipe.name}: a single round already spends more than epsilon = {budget.epsilon:g}; "
            "use more noise."
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


@functools.lru_cache(maxsize=256)
def largest_cohort(
    recipe: Recipe, budget: Budget, rounds: int, dim: int, population: int
) -> Recipe:
    """The recipe with the largest cohort that keeps the budget with the noise it has.

    Of a Poisson cohort the rate, to 0.5%; of a fixed size the number of clients. Found by bisection
    above the recipe's own cohort if that keeps the budget, else below it: a larger cohort mostly
    costs more, but not where clients bring noise that adds up.
    """

    def within(cohort: Cohort) -> bool:
        spent = replace(recipe, cohort=cohort).spent(dim, population, rounds)
        return accounting.epsilon(spent, budget.delta) <= budget.epsilon

    best = _largest(recipe.cohort, population, within)
    if best is None:
        raise UserError(
            f"{recipe.name}: not even the smallest cohort keeps epsilon = {budget.epsilon:g} with "
            "this noise; use more noise or fewer rounds."
        )
    return replace(recipe, cohort=best)


def _largest(cohort: Cohort, population: int, within: Callable[[Cohort], bool]) -> Cohort | None:
    """By bisection: of the rate on a logarithmic scale, of a size in whole clients."""
    if isinstance(cohort, Poisson) and not foreign(cohort):
        return _largest_rate(cohort, population, within)
    if isinstance(cohort, FixedSize) and not foreign(cohort):
        return _largest_size(cohort, population, within)
    if isinstance(cohort, Everyone):
        raise UserError("Everyone takes part in every round; there is no cohort to choose.")
    raise UserError(f"How to make {type(cohort).__name__} larger is not known; give its size.")


def _largest_rate(
    cohort: Poisson, population: int, within: Callable[[Cohort], bool]
) -> Cohort | None:
    low, high = 1 / (1000 * population), 1.0
    if within(replace(cohort, rate=high)):
        return replace(cohort, rate=high)
    if within(cohort):
        low = cohort.rate
    elif not within(replace(cohort, rate=low)):
        return None
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if within(replace(cohort, rate=middle)) else (low, middle)
    return replace(cohort, rate=low)


def _largest_size(
    cohort: FixedSize, population: int, within: Callable[[Cohort], bool]
) -> Cohort | None:
    low, high = cohort.clients if within(cohort) else 0, population
    if within(replace(cohort, clients=high)):
        return replace(cohort, clients=high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(replace(cohort, clients=middle)) else (low, middle)
    return replace(cohort, clients=low) if low else None


def sensible_delta(population: int) -> float:
    """1e-5, or a tenth of 1/population where that is smaller.

    >>> sensible_delta(3000), sensible_delta(60_000)
    (1e-05, 1.6666666666666667e-06)
    """
    return min(1e-5, 0.1 / population)
