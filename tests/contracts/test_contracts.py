"""Every part and every recipe of the project keeps its contract; one without an example fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import nn

from fedveil import algorithms
from fedveil.accounting import accountant
from fedveil.data.federated import Federated
from fedveil.parts.local import Local
from fedveil.parts.server import Output
from fedveil.parts.statistics import Statistics
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.serialization import codec
from fedveil.testing import (
    check_bound,
    check_cohort,
    check_memory,
    check_noise,
    check_quantizer,
    check_recipe,
    check_server,
)
from fedveil.testing.replay import normal_answers, play
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from tests.contracts.examples import (
    BOUNDS,
    COHORTS,
    MEMORIES,
    NOISES,
    PRIVATE,
    QUANTIZERS,
    RECIPES,
    SERVERS,
    STATISTICS,
)


def check_statistics(statistics: Statistics) -> None:
    """δ(ε) is that of a Gaussian release, plus the escape, for each adjacency and twice over."""
    for adjacency in ("zero-out", "add-remove", "replace-one"):
        far = math.sqrt(2) if adjacency == "replace-one" and not statistics.joint else 1.0
        for times, told in ((1, statistics), (2, statistics.and_(statistics))):
            mu = far * math.sqrt(times) / statistics.ratio
            for epsilon in (0.5, 2.0):
                exact = norm.cdf(mu / 2 - epsilon / mu)
                exact -= math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
                exact += times * statistics.escape
                found = accountant.delta(told.event(adjacency), epsilon)
                assert (1 - 1e-9) * exact <= found <= 1.001 * exact + 1e-9, (
                    adjacency,
                    times,
                    epsilon,
                )


SUITES: dict[str, tuple[Callable[[Any], None], list[Any]]] = {
    "bound": (check_bound, list(BOUNDS)),
    "quantize": (check_quantizer, list(QUANTIZERS)),
    "noise": (check_noise, list(NOISES)),
    "discrete": (check_noise, list(NOISES)),
    "correlated": (check_noise, list(NOISES)),
    "cohort": (check_cohort, list(COHORTS)),
    "spaced": (check_cohort, list(COHORTS)),
    "memory": (check_memory, list(MEMORIES)),
    "controls": (check_memory, list(MEMORIES)),
    "records": (check_noise, list(NOISES)),
    "server": (check_server, list(SERVERS)),
    "statistics": (check_statistics, list(STATISTICS)),
}
FREE = {"local", "report", "schedule"}  # no message is private by them
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
        if module not in FREE and not issubclass(kind, Output | Local):
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
        text, remark = said.text(), "is at least 1/50"
        if any(math.isfinite(guarantee.epsilon) for guarantee in said.guarantees):
            assert (remark in text) == large, f"δ = {delta} of 50 clients: {text}"
            assert (remark in str(said.plain())) == large, f"δ = {delta}: {said.plain()}"


@pytest.mark.parametrize("view", ["models", "messages"])
def test_a_delta_of_one_over_n_is_remarked_on(view: Any) -> None:
    recipe = algorithms.dp_fedavg(rate=0.2, noise_multiplier=2.0)
    check_remark(Recipe(**{**vars(recipe), "view": view}))
