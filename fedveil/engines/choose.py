"""Choose an engine for a model: by what fits, and by whether it runs."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import torch

from fedveil.data.federated import Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine, NotServedError
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError, unknown
from fedveil.parts.local import Plan, all_examples

STACKABLE = 5_000_000  # a model with more numbers leaves no room to stack clients
FEW_EXAMPLES = 32  # of the largest client, up to which factors beat stacked weights
ENGINES = ("auto", "factored", "dense", "loop")
log = logging.getLogger("fedveil")


def choose(name: str, task: Task, data: Federated) -> Engine:
    """The engine of this name; `auto` takes the first of factored, dense and loop that runs.

    Factored only where clients have few examples: with many, the factors of a step outgrow the
    weights, and stacked weights are quicker.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "loop" or (name == "auto" and task.dim > STACKABLE):
        return LoopEngine(task)
    if name == "factored" or (name == "auto" and int(data.sizes.max()) <= FEW_EXAMPLES):
        factored = FactoredEngine.sized(task, data)
        problem = _trial(factored, task, data)
        if not problem:
            return factored
        if name == "factored":
            raise UserError(f"The engine 'factored' does not serve this model: {problem}.")
        log.info("not engine factored, since %s", problem)
    dense = DenseEngine.sized(task)
    if name == "auto" and (problem := _trial(dense, task, data)):
        log.info("engine loop, since this model does not run stacked: %s", problem)
        return LoopEngine(task)
    return dense


def _trial(engine: Engine, task: Task, data: Federated) -> str:
    """Two clients, two steps, one example each: what went wrong, or nothing."""
    clients = np.arange(min(2, data.clients))
    index = all_examples(torch.ones(len(clients), dtype=torch.long))
    plan = Plan(index, torch.zeros(len(clients), 2))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would stack one by one
            engine.updates(task.flatten(), Group(data, clients, plan))
    except (RuntimeError, UserWarning, NotServedError) as problem:
        return str(problem).partition("\n")[0]
    return ""
