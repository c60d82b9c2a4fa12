"""Refuse user-defined parts that do not draw from the streams that they are given.

The ledger counts a repeated round of a seeded run once, and sampling and noise are accounted as
fresh in every round. Both hold only for draws that are functions of the round's stream. A few draws
before the first round show the common mistakes (docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events
from fedveil.engines.asking import ask, bound_at
from fedveil.errors import UserError
from fedveil.parts.checks import repeatable, varied
from fedveil.parts.part import Begin, Part, Tensors, foreign
from fedveil.recipe import Recipe

EXAMPLES = 20  # of a client in a trial
Draw = Callable[[np.random.Generator], object]


def refuse_own_randomness(recipe: Recipe, x: Tensor, population: int, rounds: int) -> None:
    """Refuse user-defined parts with randomness of their own, or with the same draw every time."""
    for part, what, draw in _draws(recipe, x, population, rounds):
        if foreign(part) and not repeatable(draw):
            raise UserError(
                f"{recipe.name}: {type(part).__name__} draws randomness of its own: two equal "
                f"streams gave different {what}. Draw only from the rng that it is given."
            )
        if what == "clients" and foreign(part) and not varied(draw):
            _refuse_constant_cohort(recipe, len(x), population)
        if what == "noise" and foreign(part) and recipe.private and not varied(draw):
            raise UserError(
                f"{recipe.name}: {type(part).__name__} adds the same noise whatever the stream, so "
                "two rounds show their difference. Draw it from the rng that it is given."
            )
    for inner in recipe.insides(population) if recipe.by_record else ():
        refuse_own_randomness(inner, x, EXAMPLES, rounds)


def _refuse_constant_cohort(recipe: Recipe, dim: int, population: int) -> None:
    """Refuse amplification of a cohort that draws the same clients from every stream."""
    cohort, release = recipe.cohort, recipe.release(dim, population, "models")
    sure = not 1 <= cohort.expected(population) <= population - 1
    random = cohort.coin(population) is not None or cohort.amplify(release, population) != release
    if sure or not random or isinstance(release, events.NonPrivate):
        return
    raise UserError(
        f"{recipe.name}: {type(cohort).__name__} draws the same clients whatever the stream, but "
        "its `amplify` or `coin` says that they are drawn at random. Draw them from the rng that "
        "it is given, or do not define these methods."
    )


def _draws(
    recipe: Recipe, x: Tensor, population: int, rounds: int
) -> Iterator[tuple[Part, str, Draw]]:
    """What each part draws in the first round, as a function of the stream."""
    cohort, noise, quantize, bound = recipe.cohort, recipe.noise, recipe.quantize, recipe.bound
    expected = cohort.expected(population)
    public = expected, recipe.noise_of_mean(len(x), population)

    def begun(part: Part, rng: np.random.Generator) -> Tensors:
        found: Tensors = ask(part, "initial_state", Begin(x, population, rounds, rng, *public))
        return found

    def kept(part: Part) -> Tensors:
        return begun(part, np.random.default_rng(0))

    for part in recipe.parts.values():
        yield part, "initial states", lambda rng, part=part: begun(part, rng)  # type: ignore[misc]
    yield cohort, "clients", lambda rng: ask(cohort, "draw", population, rng, kept(cohort))
    if recipe.by_record:  # its records are drawn, bounded and given noise inside silos
        return
    sizes = torch.tensor([EXAMPLES])
    yield recipe.local, "plans", lambda rng: ask(recipe.local, "plan", sizes, 0, rng)
    limits = recipe.limits(len(x), bound_at(bound, kept(bound)) if bound.adapts else bound)
    if bound.adapts:
        yield bound, "thresholds", lambda rng: ask(bound, "step", kept(bound), 1, 2, expected, rng)
    if not noise.calibrated or not limits.message.bounded:
        return
    rows = torch.linspace(-1, 1, len(x))[None] * (limits.bounded.l2 / len(x) ** 0.5)
    yield quantize, "roundings", lambda rng: ask(quantize, "__call__", rows, limits.bounded, rng)
    if noise.on_messages:
        yield noise, "noise", lambda rng: ask(noise, "each", limits.message, rng)
    else:
        came = max(round(expected), 1)
        yield (
            noise,
            "noise",
            lambda rng: ask(noise, "step", limits.message, came, expected, rng, kept(noise))[0],
        )
