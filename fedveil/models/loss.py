"""Losses, one number per example, and their gradients by the outputs."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedveil.data.federated import IGNORED
from fedveil.errors import UserError

Target = Literal["class", "label", "number"]
TINY = 1e-12  # least 1 − p of a focal loss: its slope is not defined at 0


@dataclass(frozen=True)
class Loss:
    """loss(outputs [n, …], targets [n, …]) → [n], where entry j depends on example j only."""

    name: ClassVar[str]
    kind: ClassVar[Target]

    @property
    def target(self) -> Target:
        """What outputs are compared with: classes, binary labels or numbers."""
        return self.kind

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example."""
        raise NotImplementedError

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The gradient of Σ weight·loss by the outputs."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            total = (self(leaf, targets) * weights).sum()
            (found,) = torch.autograd.grad(total, leaf, materialize_grads=True)
        return found

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """1 or 0 for each example, or the share of its labels; None for numeric targets."""
        return None

    def answers(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Probabilities, or numbers in the shape of the targets."""
        return outputs.softmax(-1) if self.target == "class" else outputs.reshape(targets.shape)

    @property
    def ignored(self) -> tuple[int, ...]:
        """The classes of positions that do not count."""
        return ()

    def counted(self, targets: Tensor) -> Tensor:
        """Which targets count."""
        kept = torch.ones_like(targets, dtype=torch.bool)
        for label in self.ignored:
            kept = kept & (targets != label)
        return kept

    def check(self, classes: int) -> None:
        """Refuse parameters that do not fit this number of classes."""

    def __str__(self) -> str:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        told = [f"{k}={_toml(v)}" for k, v in own.items() if v != defaults[k]]
        return f"{self.name}({', '.join(told)})" if told else self.name


@dataclass(frozen=True)
class _OfClasses(Loss):
    """Losses of class numbers [n], or [n, length] for sequences, of which the mean is taken."""

    kind = "class"
    weights: tuple[float, ...] = ()  # of the classes; empty: all 1
    ignore: int | None = None  # the class of positions that do not count, such as padding

    def __post_init__(self) -> None:
        positive(self.name, "weights", *self.weights)

    @property
    def ignored(self) -> tuple[int, ...]:
        """−100, as in torch, and the class to ignore."""
        return (IGNORED,) if self.ignore is None else (IGNORED, self.ignore)

    def check(self, classes: int) -> None:
        """Refuse weights of another number of classes."""
        if self.weights and len(self.weights) != classes:
            raise UserError(
                f"The loss '{self.name}' has {len(self.weights)} weights, but the data have "
                f"{classes} classes. Give one weight per class, in the order of the classes."
            )

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[argmax outputs = label], for sequences the share of the positions that count."""
        return self._mean((outputs.argmax(-1) == targets).float(), targets)

    def _each(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """−w[label]·log softmax(outputs)[label] of each position, 0 where it does not count."""
        known = labels.where(self.counted(labels), IGNORED)
        flat = F.cross_entropy(
            outputs.flatten(0, -2), known.flatten(), reduction="none", label_smoothing=smoothing,
            weight=outputs.new_tensor(self.weights) if self.weights else None, ignore_index=IGNORED,
        )  # fmt: skip
        return flat.reshape(labels.shape)

    def _mean(self, values: Tensor, labels: Tensor) -> Tensor:
        """The mean over the positions that count; 0 where none does."""
        counts = self.counted(labels).to(values.dtype)
        whole = (values * counts).reshape(len(labels), -1)
        return whole.sum(1) / self._positions(labels)

    def _positions(self, labels: Tensor) -> Tensor:
        """The number of positions of each example that count, at least 1; float32 [n]."""
        return self.counted(labels).reshape(len(labels), -1).sum(1).clamp_min(1).float()


@dataclass(frozen=True)
class CrossEntropy(_OfClasses):
    """−w[label]·log softmax(outputs)[label], with the label smoothed over all classes if asked.

    [n, classes] with [n], or [n, length, classes] with [n, length]; always → [n].
    """

    name = "cross_entropy"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing is {self.smoothing}. Give a number from 0 to below 1.")

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example."""
        return self._mean(self._each(outputs, labels, self.smoothing), labels)

    def slope(self, outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """weight·w[label]·(softmax(outputs) − [label]) / positions that count."""
        if self.smoothing:
            return super().slope(outputs, labels, weights)
        slope, counted = outputs.softmax(-1), self.counted(labels)
        flat, places = slope.flatten(0, -2), labels.where(counted, 0)
        flat[torch.arange(len(flat), device=flat.device), places.flatten()] -= 1
        share = weights * self._positions(labels).reciprocal()
        shares = share.view(-1, *[1] * (labels.dim() - 1)) * counted
        if self.weights:
            shares = shares * outputs.new_tensor(self.weights)[places]
        return slope.mul_(shares[..., None])


@dataclass(frozen=True)
class Focal(_OfClasses):
    """−w[label]·(1 − p)^γ·log p, p = softmax(outputs)[label].  Lin et al. 2017, Eq. 4."""

    name = "focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma < math.inf:
            raise UserError(f"gamma is {self.gamma}. Give a number of at least 0.")

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example."""
        known = labels.where(self.counted(labels), 0)
        log = outputs.log_softmax(-1).gather(-1, known[..., None])[..., 0]
        rest = (-log.expm1()).clamp(min=TINY)
        return self._mean(self._each(outputs, labels) * rest**self.gamma, labels)


@dataclass(frozen=True)
class Binary(Loss):
    """−y·w·log σ(output) − (1 − y)·log(1 − σ(output)), the mean over the labels of an example.

    Targets are 0 or 1, [n] or [n, labels]; outputs have the same shape, or [n, 1] for [n].
    """

    name = "binary"
    kind = "label"
    positive: float = 1.0  # weight of the value 1

    def __post_init__(self) -> None:
        positive(self.name, "positive", self.positive)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example."""
        return per_example(
            F.binary_cross_entropy_with_logits(
                outputs.reshape(targets.shape), targets, reduction="none",
                pos_weight=outputs.new_tensor(self.positive),
            )
        )  # fmt: skip

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of an example's labels whose probability is on the right side of ½."""
        right = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
        return per_example(right.float())

    def answers(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each label."""
        return outputs.reshape(targets.shape).sigmoid()


@dataclass(frozen=True)
class HalfSquared(Loss):
    """½(output − target)².  Outputs [n] or [n, 1], targets [n]; → [n].

    >>> import torch
    >>> half_squared(torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """

    name = "half_squared"
    kind = "number"
    factor: ClassVar[float] = 0.5

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example; of several targets, their mean."""
        return per_example(self.factor * (outputs.reshape(targets.shape) - targets).square())

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """weight·(output − target) per target, twice as much for the mean squared error."""
        share = 2 * self.factor * weights * (len(targets) / max(1, targets.numel()))
        gap = outputs.reshape(targets.shape) - targets
        return (gap * share.view(-1, *[1] * (targets.dim() - 1))).reshape(outputs.shape)


@dataclass(frozen=True)
class MeanSquared(HalfSquared):
    """(output − target)², the mean over the targets of an example."""

    name = "mse"
    factor = 1.0


@dataclass(frozen=True)
class Huber(Loss):
    """½e² for |e| ≤ δ, else δ·(|e| − ½δ), e = output − target; the mean over targets."""

    name = "huber"
    kind = "number"
    delta: float = 1.0

    def __post_init__(self) -> None:
        positive(self.name, "delta", self.delta)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example."""
        return per_example(
            F.huber_loss(
                outputs.reshape(targets.shape), targets, reduction="none", delta=self.delta
            )
        )


def positive(loss: str, name: str, *values: float) -> None:
    """Refuse a parameter that is not positive and finite."""
    if any(not 0 < value < math.inf for value in values):
        given = values[0] if len(values) == 1 else list(values)
        raise UserError(f"{name} of the loss '{loss}' is {given}. Give positive numbers.")


def _toml(value: Any) -> str:
    return f"[{', '.join(map(repr, value))}]" if isinstance(value, tuple) else json.dumps(value)


def per_example(values: Tensor) -> Tensor:
    """The mean over all axes but the first."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)


cross_entropy, half_squared = CrossEntropy(), HalfSquared()
