"""Features of a frozen network in place of inputs: x ↦ φ(x), one example at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedveil.data.columns import DataColumn
from fedveil.data.federated import Dataset, Examples
from fedveil.errors import UserError

BATCH = 256  # examples at a time


def extracted(dataset: Dataset, module: nn.Module) -> Dataset:
    """The data set with φ(x) in place of x, φ a frozen module in evaluation mode.

    Das et al. 2022, §6 trains logistic regression on features of a network that public data have
    trained. Each feature must be a function of its own example: a module that mixes a batch is
    refused. No ε covers what φ itself has learned from private data.
    """
    before = module.training
    module.eval()
    try:
        _refuse_mixing(module, dataset.train.inputs)
        train, test = (
            Examples(_features(module, part.inputs), part.labels, owners=part.owners)
            for part in (dataset.train, dataset.test)
        )
    finally:
        module.train(before)
    return replace(dataset, train=train, test=test)


@torch.no_grad()
def _features(module: nn.Module, inputs: DataColumn) -> Tensor:
    """[n, d], float32."""
    starts = range(0, len(inputs), BATCH)
    return torch.cat([_flat(module, inputs[at : at + BATCH]) for at in starts])


def _flat(module: nn.Module, inputs: Tensor) -> Tensor:
    features: Tensor = module(inputs)
    return features.detach().reshape(len(inputs), -1).float()


@torch.no_grad()
def _refuse_mixing(module: nn.Module, inputs: DataColumn) -> None:
    """Refuse a module whose features of one example depend on the others in its batch."""
    few = inputs[: min(3, len(inputs))]
    together = _flat(module, few)
    alone = torch.cat([_flat(module, one[None]) for one in few])
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"The features that {type(module).__name__} computes for one example depend on the "
            "others in its batch, which would carry one client's data to others without noise. "
            "Use a module that treats every example alone."
        )
