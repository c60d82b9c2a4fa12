"""Record and replay on neighbours: with the same randomness, one client moves the sum by ≤ Δ.

For every private recipe: one client is blanked out, dropped, or replaced by an adversary, and the
sum before noise is compared with the declared sensitivity. The bound is also met, so that a
sensitivity declared too small would be noticed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.accounting.events import GaussianRelease
from fedveil.data.federated import Examples, Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.models import build
from fedveil.parts.bound import AdaptiveClip, Clip
from fedveil.recipe import Recipe
from fedveil.testing.recipes import (
    CLIENTS,
    DIM,
    check_history,
    check_neighbours,
    count_move,
    count_noise,
)
from fedveil.testing.replay import adversarial, normal_answers, play, swapped
from tests.contracts import examples

# In silos, the units are records, and a round over them is a step.
PRIVATE: dict[str, Recipe] = {
    name: recipe.inside(0) if recipe.by_record else recipe
    for name, recipe in examples.PRIVATE.items()
}
COUNTED = [name for name in PRIVATE if "adaptive" in name]
REMEMBERED = [name for name, recipe in PRIVATE.items() if recipe.memory.kept]


def test_every_private_algorithm_is_replayed() -> None:
    made = {recipe.name for recipe in PRIVATE.values()}
    names = ("dp_", "alpha_", "fed_alpha_", "clip21_", "silo_", "mr_")
    private = {name for name in algorithms.ALGORITHMS if name.startswith(names)}
    assert made == private
    assert COUNTED
    assert REMEMBERED


@pytest.mark.parametrize("name", PRIVATE)
def test_one_client_moves_the_sum_by_no_more_than_the_sensitivity(name: str) -> None:
    """With other randomness than in `check_recipe`, which looks at every recipe, too."""
    recipe = PRIVATE[name]
    met = check_neighbours(recipe, keys=(1,))
    message = recipe.message(DIM)
    coarse = message.grid is not None and message.steps.linf < 16  # rounding is much of a message
    for norm in ("L1", "L2", "L∞"):
        share = met[f"{recipe.adjacency()} {norm}"]
        assert share > (0.7 if coarse else 0.9), f"only {share:.3f} of the {norm} bound is met"


@pytest.mark.parametrize("name", [*REMEMBERED, *COUNTED, "dp_norm_fedavg_secagg", "dp_fedavg"])
def test_given_the_same_history_one_client_s_life_moves_each_round_s_sum_by_no_more(
    name: str,
) -> None:
    check_history(PRIVATE[name])


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_round_in_the_middle_of_a_run_keeps_the_sensitivity(name: str) -> None:
    recipe, state = PRIVATE[name], None
    answers = normal_answers(CLIENTS, DIM)
    for _ in range(5):
        state = play(recipe, answers, state=state, noise="real").state
    assert state is not None
    assert state.memory is not None
    assert float(state.memory[np.arange(CLIENTS)].abs().max()) > 0
    assert max(check_neighbours(recipe, state, keys=(0, 1)).values()) > 0.9


@pytest.mark.parametrize("name", COUNTED)
def test_one_client_moves_the_count_by_no_more_than_is_accounted(name: str) -> None:
    """The count's share of the joint event is (move/noise)², of the move that was measured."""
    recipe = PRIVATE[name]
    assert isinstance(recipe.bound, AdaptiveClip)
    without = dataclasses.replace(recipe, bound=Clip(recipe.bound.start))
    joint, alone = recipe.release(DIM, CLIENTS), without.release(DIM, CLIENTS)
    assert isinstance(joint, GaussianRelease)
    assert isinstance(alone, GaussianRelease)
    share = joint.ratio**-2 - alone.ratio**-2
    accounted = math.sqrt(share) * count_noise(recipe)
    assert count_move(recipe) == pytest.approx(accounted, rel=0.06)


@pytest.mark.parametrize("name", ["dp_norm_fedavg_secagg", "dp_norm_fedavg_discrete"])
def test_noise_of_the_others_does_not_depend_on_one_client(name: str) -> None:
    """With real noise, too, a replaced client moves the released sum by whole messages only."""
    recipe, answers = PRIVATE[name], normal_answers(CLIENTS, DIM)
    client = int(play(recipe, answers).members[0])
    sums = [
        play(recipe, swapped(answers, client, row), noise="real").total for row in adversarial(DIM)
    ]
    declared = recipe.message(DIM).sensitivity("replace-one").l2
    moves = [float((a - b).norm()) for a in sums for b in sums]
    assert 0.9 * declared < max(moves) <= declared * (1 + 1e-5)


def replaced(data: Federated, client: int, inputs: float, label: int) -> Federated:
    """The data with all of one client's examples replaced."""
    start, stop = int(data.offsets[client]), int(data.offsets[client + 1])
    changed, labels = data.inputs.clone(), data.labels.clone()
    changed[start:stop], labels[start:stop] = inputs, label
    return dataclasses.replace(data, inputs=changed, labels=labels)


def points() -> Federated:
    """Eight clients with three points each."""
    rng = np.random.default_rng(3)
    inputs = torch.from_numpy(rng.normal(size=(24, 4)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 24))
    return Federated("points", inputs, labels, torch.arange(0, 25, 3), Examples(inputs, labels), 3)


ENGINES: dict[str, Callable[[Task], Engine]] = {
    "factored": lambda task: FactoredEngine(task, 3),
    "dense": lambda task: DenseEngine(task, 3),
    "loop": LoopEngine,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "recipe",
    [
        algorithms.dp_fedavg(clip=0.2, rate=0.6, steps=3, batch=2, noise_multiplier=1.0),
        algorithms.dp_norm_fedavg_secagg(clients=5, sigma=9.0, support=80, steps=2, batch=2),
        algorithms.fed_alpha_normec(rate=0.6, update="everyone", noise_multiplier=1.0),
        algorithms.dp_sgd(clip=0.2, rate=0.6, noise_multiplier=1.0),
        algorithms.dp_lsgd(clip=0.2, rate=0.6, steps=4, noise_multiplier=1.0),
    ],
    ids=lambda recipe: recipe.name,
)
def test_with_real_training_one_unit_s_data_move_the_sum_by_no_more(
    recipe: Recipe, engine: str
) -> None:
    data = points().by_example() if recipe.unit == "example" else points()
    task = Task(build("softmax", data, torch.Generator().manual_seed(0)), "cross_entropy")
    answers = [task.flatten()] * data.clients
    worker = ENGINES[engine](task)
    client = int(play(recipe, answers, data=data, engine=worker).members[0])
    values = (0.0, 1.0, -1e3, 1e20, 3e38, math.nan, math.inf)
    sums = [
        play(recipe, answers, data=replaced(data, client, value, label), engine=worker).total
        for value in values
        for label in (0, 2)
    ]
    message = recipe.message(task.dim)
    # Under every adjacency other data move the sum by the difference of two messages.
    moves = [float((a - b).norm()) for a in sums for b in sums]
    assert max(moves) <= 2 * message.l2 * (1 + 1e-5)
    assert max(moves) > message.l2
