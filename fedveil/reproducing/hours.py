"""Predicted CPU hours of an item at a scale: its runs, their rounds and their multiplications.

Only public sizes of the data sets are used, so an item is predicted also where its data are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.engines.choose import PACE
from fedveil.models.catalog import rebuild
from fedveil.reproducing.item import Arm, Item, Scale
from fedveil.training.settings import resolve_recipe

if TYPE_CHECKING:
    from fedveil.training.settings import Settings

BACKWARD = 2.0  # times the multiplications of a forward pass
HOUR = 3600.0


@dataclass(frozen=True)
class Sizes:
    """Public sizes of a data set."""

    shape: tuple[int, ...]  # of one input
    classes: int
    examples: int  # for training
    clients: int = 0  # that the data set itself has
    tokens: bool = False


SIZES = {
    "fashion-mnist": Sizes((1, 28, 28), 10, 60_000),
    "mnist": Sizes((1, 28, 28), 10, 60_000),
    "emnist-digits": Sizes((1, 28, 28), 10, 240_000),
    "cifar10": Sizes((3, 32, 32), 10, 50_000),
    "cifar100": Sizes((3, 32, 32), 100, 50_000),
    "svhn": Sizes((3, 32, 32), 10, 73_257),
    "shakespeare": Sizes((80,), 97, 12_000, 200, tokens=True),
    "leaf-shakespeare": Sizes((80,), 97, 3_803_542, 1_129, tokens=True),
    "digits": Sizes((1, 8, 8), 10, 1_437),
    "synthetic": Sizes((784,), 10, 2_000),
    "das2022-quadratics": Sizes((200,), 1, 2_000, 100),
    "zhang2022-table4": Sizes((1,), 1, 3, 3),
    "zhang2022-claim21": Sizes((1,), 1, 3, 3),
}


def predicted_hours(item: Item, scale: str) -> float:
    """Local steps alone, at 10 billion multiplications per second, on one core."""
    chosen = item.scale(scale)
    return sum(_of_arm(item, arm, chosen) for arm in item.arms_at(chosen)) / HOUR


def _of_arm(item: Item, arm: Arm, scale: Scale) -> float:
    """Seconds of an arm: every point of its grid on held-out examples, then the chosen one."""
    points = item.points(arm, scale)
    tried = len(scale.tuning_seeds) * sum(map(_of_run, points)) if len(points) > 1 else 0.0
    return tried + len(scale.seeds) * max(map(_of_run, points))


def _of_run(settings: Settings) -> float:
    recipe, sizes = resolve_recipe(settings), SIZES[settings.data.dataset or "synthetic"]
    clients = settings.data.clients or sizes.clients or 1
    own = settings.data.examples or max(1, sizes.examples // clients)
    by_example = recipe.unit == "example"
    population = sizes.examples if by_example else clients
    plan = recipe.local.plan(torch.tensor([1 if by_example else own]), 0, np.random.default_rng(0))
    examples = int((plan.index >= 0).sum()) * (plan.steps if plan.repeated else 1)
    everyone = len(recipe.memory.workers(np.arange(1), 2)) == 2
    workers = float(population) if everyone else recipe.cohort.expected(population)
    products = (1 + BACKWARD) * examples * products_of_example(settings.model or "softmax", sizes)
    return settings.rounds * workers * products / PACE["factored"]


@cache
def products_of_example(model: str, sizes: Sizes) -> float:
    """Multiplications of a forward pass on one example; tensors have shapes, but no memory."""
    from torch.utils.flop_counter import FlopCounterMode

    module = rebuild(model, sizes.shape, sizes.classes, "the item").eval()
    kind = torch.int64 if sizes.tokens else torch.float32
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, *sizes.shape, dtype=kind, device="meta"))
    return float(counter.get_total_flops()) / 2
