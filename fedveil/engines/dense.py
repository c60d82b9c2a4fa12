"""dense: all clients of a group at once, with torch.func.vmap over stacked parameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedveil.engines.dropout import Masks
from fedveil.engines.rewriting import Rewriting
from fedveil.engines.task import Parameters, Task
from fedveil.engines.updates import DenseUpdates, Group

GROUP_NUMBERS = 2**21  # stacked parameters of a group: about the size of a core's cache


@dataclass(frozen=True, eq=False)
class DenseEngine:
    """Every parameter has a leading axis of clients; the module sees single examples."""

    task: Task
    group_size: int
    name: str = "dense"
    least_group: int = 1

    @classmethod
    def sized(cls, task: Task, space: int | None = None) -> DenseEngine:
        """An engine with groups that fit the cache, or `space` numbers of another device."""
        if space is not None:
            return cls(task, max(1, min(1024, space // (8 * task.dim))))
        return cls(task, max(1, min(256, GROUP_NUMBERS // task.dim)))

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """Takes the first step from shared parameters, the others from each client's own."""
        self.task.here()  # inside vmap, the buffers of a thread's new copy could not be read
        start = self.task.unflatten(x.clone())
        stacked: Parameters = {}
        velocity: Parameters = {}
        correction = group.plan.correction
        corrections = {} if correction is None else self.task.unflatten(correction.to(x.device))
        for step, batch in enumerate(group.steps()):
            gradients = self._gradients(stacked or start, batch, self._seeds(group, step, batch[0]))
            stacked = stacked or _copies(start, len(group.clients))
            for name, extra in corrections.items():
                gradients[name] = gradients[name] + extra
            self.task.refuse_change()
            _walk(stacked, gradients, velocity, start, group, step)
        return DenseUpdates(_differences(stacked, start, len(group.clients)))

    def _seeds(self, group: Group, step: int, inputs: Tensor) -> Tensor | None:
        """Seeds of the step's examples; None for a model without dropout."""
        drops = self.task.dropouts(inputs.shape[2:], inputs.dtype)
        return group.seeds(step, inputs.shape[1]) if drops else None

    def _gradients(
        self, parameters: Parameters, batch: tuple[Tensor, ...], seeds: Tensor | None
    ) -> Parameters:
        """The gradients of all clients, [clients, *shape]; parameters are stacked or shared."""
        stacked = next(iter(parameters.values())).dim() > len(next(iter(self.task.shapes.values())))
        mode = Rewriting()

        def loss(parameters: Parameters, *batch: Tensor) -> Tensor:
            return self._loss(mode, parameters, *batch)

        given = batch if seeds is None else (*batch, seeds)
        mapped = vmap(grad(loss), in_dims=(0 if stacked else None, *[0] * len(given)))
        training = nullcontext() if seeds is None else self.task.in_training()
        with mode, training:
            found: Parameters = mapped(parameters, *given)
        return found

    def _loss(
        self,
        mode: Rewriting,
        parameters: Parameters,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor,
        *seeds: Tensor,
    ) -> Tensor:
        """Σ weight·loss of a client's batch; the module sees one example at a time.

        A batch is padded to the width of its group, which depends on other clients.
        """

        def alone(one: Tensor, *seed: Tensor) -> Tensor:
            mode.masks = Masks(seed[0]) if seed else None
            return self.task.outputs(parameters, one[None])[0]

        outputs = vmap(alone)(inputs, *seeds)
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

    A client that takes no such step keeps its exact values: the number of steps of a group depends
    on the other clients in it, and 0·∞ would let them turn its update into NaN.
    """
    plan, rates = group.plan, group.plan.rates[:, step]
    all_walk = bool((rates > 0).all())
    rates = rates.to(next(iter(start.values())).device)
    for name, leaf in stacked.items():
        slope = gradients[name]
        if plan.weight_decay:
            slope = slope.add(leaf, alpha=plan.weight_decay)
        if plan.proximal:
            slope = slope + plan.proximal * (leaf - start[name])
        if plan.momentum:
            last = velocity.get(name)
            slope = slope.clone() if last is None else last.mul_(plan.momentum).add_(slope)
            velocity[name] = slope
        rate = rates.view(-1, *[1] * (leaf.dim() - 1))
        if all_walk:
            leaf.addcmul_(rate, slope, value=-1)
        else:
            leaf.copy_(torch.where(rate > 0, leaf - rate * slope, leaf))


def _differences(stacked: Parameters, start: Parameters, clients: int) -> Tensor:
    if not stacked:
        first = next(iter(start.values()))
        return first.new_zeros(clients, sum(leaf.numel() for leaf in start.values()))
    leaves = [(leaf - start[name]).reshape(clients, -1) for name, leaf in stacked.items()]
    return torch.cat(leaves, dim=1)
