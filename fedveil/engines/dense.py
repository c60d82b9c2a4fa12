"""dense: all clients of a group at once, torch.func's vmap over stacked parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedveil.engines.recurrent import unrolling
from fedveil.engines.task import Parameters, Task
from fedveil.engines.updates import DenseUpdates, Group

GROUP_NUMBERS = 2**21  # stacked parameters of a group: about what a core's cache holds


@dataclass(frozen=True, eq=False)
class DenseEngine:
    """Every leaf of the model has a leading axis of clients; the module sees single examples."""

    task: Task
    group_size: int
    name: str = "dense"

    @classmethod
    def sized(cls, task: Task) -> DenseEngine:
        """Groups as large as the cache suggests."""
        return cls(task, max(1, min(256, GROUP_NUMBERS // task.dim)))

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """The first step is taken from shared parameters, the others from each client's own."""
        start = self.task.unflatten(x.clone())
        stacked: Parameters = {}
        velocity: Parameters = {}
        for step, batch in enumerate(group.steps()):
            gradient = vmap(grad(self._loss), in_dims=(0 if stacked else None, 0, 0, 0))
            with unrolling(self.task.module):
                gradients = gradient(stacked or start, *batch)
            stacked = stacked or _copies(start, len(group.clients))
            _walk(stacked, gradients, velocity, start, group, step)
        return DenseUpdates(_differences(stacked, start, len(group.clients)))

    def _loss(
        self, parameters: Parameters, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> Tensor:
        """Σ weight·loss of a client's batch, where the module sees one example at a time.

        A batch is filled up to the width of its group, which other clients decide.
        """
        outputs = vmap(lambda one: self.task.outputs(parameters, one[None])[0])(inputs)
        return (self.task.loss_of_examples(outputs, labels) * weights).sum()


def _copies(start: Parameters, clients: int) -> Parameters:
    return {name: leaf.expand(clients, *leaf.shape).clone() for name, leaf in start.items()}


def _walk(
    stacked: Parameters,
    gradients: Parameters,
    velocity: Parameters,
    start: Parameters,
    group: Group,
    step: int,
) -> None:
    """One step of the inner rule (parts/local.py).

    A client that takes no such step is left exactly as it is: how many steps a group takes depends
    on the others in it, and 0·∞ would let them turn its update into NaN.
    """
    plan, rates = group.plan, group.plan.rates[:, step]
    all_walk = bool((rates > 0).all())
    for name, leaf in stacked.items():
        slope = gradients[name]
        if plan.weight_decay:
            slope = slope.add(leaf, alpha=plan.weight_decay)
        if plan.proximal:
            slope = slope + plan.proximal * (leaf - start[name])
        if plan.momentum:
            slope = velocity[name].mul_(plan.momentum).add_(slope) if name in velocity else slope
            velocity[name] = slope
        rate = rates.view(-1, *[1] * (leaf.dim() - 1))
        if all_walk:
            leaf.addcmul_(rate, slope, value=-1)
        else:
            leaf.copy_(torch.where(rate > 0, leaf - rate * slope, leaf))


def _differences(stacked: Parameters, start: Parameters, clients: int) -> Tensor:
    if not stacked:
        return torch.zeros(clients, sum(leaf.numel() for leaf in start.values()))
    leaves = [(leaf - start[name]).reshape(clients, -1) for name, leaf in stacked.items()]
    return torch.cat(leaves, dim=1)
