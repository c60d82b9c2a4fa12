"""Losses by name, and the user's own.

A loss is written as text: `cross_entropy`, `focal(gamma=2.0)`, `cross_entropy(weights=[1, 30])`, or
`package.module:function` for the user's own.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedveil.data.federated import IGNORED
from fedveil.errors import UserError, unknown
from fedveil.models.loss import (
    Binary,
    CrossEntropy,
    Focal,
    HalfSquared,
    Huber,
    Loss,
    MeanSquared,
    Target,
    cross_entropy,
    half_squared,
)

__all__ = [
    "KINDS",
    "LOSSES",
    "Function",
    "Own",
    "as_loss",
    "correct",
    "cross_entropy",
    "half_squared",
    "loss_named",
    "target_of",
]
Function = Callable[[Tensor, Tensor], Tensor]
CALLED = re.compile(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Own(Loss):
    """The user's function (outputs [1, …], targets [1, …]) → [1] or a number, example by example.

    `vmap` keeps examples apart, so that entry j depends on example j only, whatever it computes.
    """

    name = "own"
    kind = "number"
    function: str = ""  # package.module:function
    of: Target = "number"
    call: Function | None = field(default=None, compare=False, repr=False, init=False)

    def __post_init__(self) -> None:
        if self.of not in get_args(Target):
            raise unknown("kind of targets", str(self.of), get_args(Target))

    @property
    def target(self) -> Target:
        """The targets that the function was given for."""
        return self.of

    @classmethod
    def wrapping(cls, function: Function, of: Target) -> Own:
        """A function that is given as an object."""
        names = ("__module__", "__qualname__")
        module, name = (getattr(function, n, getattr(type(function), n)) for n in names)
        made = cls(f"{module}:{name}", of)
        object.__setattr__(made, "call", function)
        return made

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example."""
        call = self.resolved()

        def alone(output: Tensor, target: Tensor) -> Tensor:
            found = call(output[None], target[None])
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise UserError(
                    f"The loss {self.function} returned {_told(found)} for one example. Return one "
                    "number per example, as a tensor."
                )
            return found.reshape(())

        return torch.func.vmap(alone)(outputs, targets)

    def answers(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Probabilities, or numbers; outputs of another shape are left as they are."""
        if self.target == "label":
            return outputs.reshape(targets.shape).sigmoid()
        if self.target == "number" and outputs.numel() != targets.numel():
            return outputs
        return super().answers(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """As for the stock losses of these targets."""
        stock = {"class": cross_entropy, "label": Binary()}.get(self.target)
        return None if stock is None else stock.correct(outputs, targets)

    def resolved(self) -> Function:
        """The function itself, imported if it was named."""
        if self.call is None:
            from fedveil.serialization.imports import imported

            found = imported(self.function, "loss", "function", "mylosses:pinball")
            object.__setattr__(self, "call", found)
        assert self.call is not None
        return self.call


KINDS: dict[str, type[Loss]] = {
    kind.name: kind for kind in (CrossEntropy, Focal, Binary, HalfSquared, MeanSquared, Huber, Own)
}
LOSSES: dict[str, Loss] = {name: kind() for name, kind in KINDS.items() if kind is not Own}


def loss_named(text: str, of: Target = "number") -> Loss:
    """The loss that a text describes; `of` are the targets of a user's own function.

    >>> print(loss_named("cross_entropy( weights=[1, 30] )"), loss_named("huber(delta=1)"))
    cross_entropy(weights=[1.0, 30.0]) huber
    """
    if not isinstance(text, str):
        raise UserError(f"loss is {text!r}. Give a name, such as 'huber', or a function.")
    if ":" in text and "(" not in text:
        return Own(text.strip(), of)
    match = CALLED.fullmatch(text.strip())
    name, inside = (match[1], match[2]) if match else (text, None)
    if name not in KINDS:
        raise unknown("loss", name, [*LOSSES, "package.module:function"])
    return _built(KINDS[name], _arguments(text, inside))


def as_loss(given: str | Loss | Function, of: Target) -> Loss:
    """A loss, a text that describes one, or the user's own function of targets of this kind."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, nn.CrossEntropyLoss | nn.NLLLoss):
        _refuse_mean_of_weights(given)
    if type(given) is nn.CrossEntropyLoss and of == "class" and given.weight is None:
        ignored = None if given.ignore_index == IGNORED else given.ignore_index
        return CrossEntropy(ignore=ignored, smoothing=given.label_smoothing)
    if callable(given) and not isinstance(given, type):
        return Own.wrapping(given, of)
    return loss_named(given, of)  # type: ignore[arg-type]  # it refuses everything else


def _refuse_mean_of_weights(given: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
    """Refuse weights that cancel: torch divides by the weight of the example itself."""
    if given.weight is not None and given.reduction == "mean":
        instead = ""
        if isinstance(given, nn.CrossEntropyLoss):
            weights = [round(float(weight), 6) for weight in given.weight]
            instead = f", or use loss='cross_entropy(weights={weights})'"
        raise UserError(
            f"{type(given).__name__} divides by the sum of the weights. A loss is computed for one "
            "example at a time, so its weight would cancel. "
            f"Pass reduction='none'{instead}."
        )


def target_of(text: str) -> Target:
    """What a loss compares outputs with: classes, binary labels or numbers.

    >>> target_of("focal(gamma=1)"), target_of("huber")
    ('class', 'number')
    """
    return loss_named(text).target


def _arguments(text: str, inside: str | None) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(f"given = {{{inside or ''}}}")["given"]
    except tomllib.TOMLDecodeError:
        raise UserError(
            f"The loss '{text[:80]}' cannot be read. Write it as in cross_entropy(weights=[1, 30])."
        ) from None
    return found


def _built(kind: type[Loss], arguments: Mapping[str, Any]) -> Loss:
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in arguments:
        if name not in known:
            raise unknown(f"parameter of the loss '{kind.name}' named", name, known or ["nothing"])
    try:
        return kind(**{name: _value(kind, name, value) for name, value in arguments.items()})
    except (TypeError, ValueError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(f"A parameter of the loss '{kind.name}' is not a number.") from problem


def _value(kind: type[Loss], name: str, value: Any) -> Any:
    default = next(f.default for f in dataclasses.fields(kind) if f.name == name)
    if name == "weights":
        return tuple(float(weight) for weight in value)
    if name == "ignore":
        return int(value)
    return float(value) if isinstance(default, float) else str(value)


def _told(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    return f"a {type(found).__name__}"


def correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """[argmax outputs = label] as 0 or 1, for sequences the fraction of positions; → [n]."""
    return cross_entropy.correct(outputs, labels)
