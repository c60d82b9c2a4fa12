"""Recommendations say no more than the committed results, and keep what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.planning.recommend import RECOMMENDED, Recommendation, recommended
from fedveil.training.settings import read_settings, resolve_recipe
from tests.conftest import Run

RESULTS = Path(__file__).parents[3] / "papers" / "results"


@pytest.mark.parametrize("advised", RECOMMENDED.values(), ids=lambda one: one.algorithm)
def test_every_recommendation_rests_on_a_committed_result(advised: Recommendation) -> None:
    assert advised.evidence
    for one in advised.evidence:
        file = RESULTS / f"{one.item.replace('/', '.')}.{one.scale}.json"
        claims = {claim["text"]: claim for claim in json.loads(file.read_text())["claims"]}
        assert claims[one.claim]["verdict"] == one.verdict
        (found,) = claims[one.claim]["intervals"]
        assert found == pytest.approx(one.interval, rel=0.01)


@pytest.mark.parametrize("unit", RECOMMENDED)
def test_a_recommendation_is_a_recipe_that_keeps_the_given_sampling(unit: str) -> None:
    algorithm = {"client": "dp_fedavg", "example": "dp_sgd"}[unit]
    given = {"algorithm": algorithm, "epsilon": 2.0, "parameters": {"rate": 0.05, "clip": 9.0}}
    settings = read_settings(None, given)
    advised = recommended(settings)
    applied = advised.applied(settings)
    recipe = resolve_recipe(applied)
    assert (recipe.name, recipe.unit) == (advised.algorithm, unit)
    assert recipe.cohort.expected(1000) == 50
    assert applied.epsilon == 2.0


def test_what_no_result_covers_is_refused() -> None:
    with pytest.raises(UserError, match="Give --epsilon"):
        recommended(read_settings(None, {"algorithm": "dp_fedavg"}))
    given = {"algorithm": "dp_fedavg", "epsilon": 1.0, "view": "sum"}
    with pytest.raises(UserError, match="for view 'models', not 'sum'"):
        recommended(read_settings(None, given))


def test_the_command_plans_what_it_recommends(run: Run) -> None:
    asked = ("plan", "--recommend", "--clients", 200, "--rate", 0.2, "--epsilon", 4, "--dim", 50)
    shown = run(*asked)
    assert shown.code == 0, shown.err
    for word in ("Recommend  dp_norm_fedavg", "rate=0.2", "Evidence", "das2022/table1a, small"):
        assert word in shown.out
    plain = json.loads(run(*asked, "--json").out)
    assert plain["algorithm"] == plain["recommendation"]["algorithm"] == "dp_norm_fedavg"
    assert plain["recommendation"]["evidence"][0]["verdict"] == "holds"
