"""Tests a module on synthetic examples, called as in a run, before it sees real ones.

No real example reaches a module before this check: a module that computes constants from its first
batch computes them from synthetic numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from fedveil.data.federated import Examples, Federated
from fedveil.engines.devices import PlacedEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.threads import one_thread_each

SIZES, SCALES = (1, 3, 2), (1.0, 30.0)  # of synthetic clients and of their numbers
CLOSE = 1e-3  # relative difference: engines agree more closely, and mixed batches do not


def refuse_memory(task: Task, engine: Engine, data: Federated) -> None:
    """Refuse a module that changes any state, or draws random numbers, when it is called.

    The first calls may fill caches that depend on shapes only; later calls must not change
    anything. From then on `Task.refuse_side_effects` repeats the check in every round.
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
    """Why an engine that maps a module over single examples does not support it; empty if it does.

    A module that uses its whole batch has other outputs there than on a client's batch. If this
    check erred, the run would compute a different function, but still for each client alone.
    """
    alone = PlacedEngine.on(LoopEngine(task), task.device)
    for crowd in _crowds(data):
        with one_thread_each():
            found, wanted = (one.updates(task.flatten(), crowd).rows() for one in (engine, alone))
        found, wanted = found.nan_to_num(), wanted.nan_to_num()
        gap, size = (float(part.norm()) for part in (found - wanted, wanted))
        if gap > CLOSE * (1e-6 + size):
            return "it does not process the examples of a batch independently"
    return ""


def made_up(data: Federated, count: int, scale: float = 0.0) -> Examples:
    """Synthetic examples in the data's shapes: zeros, or normal numbers of this scale."""
    inputs = torch.zeros(count, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    if data.layout is not None and scale:
        inputs = data.layout.synthetic(count, scale, torch.Generator().manual_seed(count + 1))
    labels = torch.zeros(count, *data.labels.shape[1:], dtype=data.labels.dtype)
    if not labels.is_floating_point():
        labels[-1] = max(data.classes - 1, 0)  # fails for a model with too few outputs
    if scale:
        numbers = torch.Generator().manual_seed(count)
        for part in (inputs, labels):
            if part.is_floating_point():
                part.normal_(0.0, scale, generator=numbers)
        if not labels.is_floating_point():
            labels.random_(max(data.classes, 1), generator=numbers)
    return Examples(inputs, labels, data.layout)


def _call(task: Task, engine: Engine, crowd: Group) -> None:
    """Three local steps of every client and an evaluation; unsupported shapes are ignored."""
    try:
        engine.updates(task.flatten(), crowd).norms()
        task.evaluate(task.flatten(), crowd.data.test)
    except (RuntimeError, ValueError):
        return


def _crowds(data: Federated) -> list[Group]:
    return [_crowd(data, scale) for scale in SCALES]


def _crowd(data: Federated, scale: float) -> Group:
    """A group of synthetic clients."""
    every = made_up(data, sum(SIZES), scale)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    facts = (data.classes, data.loss)
    crowd = Federated(
        "made up", every.inputs, every.labels, offsets, every, *facts, layout=data.layout
    )
    # Three steps: two of a loss with bounded slopes may cancel, and nothing is left to compare.
    plan = SGD(Constant(0.1), steps=3).plan(crowd.sizes, 0, np.random.default_rng(0))
    return Group(crowd, np.arange(len(SIZES)), plan)
