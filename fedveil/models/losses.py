"""Losses and accuracy, one number per example."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(outputs)[label], the mean over positions for sequences.

    [n, classes] with [n], or [n, length, classes] with [n, length]; always → [n].
    """
    flat = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
    return _per_example(flat.reshape(labels.shape))


def half_squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """½(output − target)².  Outputs [n] or [n, 1], targets [n]; → [n].

    >>> import torch
    >>> half_squared(torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """
    return 0.5 * (outputs.reshape(targets.shape) - targets).square()


def correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """[argmax outputs = label] as 0 or 1, for sequences the fraction of positions; → [n]."""
    return _per_example((outputs.argmax(-1) == labels).float())


def _per_example(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "half_squared": half_squared,
}
