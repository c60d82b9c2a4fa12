"""Losses and accuracy, one number per example."""

from __future__ import annotations

from collections.abc import Callable

import torch
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


def cross_entropy_slope(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """weight·(softmax(outputs) − [label]) / positions: of Σ weight·cross_entropy, by outputs."""
    slope = outputs.softmax(-1)
    flat = slope.flatten(0, -2)
    flat[torch.arange(len(flat)), labels.flatten()] -= 1
    share = weights * (len(labels) / max(1, labels.numel()))
    return slope.mul_(share.view(-1, *[1] * (outputs.dim() - 1)))


def half_squared_slope(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """weight·(output − target): the gradient of Σ weight·half_squared, by outputs."""
    return ((outputs.reshape(targets.shape) - targets) * weights).reshape(outputs.shape)


def correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """[argmax outputs = label] as 0 or 1, for sequences the fraction of positions; → [n]."""
    return _per_example((outputs.argmax(-1) == labels).float())


def _per_example(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)


SLOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy_slope,
    "half_squared": half_squared_slope,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "half_squared": half_squared,
}
