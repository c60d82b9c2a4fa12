"""The predicted time of a round is that of whole rounds, for every recipe."""

from __future__ import annotations

from typing import Any

import pytest

import fedveil as fv
from fedveil.loop import run_round
from fedveil.planning import compute
from fedveil.planning.compute import _with_everyone
from fedveil.recipe import Recipe
from tests.contracts.examples import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_round_of_every_recipe_can_be_timed_with_everyone(name: str) -> None:
    recipe = RECIPES[name]
    everyone = _with_everyone(recipe)
    assert isinstance(everyone, Recipe)
    assert (everyone.bound, everyone.local) == (recipe.bound, recipe.local)
    assert everyone.cohort.expected(7) == 7


def test_a_short_round_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a round's work is in it. How near predictions are: docs/planning.md."""
    played = []

    def counted(recipe: Recipe, *given: Any, **named: Any) -> Any:
        played.append(recipe.name)
        return run_round(recipe, *given, **named)

    monkeypatch.setattr(compute, "run_round", counted)
    known = {"dataset": "digits", "clients": 100, "model": "mlp-64", "rate": 0.3, "steps": 5}
    predicted = fv.plan(rounds=8, epsilon=8.0, **known).cost  # type: ignore[arg-type]
    assert predicted.tried
    assert predicted.seconds > 0
    assert set(played) == {"dp_norm_fedavg"}
