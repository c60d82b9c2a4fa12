"""loop: one client after another, for models too large to stack or without a vmap rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.engines.dropout import Masks
from fedveil.engines.task import Parameters, Task
from fedveil.engines.updates import DenseUpdates, Group


@dataclass(frozen=True, eq=False)
class LoopEngine:
    """Plain autograd for each client; supports any module."""

    task: Task
    group_size: int = 8
    least_group: int = 1
    name: str = "loop"

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """Row i is the update of client i."""
        rows = x.new_empty(len(group.clients), len(x))
        for client in range(len(group.clients)):
            rows[client] = self._walk(x, group, client)
            self.task.refuse_change()
        return DenseUpdates(rows)

    def _walk(self, x: Tensor, group: Group, client: int) -> Tensor:
        plan = group.plan.group(client, client + 1)
        alone = group.part(client, client + 1, plan)
        y, velocity = x.clone(), torch.zeros_like(x)
        for step, batch in enumerate(alone.steps()):
            inputs, labels, weights = (part[0] for part in batch)
            single = self.task.dropouts(inputs.shape[1:], inputs.dtype)
            masks = Masks(alone.seeds(step, len(inputs))[0], single) if single else None
            with self.task.local_steps(masks):
                slope = self._gradient(y, inputs, labels, weights)
            slope = slope + plan.weight_decay * y + plan.proximal * (y - x)
            if plan.correction is not None:
                slope = slope + plan.correction[0].to(slope.device)
            velocity = plan.momentum * velocity + slope
            y = y - float(plan.rates[0, step]) * velocity
        return y - x

    def _gradient(self, y: Tensor, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        leaves: Parameters = {
            name: leaf.detach().requires_grad_() for name, leaf in self.task.unflatten(y).items()
        }
        loss = self.task.loss(leaves, inputs, labels, weights)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in gradients])
