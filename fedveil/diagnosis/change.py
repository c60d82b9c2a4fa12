"""Changes to try: how they are written on the command line, and what a larger cohort is worth."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

from fedveil.diagnosis.rule import Numbers, figure
from fedveil.diagnosis.run import Run
from fedveil.errors import UserError
from fedveil.parts.noise import Gaussian, RoundedGaussian
from fedveil.planning.forecast import Case, varied, with_noise
from fedveil.planning.noise import noise_norm
from fedveil.planning.signal import Assumed
from fedveil.recipe import Recipe

NEAR = 1.1  # times the least noise: twice the clients for less than that is not worth their work


def flags(recipe: Recipe, **values: float) -> str:
    """`--set name=value` for each; nothing where the recipe's algorithm has no such parameters.

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
    """Of the algorithm that made the recipe; none for one of the user's own."""
    from fedveil.algorithms import ALGORITHMS

    made = ALGORITHMS.get(recipe.name)
    return set() if made is None else set(inspect.signature(made).parameters)


def stretched_steps(recipe: Recipe, factor: float) -> str:
    """Flags that make every global step so many times as long.

    Bounded updates leave that to the server's rate; examples, whose server has none, to the
    learning rate and C together; unbounded ones to the learning rate.
    """
    local = recipe.local.rate(0) * factor
    clip = recipe.bound.norms(1).l2 * factor
    if math.isinf(clip):
        return flags(recipe, learning_rate=local)
    if recipe.unit == "example":
        return flags(recipe, learning_rate=local, clip=clip)
    return flags(recipe, server_rate=_server_rate(recipe) * factor)


def _server_rate(recipe: Recipe) -> float:
    schedule = getattr(recipe.server, "rate", None)
    return 1.0 if schedule is None else float(schedule(0))


def cohort_flags(recipe: Recipe, size: float, population: float) -> str:
    """Flags for a cohort of this size."""
    if recipe.cohort.fixed:
        return flags(recipe, clients=round(size))
    return flags(recipe, rate=size / population)


def larger_cohort(run: Run) -> Numbers:
    """The smallest cohort with nearly the least noise on the mean at the run's own (ε, δ).

    Noise is settled anew for each: a client that is drawn more often needs more of it.
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


def _case(run: Run) -> Case | None:
    recipe, budget = run.recipe, run.budget
    if budget is None or run.dim is None or run.population is None:
        return None
    if not isinstance(recipe.noise, Gaussian | RoundedGaussian):
        return None
    open_ = replace(recipe, noise=replace(recipe.noise, multiplier=None))
    return Case(open_, run.dim, run.population, run.whole, Assumed(1.0), *budget)


def _noise(case: Case, size: float) -> float | None:
    """‖noise‖ on the mean with so many clients a round; None where that cannot be."""
    try:
        other = varied(case, "cohort", size)
        return None if other is None else noise_norm(with_noise(other), case.dim, case.population)
    except UserError:
        return None
