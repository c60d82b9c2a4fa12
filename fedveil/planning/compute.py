"""What a run will compute and send: products, seconds on this machine, bytes of a message."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import PACE, STACKABLE, choose
from fedveil.engines.factored import NotServedError, cost
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.parts.local import Local
from fedveil.planning.facts import Facts
from fedveil.recipe import Recipe
from fedveil.threads import one_thread_each
from fedveil.wire import length

TRIED = 2e9  # products of a client's round, above which it is not tried but reckoned
CROWD = 5e9  # products of a trial
MOST_TRIED = 128  # clients of a trial


@dataclass(frozen=True)
class Cost:
    """Of a round and a run."""

    products: float  # of one client's local work in a round
    seconds: float  # of a round on this machine, by one core
    tried: bool  # whether a client's work was timed, or reckoned from its products
    workers: float  # clients that work in a round
    up: int  # bytes of a client's message
    down: int  # bytes of the model that it gets


def expected_cost(recipe: Recipe, known: Facts) -> Cost:
    """Of a recipe with settled noise."""
    population = known.population
    everyone = np.arange(2)
    works_always = len(recipe.memory.workers(everyone[:1], 2)) == 2
    workers = float(population) if works_always else recipe.cohort.expected(population)
    products = _products(recipe, known)
    tried = known.task is not None and products <= TRIED
    each = _timed(recipe, known, products) if tried else products / PACE["factored"]
    wire = recipe.wire(known.dim, population)
    up = 4 * known.dim if wire is None else length(wire.bits, known.dim)
    return Cost(products, each * workers, tried, workers, up, 4 * known.dim)


def engine_for(task: Task, data: Federated, local: Local) -> Engine:
    """The quickest engine for most models, without the trial that a training makes."""
    try:
        return choose("factored", task, data, local).engine
    except UserError:
        return choose("dense" if task.dim <= STACKABLE else "loop", task, data, local).engine


def _own(known: Facts) -> int:
    """Examples that one unit works on."""
    return 1 if known.unit == "example" else max(1, round(known.examples))


def _products(recipe: Recipe, known: Facts) -> float:
    """Forward, and twice as much backward, for each example of each local step."""
    plan = recipe.local.plan(torch.tensor([_own(known)]), 0, np.random.default_rng(0))
    examples = int((plan.index >= 0).sum()) * (plan.steps if plan.repeated else 1)
    return 3.0 * examples * _products_of_example(known)


def _products_of_example(known: Facts) -> float:
    """Of a forward pass: counted where layers can be, else one for each parameter."""
    if known.task is None or known.sample is None:
        return float(known.dim)
    try:
        return float(cost(known.task, torch.zeros_like(known.sample.inputs[:1])).products)
    except (NotServedError, RuntimeError):
        return float(known.dim)


def _timed(recipe: Recipe, known: Facts, products: float) -> float:
    """Seconds of one client's local work: the best of three trials on clients of zeros."""
    assert known.task is not None
    assert known.sample is not None
    expected = recipe.cohort.expected(known.population)
    crowd = int(max(1, min(expected, MOST_TRIED, CROWD / max(products, 1.0))))
    data = _crowd(known.sample, crowd, _own(known))
    engine = engine_for(known.task, data, recipe.local)
    plan = recipe.local.plan(data.sizes, 0, np.random.default_rng(0))
    x, seconds = known.task.flatten(), []
    with one_thread_each():
        for _ in range(3):
            started = time.perf_counter()
            for first in range(0, crowd, engine.group_size):
                last = min(first + engine.group_size, crowd)
                group = Group(data, np.arange(first, last), plan.group(first, last))
                engine.updates(x, group).norms()
            seconds.append(time.perf_counter() - started)
    return min(seconds) / crowd


def _crowd(sample: Federated, clients: int, examples: int) -> Federated:
    inputs = torch.zeros(clients * examples, *sample.inputs.shape[1:], dtype=sample.inputs.dtype)
    labels = torch.zeros(clients * examples, *sample.labels.shape[1:], dtype=sample.labels.dtype)
    offsets = torch.arange(clients + 1) * examples
    few = Examples(inputs[:1], labels[:1])
    return Federated("zeros", inputs, labels, offsets, few, sample.classes, sample.loss)
