"""Try a module as a run will call it, on made-up examples, and refuse one that remembers them."""

from __future__ import annotations

import numpy as np
import torch

from fedveil.data.federated import Examples, Federated
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant

WIDTHS, SCALES = (1, 3), (1.0, 1e3)


def refuse_memory(task: Task, engine: Engine, data: Federated) -> None:
    """Refuse a module that changes anything, or draws random numbers, when it is called.

    The first calls may fill what only depends on shapes; later ones must leave no trace. From here
    on `Task.refuse_side_effects` holds the run to it, round by round.
    """
    crowds = [_crowd(data, width, scale) for width in WIDTHS for scale in SCALES]
    for crowd in crowds:
        _call(task, engine, crowd)
    task.watch()
    for crowd in crowds:
        with refusing_randomness(task.module):
            _call(task, engine, crowd)
        task.refuse_side_effects()


def _call(task: Task, engine: Engine, crowd: Group) -> None:
    """Two local steps of every client, and an evaluation; a shape it cannot take tells nothing."""
    try:
        engine.updates(task.flatten(), crowd).norms()
        task.evaluate(task.flatten(), crowd.data.test)
    except (RuntimeError, ValueError):
        return


def _crowd(data: Federated, width: int, scale: float) -> Group:
    """Three clients that nobody is, with so many examples each."""
    numbers = torch.Generator().manual_seed(width)
    inputs = torch.zeros(3 * width, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    if inputs.is_floating_point():
        inputs.normal_(0.0, scale, generator=numbers)
    labels = torch.zeros(3 * width, *data.labels.shape[1:], dtype=data.labels.dtype)
    made_up = Federated(
        "made up", inputs, labels, torch.arange(4) * width, Examples(inputs, labels),
        data.classes, data.loss,
    )  # fmt: skip
    plan = SGD(Constant(0.1), steps=2).plan(made_up.sizes, 0, np.random.default_rng(0))
    return Group(made_up, np.arange(3), plan)
