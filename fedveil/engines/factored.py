"""factored: keeps a client's weights as the factors of its gradient steps instead of storing them.

W_i = W − Σ g aᵀ. Parameterised operations are intercepted wherever a module calls them, so that no
module has to be rewritten. The engine refuses a module that uses an unsupported operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.engines.dense import DenseEngine
from fedveil.engines.interception import ForwardCost, Interception, Work
from fedveil.engines.stores import LARGEST, SMALLEST, Decayed, Pace, Store
from fedveil.engines.task import Task
from fedveil.engines.updates import DenseUpdates, Group, Updates

GROUP_NUMBERS = 2**25  # parameters and activations of a group: 128 MB
GROUP_WEIGHTS = 2**21  # of these, clients' weights that are stored in full: 8 MB
MOST = 1024  # clients per group
FEW = 4  # examples of a client whose linear layers stay in factored form


@dataclass(frozen=True, eq=False)
class FactoredEngine:
    """All clients of a group as one batch; the layers' stores hold what differs between them."""

    task: Task
    group_size: int
    name: str = "factored"
    least_group: int = 1

    @classmethod
    def sized(
        cls, task: Task, cost: ForwardCost, width: int, space: int | None = None
    ) -> FactoredEngine:
        """An engine with groups that fit in memory, for batches of up to this width.

        `space` is how many numbers fit on another device.
        """
        written = task.dim - cost.linear if width <= FEW else task.dim
        each = max(1, 2 * written + width * cost.numbers)
        if space is not None:
            return cls(task, max(1, min(MOST, space // (3 * each))))
        room = GROUP_NUMBERS // each
        return cls(task, max(1, min(MOST, room, GROUP_WEIGHTS // max(1, written))))

    def updates(self, x: Tensor, group: Group) -> Updates:
        """Runs the plan's steps: forward, backward, step.

        A correction of each client is no product of factors, so the dense engine adds it.
        """
        plan = group.plan
        if plan.correction is not None:
            return DenseEngine(self.task, self.group_size).updates(x, group)
        pace = Pace.start(plan, x.device)
        examples = group.data.inputs
        drops = bool(self.task.dropouts(examples.shape[1:], examples.dtype))
        same = plan.repeated and not drops  # whether every step has the same inputs
        work = Work.begin(self.task, x, len(group.clients), same)
        for step, (inputs, labels, weights) in enumerate(work.batches(group)):
            width = len(inputs) // len(group.clients)
            seeds = group.seeds(step, width).flatten(0, 1) if drops else None
            self._differentiate(work, pace, inputs, labels, weights, seeds)
            self.task.refuse_change()
            for layer in work.layers.values():
                layer.absorb(pace)
            pace.advance()
        sizes = [leaf.numel() for leaf in work.start.values()]
        return FactoredUpdates(tuple(_stores(work, pace)), sizes, len(group.clients))

    def _differentiate(
        self,
        work: Work,
        pace: Pace,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor,
        seeds: Tensor | None,
    ) -> None:
        """Store the gradients of each client's mean loss in the layers."""
        training = nullcontext() if seeds is None else self.task.in_training(work.module)
        with torch.enable_grad(), training, Interception(work, pace):
            outputs = work.outputs(inputs, seeds)
        if outputs.requires_grad:
            slope = self.task.slope_of_losses(outputs.detach(), labels, weights)
            torch.autograd.backward((outputs * slope).sum())  # given a slope, torch loads sympy


def _stores(work: Work, pace: Pace) -> Iterator[Store]:
    """The store of every parameter, in the order of the flat vector."""
    found: dict[str, Store] = {}
    for layer in work.layers.values():
        found |= layer.finished(pace)
    for name, leaf in work.start.items():
        yield found.get(name) or Decayed(leaf, pace.gamma)


def _in_range(scale: Tensor) -> Tensor:
    """Scales with which no factor over- or underflows: never larger, and zero if too small."""
    size = torch.where(scale.abs() >= SMALLEST, scale.abs().clamp_max(LARGEST), 0.0)
    return size.copysign(scale)


class FactoredUpdates:
    """The differences y_i − x, parameter by parameter, times a scalar."""

    def __init__(
        self, stores: tuple[Store, ...], sizes: list[int], clients: int, scale: float = 1.0
    ) -> None:
        self._stores, self._sizes, self._clients, self._scale = stores, sizes, clients, scale
        self._lengths: Tensor | None = None  # ‖Δ_i‖, cached at first use

    def norms(self) -> Tensor:
        """√Σ‖Δ_i‖² over the parameters, in float64."""
        if self._lengths is None:
            squares = self._stores[0].squares()
            for store in self._stores[1:]:
                squares = squares + store.squares()
            self._lengths = squares.sqrt()
        return self._lengths * abs(self._scale)

    def dots(self, vector: Tensor) -> Tensor:
        """Σ over the parameters, computed by their stores."""
        found = vector.new_zeros(self._clients, dtype=torch.float64)
        for store, part in zip(self._stores, torch.split(vector, self._sizes), strict=True):
            found += store.dots(part)
        return found * self._scale

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """Σ scale_i·u_i over the updates whose scale is not 0."""
        weights = _in_range(scale * self._scale)
        used = torch.nonzero(weights).flatten()
        each = weights[used].float()
        return torch.cat([store.weighted_sum(each, used) for store in self._stores])

    def rows(self) -> Tensor:
        """The updates as rows."""
        rows = torch.cat([store.rows() for store in self._stores], dim=1)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def affine(self, scale: float, share: float, x: Tensor) -> Updates:
        """Scales lazily; computes rows where a share of x is added."""
        if share == 0.0:
            scale *= self._scale
            scaled = FactoredUpdates(self._stores, self._sizes, self._clients, scale)
            scaled._lengths = self._lengths
            return scaled
        return DenseUpdates(self.rows()).affine(scale, share, x)
