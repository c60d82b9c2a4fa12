"""Which noise a plan advises: the two statements that are known for large and small populations."""

from __future__ import annotations

import pytest

from fedveil import algorithms
from fedveil.planning.correlation import advice, choices
from fedveil.planning.forecast import Case, forecast
from fedveil.planning.signal import AssumedUpdates
from fedveil.recipe import Recipe


def case(recipe: Recipe, clients: int, rounds: int, epsilon: float | None, dim: int = 100) -> Case:
    return Case(recipe, dim, clients, rounds, AssumedUpdates(0.2), epsilon)


def test_banded_noise_has_a_third_of_the_error_with_many_clients() -> None:
    """342,000 clients, 1,000 a round, 2,052 rounds, ε = 8: six participations, 342 rounds apart."""
    planned = case(algorithms.dp_fedavg(rate=1000 / 342_000), 342_000, 2052, 8.0)
    every = choices(planned)
    found = {one.name: one for one in reversed(every)}
    assert found["independent"].error == 1
    assert 0.3 < found["banded"].error < 0.4
    assert found["blt"].error < 1.05 * found["banded"].error
    text = advice(every, 100)
    assert "banded noise would have 0.37 times the error in prefix sums" in text
    assert "--set noise=banded --set clients=1000." in text
    assert "blt noise would have" in advice(every, 4_000_000)  # 342 vectors of 32 MB


def test_nothing_is_gained_in_the_readme_s_demo() -> None:
    planned = case(algorithms.dp_norm_fedavg(rate=0.2), 3000, 200, 5.0)
    every = choices(planned)
    assert min(one.error for one in every[1:]) > 0.95
    assert advice(every, 7850).startswith("noise would have 1.07 times the error in prefix sums")


@pytest.mark.parametrize(
    "recipe",
    [
        algorithms.dp_fedavg_adaptive(),
        algorithms.fed_alpha_normec(rate=0.2),
        algorithms.dp_sgd(),
        algorithms.dp_norm_fedavg_secagg(clients=20),
        algorithms.fedavg(),
    ],
    ids=lambda recipe: recipe.name,
)
def test_noise_that_cannot_be_exchanged_is_left_alone(recipe: Recipe) -> None:
    assert choices(case(recipe, 100, 20, 8.0 if recipe.private else None)) == ()


def test_a_forecast_counts_what_noise_adds_up_to() -> None:
    """The noise of a run is that of its sum: less than if rounds were independent."""
    recipe = algorithms.dp_ftrl(clients=10, separation=20, noise_multiplier=2.0)
    alone = algorithms.dp_ftrl(clients=10, separation=20, bands=1, noise_multiplier=2.0)
    noises = [forecast(case(one, 200, 40, None)).noise for one in (recipe, alone)]
    assert noises[0] < 0.5 * noises[1]
