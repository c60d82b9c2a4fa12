"""What the accounting of a run asks its parts, and whether they still answer the same.

A run is calibrated, charged and stated by these answers. They are asked for once, before the first
round. A user-defined part that answers differently later would be stated at another ε than the one
that the ledger charges (docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedveil.accounting.events import alike
from fedveil.errors import UserError
from fedveil.parts.bound import Bound
from fedveil.privacy.composition import plan
from fedveil.privacy.guarantee import VIEWS
from fedveil.recipe import Recipe

SHORT = 100  # letters of an answer in an error
Answers = Mapping[tuple[str, str], Any]  # by slot and question
FIX = "Keep what changes in the part's state, and let it answer alike in all rounds."


class ChangedError(UserError):
    """A part answers differently than when its run was prepared."""


def answers(recipe: Recipe, dim: int, population: int) -> Answers:
    """The answers of a recipe with user-defined parts; none if all its parts are fedveil's."""
    return dict(_asked(recipe, dim, population)) if recipe.foreign else {}


def require_unchanged(recipe: Recipe, dim: int, population: int, before: Answers) -> None:
    """Refuse a recipe whose parts answer differently now."""
    now = answers(recipe, dim, population)
    for asked, answer in now.items():
        if answer != before[asked]:
            slot, question = asked
            raise ChangedError(
                f"{slot} {type(recipe.parts[slot]).__name__} has changed since the run was "
                f"prepared: {question} was {_brief(before[asked])} and is {_brief(answer)}. {FIX}"
            )


def require_accounted(
    recipe: Recipe, bound: Bound, dim: int, population: int, before: Answers
) -> None:
    """Refuse a round whose bound releases something else than the first one, if it adapts."""
    if not before or not recipe.bound.adapts:
        return
    for view in VIEWS:
        release, first = recipe.release(dim, population, view, bound), before[_event(recipe, view)]
        if not alike(release, first):
            raise ChangedError(
                f"bound {type(recipe.bound).__name__} has moved to a threshold at which a round "
                f"releases {_brief(release)} in view {view}, but {_brief(first)} is accounted. Use "
                "noise that scales with the bound."
            )


def _event(recipe: Recipe, view: str) -> tuple[str, str]:
    return "local" if recipe.by_record else "noise", f"the release in view {view}"


def _asked(recipe: Recipe, dim: int, population: int) -> Iterator[tuple[tuple[str, str], Any]]:
    """The answers in the order of the privacy chain, so the first that differs names its part."""
    cohort, bound, noise, memory = recipe.cohort, recipe.bound, recipe.noise, recipe.memory
    limits = recipe.limits(dim)
    for name in ("adjacency", "fixed", "cap", "honest", "independent", "spaced", "cyclic"):
        yield ("cohort", name), getattr(cohort, name)
    yield ("cohort", "separation"), recipe.separation
    yield ("cohort", "expected"), cohort.expected(population)
    yield ("cohort", "min_honest"), cohort.min_honest(population)
    yield ("cohort", "coin"), cohort.coin(population)
    yield ("cohort", "describe"), cohort.describe(recipe.unit, population)
    yield ("bound", "norms"), limits.bounded
    for name in ("adapts", "leaks", "leak", "released"):
        yield ("bound", name), getattr(bound, name)
    yield ("quantize", "norms"), limits.message
    for name in ("amplified", "personal", "kept"):
        yield ("memory", name), getattr(memory, name)
    for name in ("private", "at", "adds_up", "topped_up", "correlated", "noise_multiplier"):
        yield ("noise", name), getattr(noise, name)
    yield ("noise", "describe"), noise.describe()
    yield ("noise", "max_magnitude"), noise.max_magnitude(limits.message)
    for view in VIEWS:
        yield _event(recipe, view), recipe.release(dim, population, view)
    for view in VIEWS:
        yield ("cohort", f"the plan in view {view}"), plan(recipe, dim, population, view)


def _brief(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"
