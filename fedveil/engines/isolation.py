"""Tests a module on synthetic examples, called as in a run, before it sees real ones.

No real example reaches a module before this check: a module that computes constants from its first
batch computes them from synthetic numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedveil.data.columns import span
from fedveil.data.federated import Examples, Federated
from fedveil.engines.devices import PlacedEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.engines.where import explained
from fedveil.errors import UserError
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.threads import one_thread_each

SIZES, SCALES = (1, 3, 2), (1.0, 30.0)  # of synthetic clients and of their numbers
POSITIVE = 5.0  # mean of synthetic numbers of scale 1 that are positive
CLOSE = 1e-3  # relative difference: engines agree more closely, and mixed batches do not


def refuse_memory(task: Task, engine: Engine, data: Federated) -> None:
    """Refuse a module or loss that changes any state, or draws random numbers, when it is called.

    The first calls may fill caches that depend on shapes only; later calls, on other examples, must
    not change anything. From then on, `Task.refuse_change` repeats the check after every client or
    step of a group, and `Task.refuse_side_effects` after every round.
    """
    task.unwatch()
    with one_thread_each():
        for scale in SCALES:
            _call(task, engine, _crowd(data, scale))
        _watch(task, data)
        for scale in SCALES:
            with refusing_randomness(task.module):
                _call(task, engine, _crowd(data, scale, draw=1))
            task.refuse_side_effects()


def _watch(task: Task, data: Federated) -> None:
    try:
        task.watch(made_up(data, 2, SCALES[0]))
    except UserError:
        raise
    except Exception as problem:  # a user's own module may raise anything
        raise UserError(
            f"The model {type(task.module).__name__} cannot be trained on '{data.name}': "
            f"{explained(problem)}."
        ) from problem


def mixing(task: Task, engine: Engine, data: Federated) -> str:
    """Why an engine that maps a module over single examples does not support it; empty if it does.

    A module that uses its whole batch has other outputs there than on a client's batch. If this
    check erred, the run would compute a different function, but still for each client alone.
    """
    agreed = [_agree(task, engine, _crowd(data, scale)) for scale in SCALES]
    if agreed.count(None) == len(agreed):  # such as logarithms of negative numbers
        agreed = [_agree(task, engine, _crowd(data, SCALES[0], POSITIVE))]
    if False in agreed:
        return "it does not process the examples of a batch independently"
    return "" if True in agreed else "its gradients are not finite on any synthetic batch"


def _agree(task: Task, engine: Engine, crowd: Group) -> bool | None:
    """Whether an engine's updates are the loop's; None if no client with a batch has a finite one.

    A single example has nothing to mix with.
    """
    alone = PlacedEngine.on(LoopEngine(task), task.device)
    with one_thread_each():
        found, wanted = (one.updates(task.flatten(), crowd).rows() for one in (engine, alone))
    sound = wanted.isfinite().all(dim=1)
    if not torch.equal(found.isfinite().all(dim=1), sound):
        return False
    gap, size = (float(part[sound].norm()) for part in (found - wanted, wanted))
    if gap > CLOSE * (1e-6 + size):
        return False
    return True if bool((sound & (crowd.sizes > 1)).any()) else None


def made_up(
    data: Federated, count: int, scale: float = 0.0, mean: float = 0.0, draw: int = 0
) -> Examples:
    """Synthetic examples in the data's shapes: zeros, or random numbers, other ones in each draw.

    Numbers are normal with this scale and mean; integers are uniform in the data's range.
    """
    inputs = torch.zeros(count, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    labels = torch.zeros(count, *data.labels.shape[1:], dtype=data.labels.dtype)
    if not labels.is_floating_point():
        labels[-1] = max(data.classes - 1, 0)  # fails for a model with too few outputs
    if not scale:
        return Examples(inputs, labels, data.layout)
    first, second = (torch.Generator().manual_seed(1000 * draw + count + i) for i in (0, 1))
    if data.layout is not None:
        inputs = data.layout.synthetic(count, scale, second, mean)
    elif inputs.is_floating_point():
        inputs.normal_(mean, scale, generator=first)
    else:
        low, high = span(data.inputs)
        inputs.random_(int(low), int(high) + 1, generator=second)
    if labels.is_floating_point():
        labels.normal_(0.0, scale, generator=first)
    else:
        labels.random_(max(data.classes, 1), generator=first)
    return Examples(inputs, labels, data.layout)


def uniform(data: Federated, count: int, scale: float) -> Examples:
    """Synthetic examples that are equal on every processor, up to this scale.

    Processors round normal numbers differently.
    """
    drawn, generator = made_up(data, count, scale), torch.Generator().manual_seed(count)

    def redrawn(numbers: Tensor) -> Tensor:
        if not numbers.is_floating_point():
            return numbers
        found = (2 * torch.rand(numbers.shape, generator=generator) - 1) * scale
        return found.to(numbers.dtype)

    labels = redrawn(drawn.labels[:])
    if data.layout is None:
        return Examples(redrawn(drawn.inputs[:]), labels)
    parts = tree_map(redrawn, data.layout.unpack(drawn.inputs[:]))
    return Examples(data.layout.pack(parts), labels, data.layout)


def _call(task: Task, engine: Engine, crowd: Group) -> None:
    """Three local steps of every client and an evaluation; unsupported shapes are ignored."""
    try:
        engine.updates(task.flatten(), crowd).norms()
        task.evaluate(task.flatten(), crowd.data.test)
    except UserError:
        raise
    except Exception:  # a user's own module may raise anything
        return


def _crowd(data: Federated, scale: float, mean: float = 0.0, draw: int = 0) -> Group:
    """A group of synthetic clients."""
    every = made_up(data, sum(SIZES), scale, mean, draw)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    facts = (data.classes, data.loss)
    crowd = Federated(
        "made up", every.inputs, every.labels, offsets, every, *facts, layout=data.layout
    )
    # Three steps: two of a loss with bounded slopes may cancel, and nothing is left to compare.
    plan = SGD(Constant(0.1), steps=3).plan(crowd.sizes, 0, np.random.default_rng(0))
    return Group(crowd, np.arange(len(SIZES)), plan)
