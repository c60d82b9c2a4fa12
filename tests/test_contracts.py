"""Every part and every recipe of the project keeps its contract; one without an example fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.runs import codec
from fedveil.training import Training, prepare

from .contracts.bounds import check_bound
from .contracts.cohorts import check_cohort
from .contracts.examples import BOUNDS, COHORTS, NOISES, PRIVATE, QUANTIZERS, RECIPES
from .contracts.noises import check_noise
from .contracts.quantizers import check_quantizer
from .contracts.recipes import check_recipe
from .contracts.replay import normal_answers, play

SUITES: dict[str, tuple[Callable[[Any], None], list[Any]]] = {
    "bound": (check_bound, list(BOUNDS)),
    "quantize": (check_quantizer, list(QUANTIZERS)),
    "noise": (check_noise, list(NOISES)),
    "discrete": (check_noise, list(NOISES)),
    "cohort": (check_cohort, list(COHORTS)),
}
FREE = {"local", "report", "memory", "server", "schedule"}  # no message is private by them
WITH_CONTRACT = [
    pytest.param(check, part, id=repr(part))
    for check, parts in {id(parts[0]): parts for parts in SUITES.values()}.values()
    for part in parts
]


@pytest.mark.parametrize(("check", "part"), WITH_CONTRACT)
def test_every_part_keeps_its_contract(check: Callable[[Any], None], part: Any) -> None:
    check(part)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_keeps_its_contract(name: str) -> None:
    check_recipe(RECIPES[name])


def test_every_part_of_the_project_has_an_example() -> None:
    for name, kind in codec.PARTS.items():
        module = kind.__module__.rpartition(".")[2]
        if module not in FREE:
            assert module in SUITES, f"parts/{module}.py has no contract suite"
            parts = SUITES[module][1]
            assert kind in map(type, parts), f"{name} has no example in tests/contracts/examples.py"


def test_every_algorithm_has_an_example() -> None:
    assert {recipe.name for recipe in RECIPES.values()} == set(algorithms.ALGORITHMS)
    assert {r.name for r in PRIVATE.values()} == {r.name for r in RECIPES.values() if r.private}


class Weights(nn.Module):
    """Softmax regression that starts where it is told."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        nn.init.constant_(self.linear.weight, value)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(inputs)
        return scores


def noise_of(training: Training) -> torch.Tensor:
    """The direction of the noise of a run's first round, with clients that say nothing."""
    answers = normal_answers(training.data.clients, training.task.dim)
    pair = [
        play(training.recipe, answers, training.key, noise=amount, data=training.data).total
        for amount in ("real", "none")
    ]
    noise = pair[0] - pair[1]
    direction: torch.Tensor = noise / noise.norm()
    return direction


OTHERS: dict[str, dict[str, Any]] = {
    "epsilon": {"epsilon": 3.0},
    "seed": {"seed": 1},
    "rounds": {"rounds": 6},
    "recipe": {"recipe": algorithms.fed_alpha_normec(beta=0.4)},
    "first model": {"model": Weights(0.1)},
    "start": {"start": torch.ones(18)},
}


def check_runs_share_no_noise(data: Federated, other: dict[str, Any]) -> None:
    """Two runs that differ in anything have unrelated noise: else their difference is clean."""
    base: dict[str, Any] = {
        "recipe": algorithms.fed_alpha_normec(), "data": data, "model": Weights(0.0),
        "rounds": 5, "epsilon": 2.0,
    }  # fmt: skip
    first, second = prepare(**base), prepare(**{**base, **other})
    alike = float(noise_of(first) @ noise_of(second))
    assert abs(alike) < 0.99, f"runs that differ in {list(other)} add the same noise ({alike:.3f})"


@pytest.mark.parametrize("what", OTHERS)
def test_runs_that_differ_share_no_noise(what: str, blobs: Federated) -> None:
    check_runs_share_no_noise(blobs, OTHERS[what])


def check_remark(recipe: Recipe) -> None:
    """A δ of 1/n or more is remarked on wherever a finite ε is stated; a smaller one is not."""
    for delta, large in ((1 / 50, True), (0.1, True), (1 / 500, False)):
        said = statement(recipe, 6, 50, 3, delta)
        text, remark = said.text(), "δ is at least 1/50"
        if any(math.isfinite(guarantee.epsilon) for guarantee in said.guarantees):
            assert (remark in text) == large, f"δ = {delta} of 50 clients: {text}"
            assert (remark in str(said.plain())) == large, f"δ = {delta}: {said.plain()}"


@pytest.mark.parametrize("view", ["models", "messages"])
def test_a_delta_of_one_over_n_is_remarked_on(view: Any) -> None:
    recipe = algorithms.dp_fedavg(rate=0.2, noise_multiplier=2.0)
    check_remark(Recipe(**{**vars(recipe), "view": view}))
