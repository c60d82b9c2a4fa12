"""Constants of the theorems, given by name or estimated from a pilot's data.

Estimates describe the pilot's clients: a maximum over few clients is too small for many. Losses are
never negative, so 0 is used as each client's minimum loss. This is exact if the model can fit the
client's own examples, and otherwise makes Δ* too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError, unknown
from fedveil.parts.local import SGD, Local
from fedveil.parts.report import Difference, Report
from fedveil.parts.schedule import Constant
from fedveil.planning.compute import engine_for
from fedveil.recipe import Recipe

NAMES = {
    "L": "smoothness of every client's loss",
    "distance": "‖x₀ − x*‖ from the start to the optimum",
    "gap": "f(x₀) − f*",
    "delta": "mean Δ*: a client's loss at x* above its own minimum",
    "delta_max": "the largest Δ* of a client",
    "R": "the largest norm of a client's first update",
    "tau": "E‖∇f_i − ∇f‖² at the start",
    "norm": "‖u‖, a client's update at the optimum",
    "loss": "f(x₀)",
    "G": "Lipschitz constant of every client's loss",
    "lambda": "curvature along gradients (Das et al. 2022, Assumption 1)",
}
CURVED = 12  # clients whose curvature is estimated
POWER = 20  # steps of a power iteration
SOLVE = 100  # steps of L-BFGS


@dataclass(frozen=True)
class Constants:
    """Values by name, and whether each was given or estimated."""

    values: Mapping[str, float]
    given: frozenset[str] = frozenset()

    def missing(self, *names: str) -> list[str]:
        """The names that are neither given nor estimated."""
        return [name for name in names if name not in self.values]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def or_given(self, given: Mapping[str, float]) -> Constants:
        """These constants, overridden by given ones."""
        return Constants({**self.values, **given}, frozenset(given))


def checked(given: Mapping[str, float]) -> dict[str, float]:
    """The constants, if all names are known and all values positive."""
    for name, value in given.items():
        if name not in NAMES:
            raise unknown("constant", name, NAMES)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise UserError(f"--constant {name}={value} is not positive. Give a number above 0.")
    return dict(given)


def estimated(task: Task, data: Federated, recipe: Recipe) -> Constants:
    """Estimates of all constants but G and λ, from the pilot's clients, without bound or noise."""
    start = task.flatten()
    best = solved(task, data, start)
    losses, first = _losses(task, data, best), float(_losses(task, data, start).mean())
    engine_norms = report_norms(task, data, recipe.local, recipe.report)
    slopes = report_norms(task, data, SGD(Constant(1.0), steps=1), Difference())
    lengths, mean = slopes(start)
    values = {
        "L": max(curvature(task, data, x) for x in (start, best)),
        "distance": float((best - start).norm()),
        "gap": first - float(losses.mean()),
        "delta": float(losses.mean()),
        "delta_max": float(losses.max()),
        "R": float(engine_norms(start)[0].max()),
        "tau": max(float(lengths.square().mean()) - mean**2, 0.0),
        "norm": float(engine_norms(best)[0].mean()),
        "loss": first,
    }
    return Constants({name: value for name, value in values.items() if value > 0})


def report_norms(
    task: Task, data: Federated, local: Local, report: Report
) -> Callable[[Tensor], tuple[Tensor, float]]:
    """x ↦ (‖u_i‖ of every client, ‖mean of u_i‖) at a model x."""
    engine = engine_for(task, data, local)
    plan = local.plan(data.sizes, 0, np.random.default_rng(0))

    def at(x: Tensor) -> tuple[Tensor, float]:
        norms, total = [], torch.zeros(len(x), dtype=torch.float64)
        for first in range(0, data.clients, engine.group_size):
            last = min(first + engine.group_size, data.clients)
            group = Group(data, np.arange(first, last), plan.group(first, last))
            updates = engine.updates(x, group).affine(*report.affine(local.rate(0)), x)
            norms.append(updates.norms())
            total += updates.weighted_sum(torch.ones(last - first, dtype=torch.float64))
        return torch.cat(norms), float(total.norm()) / data.clients

    return at


def solved(task: Task, data: Federated, start: Tensor) -> Tensor:
    """x* of the mean loss over clients, by L-BFGS; a local optimum if the loss is not convex."""
    x = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([x], max_iter=SOLVE, line_search_fn="strong_wolfe")
    inputs, labels = data.inputs[:], data.labels[:]
    weights = _weights(data)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = task.loss_of_examples(task.outputs(task.at(x), inputs), labels)
        loss = (losses * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return x.detach()


def curvature(task: Task, data: Federated, x: Tensor) -> float:
    """The largest eigenvalue of ∇²f_i(x) over the first few clients, by power iteration."""
    few = range(min(data.clients, CURVED))
    return max(_eigenvalue(task, data, client, x) for client in few)


def _eigenvalue(task: Task, data: Federated, client: int, x: Tensor) -> float:
    own, at = data.client(client), x.clone().requires_grad_(True)
    outputs = task.outputs(task.at(at), own.inputs[:])
    loss = task.loss_of_examples(outputs, own.labels[:]).mean()
    (slope,) = torch.autograd.grad(loss, at, create_graph=True)
    direction = torch.randn(len(x), generator=torch.Generator().manual_seed(client))
    value = 0.0
    for _ in range(POWER):
        direction = direction / direction.norm().clamp_min(1e-30)
        (product,) = torch.autograd.grad(slope, at, direction, retain_graph=True)
        value, direction = float(product.norm()), product
    return value


def _losses(task: Task, data: Federated, x: Tensor) -> Tensor:
    """f_i(x) of every client, [clients]."""
    with torch.no_grad():
        outputs = task.outputs(task.at(x), data.inputs[:])
        losses = task.loss_of_examples(outputs, data.labels[:]).double()
    owner = torch.arange(data.clients).repeat_interleave(data.sizes)
    sums = torch.zeros(data.clients, dtype=torch.float64).index_add_(0, owner, losses)
    return sums / data.sizes


def _weights(data: Federated) -> Tensor:
    """Equal weights for clients, and for the examples of a client."""
    return (1 / (data.clients * data.sizes.double())).repeat_interleave(data.sizes).float()
