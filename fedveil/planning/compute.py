"""Compute and communication costs of a run: multiplications, seconds on this machine, bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import PACE, STACKABLE, choose
from fedveil.engines.interception import cost
from fedveil.engines.operations import NotServedError
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.parts.cohort import Poisson
from fedveil.parts.local import Local
from fedveil.parts.noise import NoNoise
from fedveil.parts.quantize import NoQuantization
from fedveil.planning.facts import PublicFacts
from fedveil.random.streams import run_key
from fedveil.recipe import Recipe
from fedveil.wire import length

TIMED = 2e9  # multiplications per client and round, above which the time is only estimated
TRIAL = 5e9  # multiplications of a timing trial
MAX_TRIAL_CLIENTS = 128
REPEATS = 3  # of a timed round; the fastest counts


@dataclass(frozen=True)
class Cost:
    """Costs of a round, averaged over the run."""

    products: float  # multiplications of one client's local work
    seconds: float  # on one core of this machine
    tried: bool  # whether rounds were timed; otherwise estimated from multiplications
    workers: float  # clients that compute
    up: int  # bytes of a client's message
    down: int  # bytes of the model that a client receives


def expected_cost(recipe: Recipe, known: PublicFacts, rounds: int) -> Cost:
    """The costs of an average round of a recipe with calibrated noise."""
    population = known.population
    everyone = np.arange(2)
    all_work = len(recipe.memory.workers(everyone[:1], 2)) == 2
    present = recipe.cohort.participants(population, rounds).mean
    workers = float(population) if all_work else present
    products = _products(recipe, known)
    tried = known.task is not None and products <= TIMED
    if tried:
        seconds = _timed(recipe, known, products, workers)
    else:
        seconds = products / PACE["factored"] * workers
    wire = recipe.wire(known.dim, population)
    up = 4 * known.dim if wire is None else length(wire.bits, known.dim)
    return Cost(products, seconds, tried, workers, up, 4 * known.dim)


def engine_for(task: Task, data: Federated, local: Local) -> Engine:
    """The fastest engine for most models, without the timing that a training run does."""
    try:
        return choose("factored", task, data, local).engine
    except UserError:
        return choose("dense" if task.dim <= STACKABLE else "loop", task, data, local).engine


def _own(known: PublicFacts) -> int:
    """Number of examples that one unit trains on."""
    return 1 if known.unit == "example" else max(1, round(known.examples))


def _products(recipe: Recipe, known: PublicFacts) -> float:
    """Forward plus backward (twice the forward cost), over all examples of all local steps."""
    plan = recipe.local.plan(torch.tensor([_own(known)]), 0, np.random.default_rng(0))
    examples = int((plan.index >= 0).sum()) * (plan.steps if plan.repeated else 1)
    return 3.0 * examples * _products_of_example(known)


def _products_of_example(known: PublicFacts) -> float:
    """Multiplications of a forward pass, or one per parameter if the layers cannot be counted."""
    if known.task is None or known.sample is None:
        return float(known.dim)
    try:
        return float(cost(known.task, torch.zeros_like(known.sample.inputs[:1])).products)
    except (NotServedError, RuntimeError):
        return float(known.dim)


def _timed(recipe: Recipe, known: PublicFacts, products: float, workers: float) -> float:
    """CPU seconds of one round, from rounds of a few and of one client on all-zero data.

    The difference is the work of the clients, and the rest is what every round costs.
    """
    expected = recipe.cohort.expected(known.population)
    clients = int(max(1, min(expected, MAX_TRIAL_CLIENTS, TRIAL / max(products, 1.0))))
    few = _round_time(recipe, known, clients)
    if clients == 1:
        return few * workers
    one = min(few, _round_time(recipe, known, 1))
    return one + (few - one) / (clients - 1) * (workers - 1)


def _round_time(recipe: Recipe, known: PublicFacts, clients: int) -> float:
    """CPU seconds of a round in which this many clients take part: the fastest of three."""
    assert known.task is not None
    assert known.sample is not None
    data = _zeros(known.sample, _sizes(known, clients))
    engine = engine_for(known.task, data, recipe.local)
    whole, key = _with_everyone(recipe), run_key("the time of a round")
    state = begin(whole, known.task.flatten(), data, REPEATS, key)
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        state, _ = run_round(whole, state, data, engine, key, diagnostics=True)
        seconds.append(time.process_time() - started)
    return min(seconds)


def _with_everyone(recipe: Recipe) -> Recipe:
    """The recipe with all clients in every round, without noise if that needs another cohort."""
    try:
        return replace(recipe, cohort=Poisson(1.0), statistics=None)
    except UserError:
        plain = {"noise": NoNoise(), "quantize": NoQuantization(), "view": "models"}
        return replace(recipe, cohort=Poisson(1.0), statistics=None, **plain)  # type: ignore[arg-type]


def _sizes(known: PublicFacts, clients: int) -> torch.Tensor:
    """Examples of each of some clients: evenly spaced ones of the data, as a round would draw."""
    if known.unit == "example" or known.data is None or clients > known.data.clients:
        return torch.full((clients,), _own(known))
    places = torch.linspace(0, known.data.clients - 1, clients).round().long()
    return known.data.sizes[places]


def _zeros(sample: Federated, sizes: torch.Tensor) -> Federated:
    count = int(sizes.sum())
    inputs = torch.zeros(count, *sample.inputs.shape[1:], dtype=sample.inputs.dtype)
    labels = torch.zeros(count, *sample.labels.shape[1:], dtype=sample.labels.dtype)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    few = Examples(inputs[:1], labels[:1])
    return Federated("zeros", inputs, labels, offsets, few, sample.classes, sample.loss)
