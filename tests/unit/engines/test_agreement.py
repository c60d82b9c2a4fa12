"""All engines give the same numbers, whatever the grouping, on every recipe."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import BETTER, choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.models import build
from fedveil.parts.local import SGD, IncrementalGradient
from fedveil.parts.schedule import Constant
from fedveil.privacy.secure import secured
from fedveil.recipe import Recipe

RECIPES: list[Recipe] = [
    algorithms.fedavg(clients=6, learning_rate=0.1, epochs=2, batch=3, momentum=0.9),
    algorithms.fedprox(learning_rate=0.1, strength=0.5, steps=4, batch=2),
    algorithms.model_clipped_fedavg(clip=0.5, steps=3),
    algorithms.clipped_fedavg(clip=0.01, steps=3, batch=4),
    algorithms.dp_fedavg(clip=0.5, rate=0.7, steps=3, weight_decay=1e-2, noise_multiplier=0.1),
    algorithms.dp_fedavg(clip=0.5, clients=5, steps=2, noise_multiplier=0.1, noise_at="client"),
    algorithms.dp_fedavg(clip=0.5, rate=0.7, cap=2, levels=32, steps=2, noise_multiplier=0.1),
    algorithms.dp_fedavg_coordinatewise(limit=0.1, rate=0.7, steps=2, noise_multiplier=0.1),
    algorithms.dp_fedavg_adaptive(start=0.2, rate=0.7, steps=2, batch=3, noise_multiplier=0.1),
    secured(algorithms.dp_fedavg(clip=0.5, rate=0.7, steps=2, noise_multiplier=0.1)),
    algorithms.norm_fedavg(clients=6, steps=2, batch=3),
    algorithms.dp_norm_fedavg(
        scale=2.0, rate=0.5, decay=0.9, server_momentum=0.8, noise_multiplier=0.1
    ),
    algorithms.dp_norm_fedavg_discrete(rate=0.7, sigma=3.0, support=30, steps=2, batch=3),
    algorithms.dp_norm_fedavg_secagg(clients=6, sigma=3.0, support=30, steps=2),
    algorithms.dp_norm_fedavg_secagg(rate=0.7, honest=6, sigma=3.0, support=30, steps=2),
    algorithms.dp_norm_fedavg_qtdl(clients=6, levels=16, alpha=1.0, support=6, steps=2),
    algorithms.dp_norm_fedavg_qtdl(
        clients=6, levels=16, calibration="das2021", claimed_epsilon=1.0, steps=2
    ),
    algorithms.dp_norm_fedavg_binomial(clients=6, trials=4, levels=16, steps=2),
    algorithms.alpha_normec(learning_rate=0.1, noise_multiplier=0.1),
    algorithms.fed_alpha_normec(rate=0.6, steps=2, noise_multiplier=0.1),
    algorithms.fed_alpha_normec(
        rate=0.6, local="ig", update="everyone", normalize_server=True, noise_multiplier=0.1
    ),
    algorithms.silo_dp_fedavg(clip=0.5, rate=0.5, steps=2, noise_multiplier=0.1),
    algorithms.mr_mtl(clip=0.5, rate=0.5, steps=2, noise_multiplier=0.1),
    algorithms.fedadagrad(clients=6, steps=2),
    algorithms.fedadam(clients=6, steps=2, batch=3),
    algorithms.fedyogi(steps=2),
    algorithms.dp_fedadagrad(rate=0.7, steps=2, noise_multiplier=0.1),
    algorithms.dp_fedadam(rate=0.7, steps=2, noise_multiplier=0.1, remove_noise=True),
    algorithms.dp_fedyogi(clients=5, steps=2, noise_multiplier=0.1),
    algorithms.dp_ftrl(clients=3, separation=2, bands=3, steps=2, noise_multiplier=0.1),
    algorithms.scaffold(3, clients=6, batch=3),
    algorithms.dp_scaffold(0.5, 3, rate=0.7, weight_decay=1e-2, noise_multiplier=0.1),
    algorithms.clip21_sgd2m(batch=2, noise_multiplier=0.1),
    algorithms.dp_sgd(clip=0.1, rate=0.3, noise_multiplier=0.5),
    algorithms.dp_lsgd(clip=0.1, rate=0.3, steps=3, noise_multiplier=0.5),
]  # fmt: skip


def population(unit: str = "client") -> Federated:
    """Nine ragged clients with images of 1×16×16 in three classes."""
    rng = np.random.default_rng(5)
    sizes = [1, 4, 3, 6, 2, 5, 1, 5, 4]
    images = torch.from_numpy(rng.random((sum(sizes), 1, 16, 16), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, sum(sizes)))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    data = Federated("ragged", images, labels, offsets, Examples(images, labels), classes=3)
    return data.by_example() if unit == "example" else data


def played(recipe: Recipe, engine_of, model: str = "mlp-8", rounds: int = 2) -> torch.Tensor:
    """[rounds, iterate and released model]: the numbers after each round."""
    data = population(recipe.unit)
    module = build(model, data, torch.Generator().manual_seed(0))
    task = Task(module, "cross_entropy")
    state = begin(recipe, task.flatten(), data, 2, key=7)
    found = []
    for _ in range(rounds):
        state, _ = run_round(recipe, state, data, engine_of(task), key=7)
        found.append(torch.cat([state.x, state.model]))
    return torch.stack(found)


def dense(group: int):
    return lambda task: DenseEngine(task, group)


def factored(group: int):
    return lambda task: FactoredEngine(task, group)


@functools.cache
def in_fours(recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """By the dense and by the factored engine, four clients at a time."""
    return played(recipe, dense(4)), played(recipe, factored(4))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_all_engines_agree_on_every_recipe(recipe: Recipe) -> None:
    reference = played(recipe, LoopEngine)
    assert torch.isfinite(reference).all()
    for found in in_fours(recipe):
        assert torch.allclose(found, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=lambda number: RECIPES[number].name)
def test_grouping_does_not_change_results(number: int) -> None:
    """One at a time, several at a time, all at once.

    An engine knows nothing of the recipe but its local steps, and what becomes of its updates
    nothing of the engine: each recipe has both groupings, and every other one on each engine.
    """
    recipe = RECIPES[number]
    groups = (1, 100) if number % 2 else (100, 1)
    for engine_of, group, reference in zip(
        (dense, factored), groups, in_fours(recipe), strict=True
    ):
        assert torch.allclose(played(recipe, engine_of(group)), reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=lambda number: RECIPES[number].name)
def test_the_same_seed_gives_the_same_bytes(number: int) -> None:
    """Of every recipe on one of the two engines, in turn: they draw nothing themselves."""
    recipe, place = RECIPES[number], number % 2
    second = played(recipe, (dense, factored)[place](4))
    assert in_fours(recipe)[place].numpy().tobytes() == second.numpy().tobytes()


def test_every_algorithm_is_among_the_recipes() -> None:
    assert {recipe.name for recipe in RECIPES} == set(algorithms.ALGORITHMS)


@pytest.mark.parametrize("model", ["softmax", "cnn", "resnet20"])
def test_engines_agree_on_other_models(model: str) -> None:
    recipe = algorithms.dp_fedavg(clip=0.5, rate=0.7, steps=2, batch=3, noise_multiplier=0.1)
    reference = played(recipe, LoopEngine, model, rounds=1)
    for engine_of in (dense(3), factored(3)):
        found = played(recipe, engine_of, model, rounds=1)
        assert torch.allclose(found, reference, atol=1e-5, rtol=0)


class Recurrent(nn.Module):
    """An LSTM with a projection, which has no rule for stacking."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 4, proj_size=2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(images.squeeze(1))[0][:, -1])


def test_a_module_that_cannot_be_stacked_falls_to_the_loop(caplog) -> None:
    caplog.set_level("INFO", logger="fedveil")
    data = population()
    choice = choose("auto", Task(Recurrent(), "cross_entropy"), data)
    assert choice.engine.name == "loop"
    assert "the only engine that supports" in choice.reason
    assert "engine factored not used:" in caplog.text
    assert "engine dense not used:" in caplog.text


def test_auto_takes_an_engine_that_a_trial_found_quick_and_unknown_ones_are_refused() -> None:
    data = population()
    task = Task(build("softmax", data, torch.Generator()), "cross_entropy")
    choice = choose("auto", task, data, SGD(Constant(0.1), steps=20), timed=True)
    assert choice.engine.name in choice.seconds
    quick = min(choice.seconds.values())
    assert choice.seconds[choice.engine.name] <= BETTER * quick
    assert all(f"{name} {1e3 * took:.3g} ms" in choice.reason
               for name, took in choice.seconds.items())  # fmt: skip
    with pytest.raises(UserError, match=r"There is no engine 'dens'\. Did you mean 'dense'"):
        choose("dens", task, data)


def test_frozen_parameters_stay_as_they_are() -> None:
    data = population()
    module = build("mlp-8", data, torch.Generator().manual_seed(0))
    frozen = next(module.parameters())
    frozen.requires_grad_(False)
    task = Task(module, "cross_entropy")
    assert task.dim == sum(p.numel() for p in module.parameters()) - frozen.numel()
    for engine in (DenseEngine(task, 4), LoopEngine(task), FactoredEngine(task, 4)):
        recipe = algorithms.fedavg(steps=2)
        state = begin(recipe, task.flatten(), data, 1, key=0)
        state, _ = run_round(recipe, state, data, engine, key=0)
        assert len(state.x) == task.dim
        assert not torch.equal(state.x, task.flatten())


def rows_of_others(
    engine_of, last: int, rate: float, momentum: float, features: float
) -> torch.Tensor:
    """Differences of four small clients in a group with a fifth one of `last` examples."""
    sizes = [1, 1, 1, 1, last]
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 2, 20))[: sum(sizes)]
    inputs = torch.from_numpy(rng.random((20, 4), dtype=np.float32))[: sum(sizes)] * features
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    data = Federated("others", inputs, labels, offsets, Examples(inputs, labels), 2)
    task = Task(build("softmax", data, torch.Generator()), "cross_entropy")
    plan = IncrementalGradient(Constant(rate)).plan(data.sizes, 0, rng)
    plan = dataclasses.replace(plan, momentum=momentum)
    group = Group(data, np.arange(5), plan)
    return engine_of(task).updates(task.flatten(), group).rows()[:-1]


@pytest.mark.parametrize("features", [1.0, 1e10, 1e20, 1e38])
@pytest.mark.parametrize("rate", [0.1, 1e6, 1e15])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "engine_of", [dense(100), LoopEngine, factored(100)], ids=["dense", "loop", "factored"]
)
def test_no_client_changes_another_s_update(engine_of, momentum, rate, features) -> None:
    """A neighbour with more examples makes the group take more steps: others must not notice.

    Overflowing clients are the hard case: a step of rate 0 must not turn ∞ into NaN.
    """
    alone = rows_of_others(engine_of, 1, rate, momentum, features)
    beside = rows_of_others(engine_of, 9, rate, momentum, features)
    assert torch.equal(torch.isfinite(alone), torch.isfinite(beside))
    assert torch.allclose(alone, beside, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_a_short_batch_is_filled_with_its_own_examples_only() -> None:
    data = population()
    sizes = data.sizes[:3]
    plan = SGD(Constant(0.1), epochs=1, batch=4).plan(sizes, 0, np.random.default_rng(0))
    group = Group(data, np.arange(3), plan)
    fillings = 0
    for inputs, _, weights in group.steps():
        for client in range(3):
            if weights[client].any():
                filled = inputs[client][weights[client] == 0]
                fillings += len(filled)
                assert torch.equal(filled, inputs[client][:1].expand_as(filled))
    assert fillings > 0
