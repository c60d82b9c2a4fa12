"""Try a module as a run will call it, on made-up examples, before it sees anybody's.

Nothing of a real example reaches a module before it is watched: a module that takes its constants
from the first batch takes them from made-up numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from fedveil.data.federated import Examples, Federated
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.threads import one_thread_each

SIZES, SCALES = (1, 3, 2), (1.0, 30.0)  # of made-up clients, and of their numbers
CLOSE = 1e-3  # relative: engines come nearer to each other, and batches that mix do not


def refuse_memory(task: Task, engine: Engine, data: Federated) -> None:
    """Refuse a module that changes anything, or draws random numbers, when it is called.

    The first calls may fill what only depends on shapes; later ones must leave no trace. From here
    on `Task.refuse_side_effects` holds the run to it, round by round.
    """
    crowds = _crowds(data)
    with one_thread_each():
        for crowd in crowds:
            _call(task, engine, crowd)
        task.watch(made_up(data, 2, SCALES[0]))
        for crowd in crowds:
            with refusing_randomness(task.module):
                _call(task, engine, crowd)
            task.refuse_side_effects()


def mixing(task: Task, engine: Engine, data: Federated) -> str:
    """Why an engine that shows a module single examples does not serve it; nothing if it does.

    A module that looks at its whole batch answers otherwise there than for a client's batch. Were
    this mistaken, the run would compute something else, but still each client alone.
    """
    alone = LoopEngine(task)
    for crowd in _crowds(data):
        with one_thread_each():
            found, wanted = (one.updates(task.flatten(), crowd).rows() for one in (engine, alone))
        gap, size = (float(part.norm()) for part in (found - wanted, wanted))
        if gap > CLOSE * (1e-6 + size):
            return "it does not treat the examples of a batch one by one"
    return ""


def made_up(data: Federated, count: int, scale: float = 0.0) -> Examples:
    """Examples of the data's shapes that nobody has: zeros, or normal numbers of this scale."""
    inputs = torch.zeros(count, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    labels = torch.zeros(count, *data.labels.shape[1:], dtype=data.labels.dtype)
    if not labels.is_floating_point():
        labels[-1] = max(data.classes - 1, 0)  # a model with too few outputs fails on it
    if scale:
        numbers = torch.Generator().manual_seed(count)
        for part in (inputs, labels):
            if part.is_floating_point():
                part.normal_(0.0, scale, generator=numbers)
        if not labels.is_floating_point():
            labels.random_(max(data.classes, 1), generator=numbers)
    return Examples(inputs, labels)


def _call(task: Task, engine: Engine, crowd: Group) -> None:
    """Two local steps of every client, and an evaluation; a shape it cannot take tells nothing."""
    try:
        engine.updates(task.flatten(), crowd).norms()
        task.evaluate(task.flatten(), crowd.data.test)
    except (RuntimeError, ValueError):
        return


def _crowds(data: Federated) -> list[Group]:
    return [_crowd(data, scale) for scale in SCALES]


def _crowd(data: Federated, scale: float) -> Group:
    """Clients that nobody is."""
    every = made_up(data, sum(SIZES), scale)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    facts = (data.classes, data.loss)
    crowd = Federated("made up", every.inputs, every.labels, offsets, every, *facts)
    plan = SGD(Constant(0.1), steps=2).plan(crowd.sizes, 0, np.random.default_rng(0))
    return Group(crowd, np.arange(len(SIZES)), plan)
