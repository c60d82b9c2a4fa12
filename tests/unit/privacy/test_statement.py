"""The statement: complete, the same in text and JSON, and never smaller than what is true."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import algorithms
from fedveil.accounting.rounding import rounded_up
from fedveil.algorithms import ALGORITHMS
from fedveil.parts.cohort import Cohort, FixedSize, Poisson
from fedveil.privacy.guarantee import VIEWS, written
from fedveil.privacy.statement import Statement, statement
from fedveil.recipe import Recipe

NEEDED = {"dp_norm_fedavg_secagg": {"clients": 20}}


def every() -> list[Recipe]:
    """Every algorithm, with its noise settled."""
    recipes = []
    for name, method in ALGORITHMS.items():
        needed = {"clients": 20} if "clients" in method.__annotations__ else {}
        recipe = method(**{**needed, **NEEDED.get(name, {})}).planned(10, 200)
        calibrated = recipe.noise.calibrated
        recipes.append(recipe if calibrated else recipe.with_noise(90.0, 30, 200, 1.0, 1e-6))
    return recipes


@pytest.mark.parametrize("recipe", every(), ids=lambda recipe: recipe.name)
def test_every_recipe_has_a_statement_that_names_what_an_epsilon_needs(recipe: Recipe) -> None:
    made = statement(recipe, 30, 200, 10, 1e-5)
    labels = [label.strip() for label, _ in made.entries()]
    assert labels[0] == "Privacy"
    plain = json.loads(json.dumps(made.plain(), allow_nan=False))
    assert set(plain["views"]) == set(VIEWS)
    assert plain["unit"] == recipe.unit
    assert all(text in made.text() for text in plain["statement"].values())
    if not recipe.private:
        assert labels == ["Privacy"]
        return
    wanted = [
        "Released",
        "Sampling",
        "Noise",
        "Accounting",
        "Assumptions",
        "Not covered",
        "Other views",
    ]
    assert set(wanted) <= set(labels)
    assert f"per {recipe.unit}" in made.main.sentence()
    assert written(made.main.adjacency) in made.main.sentence()


def test_the_main_guarantee_is_towards_the_recipe_s_view() -> None:
    recipe = algorithms.dp_norm_fedavg_secagg(20, sigma=60.0, support=900)
    made = statement(recipe, 30, 200, 3, 1e-5)
    assert made.main == made.towards("sum")
    assert "the sum of their messages" in made.main.sentence()
    assert made.bits == 16  # ±(11 + 900) in 11 bits, and 5 for the sum of twenty
    assert made.message_bytes == 60


def test_fair_coins_are_told_from_being_drawn_every_time() -> None:
    recipe = algorithms.dp_norm_fedavg_discrete(20, sigma=300.0, support=4000)
    made = statement(recipe, 30, 200, 10, 1e-5)
    assert made.main.drawn is not None
    assert made.main.drawn < made.main.epsilon
    assert "takes part in every round" in made.main.sentence()
    capped = statement(
        algorithms.dp_norm_fedavg_discrete(rate=0.1, sigma=300.0, support=4000, cap=4),
        30, 200, 10, 1e-5,
    )  # fmt: skip
    assert "takes part in every round" in capped.main.sentence()
    assert capped.towards("models").most == 4
    assert capped.towards("models").epsilon < capped.main.epsilon


def test_no_coins_are_spoken_of_where_there_are_none() -> None:
    """Everyone takes part; a cap on a fixed size makes coins depend on others'."""
    everyone = algorithms.dp_norm_fedavg_discrete(200, sigma=300.0, support=4000)
    capped = algorithms.dp_norm_fedavg_discrete(20, sigma=300.0, support=4000, cap=4)
    for recipe in (everyone, capped):
        assert statement(recipe, 30, 200, 10, 1e-5).main.drawn is None


def test_a_delta_that_is_too_large_is_remarked_upon_in_every_view() -> None:
    recipe = algorithms.dp_norm_fedavg_discrete(20, sigma=300.0, support=4000)
    made = statement(recipe, 30, 200, 10, 1 / 200)
    assert all(
        g.sentence().startswith("WARNING: δ = 0.005 is at least 1/200")
        for g in made.guarantees
        if g.private
    )


def test_seeded_and_secure_noise_are_told_apart() -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)

    def of(secure: bool | None) -> Statement:
        return statement(recipe, 30, 200, 10, 1e-5, secure)

    assert "anyone who knows the seed" in dict(of(False).entries())["Noise"]
    assert "operating system" in dict(of(True).entries())["Noise"]
    assert "seed" not in of(None).text()


@given(st.floats(1e-12, 1e6))
def test_printed_numbers_are_never_smaller_than_what_they_stand_for(number: float) -> None:
    printed = float(rounded_up(number).replace(",", ""))
    assert number <= printed <= number * 1.011


def test_infinity_is_printed_as_such() -> None:
    assert rounded_up(math.inf) == "∞"


@pytest.mark.parametrize("cohort", [FixedSize(20), Poisson(0.2), FixedSize(20, honest=20)])
def test_amplified_client_noise_assumes_that_every_message_arrives(cohort: Cohort) -> None:
    made = replace(algorithms.dp_norm_fedavg_binomial(20, trials=4000), cohort=cohort)
    told = dict(statement(made, 30, 100, 10, 1e-5).entries())["Assumptions"]
    assumed = "View models: every sampled client's message arrives" in told
    assert assumed == made.hidden("models") == (cohort == FixedSize(20))


def test_noise_of_the_server_needs_no_message_to_arrive() -> None:
    made = algorithms.dp_fedavg(clients=20, noise_multiplier=2.0)
    assert made.hidden("models")
    assert "arrives" not in dict(statement(made, 30, 100, 10, 1e-5).entries())["Assumptions"]


def test_the_accountant_is_named_for_every_kind_of_noise() -> None:
    made = algorithms.dp_norm_fedavg_binomial(20, trials=4000)
    told = dict(statement(made, 30, 100, 10, 1e-5).entries())["Accounting"]
    assert "Integer noise: the Gaussian that dominates it, or its Rényi diverg" in told
    gaussian = statement(algorithms.dp_fedavg(noise_multiplier=1.0), 30, 100, 10, 1e-5)
    accounting = dict(gaussian.entries())["Accounting"]
    assert accounting.endswith("with privacy loss distributions, rounded up.")
