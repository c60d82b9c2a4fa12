"""Suggested changes: as flags of the command line, and the benefit of a larger cohort."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

from fedveil.diagnosis.rule import Numbers, figure
from fedveil.diagnosis.run import DiagnosedRun
from fedveil.errors import UserError
from fedveil.planning.forecast import Case, forecast, varied
from fedveil.planning.signal import AssumedUpdates
from fedveil.recipe import Recipe

NEAR = 1.1  # times the least noise: a smaller gain is not worth twice the clients


def flags(recipe: Recipe, **values: float) -> str:
    """`--set name=value` for each; empty if the recipe's algorithm lacks one of the parameters.

    >>> from fedveil.algorithms import dp_fedavg
    >>> flags(dp_fedavg(), clip=14.2, rate=0.25)
    '--set clip=14 --set rate=0.25'
    >>> flags(dp_fedavg(), scale=1.0)
    ''
    """
    if not parameters(recipe).issuperset(values):
        return ""
    return " ".join(
        f"--set {name}={figure(value).replace(',', '')}" for name, value in values.items()
    )


def parameters(recipe: Recipe) -> set[str]:
    """The parameters of the recipe's algorithm; empty for parts or an algorithm of the user's."""
    from fedveil.algorithms import ALGORITHMS

    made = None if recipe.foreign else ALGORITHMS.get(recipe.name)
    return set() if made is None else set(inspect.signature(made).parameters)


def stretched_steps(recipe: Recipe, factor: float) -> str:
    """Flags that scale every global step by a factor.

    With bounded updates they change the server's rate, with unbounded ones the learning rate.
    """
    if math.isinf(recipe.bound.norms(1).l2):
        return flags(recipe, learning_rate=recipe.local.rate(0) * factor)
    rate = recipe.server.rate_at(0)
    return "" if rate is None else flags(recipe, server_rate=rate * factor)


def cohort_flags(recipe: Recipe, size: float, population: float) -> str:
    """Flags for a cohort of this size."""
    if recipe.cohort.fixed:
        return flags(recipe, clients=round(size))
    return flags(recipe, rate=size / population)


def larger_cohort(run: DiagnosedRun) -> Numbers:
    """The smallest cohort with nearly the least noise on the mean, at the run's own (ε, δ).

    Noise is calibrated for each size: a client that is sampled more often needs more of it.
    """
    case = _case(run)
    if case is None or run.population is None:
        return {}
    now = case.recipe.cohort.expected(run.population)
    sizes = [now * 2**power for power in range(1, 12) if now * 2**power < run.population]
    found = [(size, _noise(case, size)) for size in (now, *sizes, float(run.population))]
    known = [(size, noise) for size, noise in found if noise is not None]
    if len(known) < 2 or known[0][0] != now:
        return {}
    least = min(noise for _, noise in known)
    size, noise = next(pair for pair in known if pair[1] <= NEAR * least)
    return {"larger": size, "gain": known[0][1] / noise}


def _case(run: DiagnosedRun) -> Case | None:
    recipe, budget = run.recipe, run.budget
    if budget is None or run.dim is None or run.population is None:
        return None
    noise = recipe.noise.uncalibrated()
    if noise is None:
        return None
    return Case(
        replace(recipe, noise=noise),
        run.dim,
        run.population,
        run.total_rounds,
        AssumedUpdates(1.0),
        *budget,
    )


def _noise(case: Case, size: float) -> float | None:
    """‖noise‖ on the mean for a cohort of this size; None if the size is impossible.

    Relative to the signal that clients below their cap leave on average.
    """
    try:
        other = varied(case, "cohort", size)
        found = None if other is None else forecast(other)
    except UserError:
        return None
    return None if found is None or found.noise is None else found.noise / found.below_cap
