"""Part: the questions that every part answers, with safe defaults for user-defined parts.

The rest of the system asks the part, and never checks its class. A part without an answer of its
own inherits a safe default: it is described by its `repr`, and accounted without favorable
assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Begin:
    """The inputs for the initial state of a part."""

    x: Tensor  # the model before the first round
    population: int
    rounds: int
    rng: np.random.Generator  # of this part only
    expected: float = 1.0  # number of participants of a round
    noise: float = 0.0  # standard deviation of a coordinate of the noise on a round's mean


class Part:
    """One of the parts of a recipe: a frozen dataclass.

    `claims` are answers that hold for one formula. A user-defined subclass may change the formula,
    so it does not inherit these answers and uses the safe defaults instead.
    """

    claims: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not foreign(cls):
            return
        for name in claims_of(cls):
            definers = definers_of(cls, name)
            if not foreign(definers[0]) and definers[0] is not definers[-1]:
                setattr(cls, name, vars(definers[-1])[name])

    def initial_state(self, begin: Begin) -> Tensors:
        """The state before the first round. [default: none]"""
        return {}

    def misfit(self, recipe: Recipe) -> str | None:
        """Why the part does not fit the other parts of a recipe, and the fix. [default: it fits]"""
        return None


def claims_of(kind: type) -> set[str]:
    """The claims of all classes of fedveil that a class inherits from."""
    known = (base for base in kind.__mro__ if not foreign(base))
    return {name for base in known for name in vars(base).get("claims", ())}


def definers_of(kind: type, name: str) -> list[type]:
    """The classes that define an attribute, the one that counts first."""
    return [base for base in kind.__mro__ if name in vars(base)]


def foreign(part: object) -> bool:
    """Whether a part, or a class of parts, is user-defined, also if it subclasses fedveil's."""
    kind = part if isinstance(part, type) else type(part)
    if kind.__module__.partition(".")[0] != "fedveil":
        return True
    inside = getattr(part, "stranger", None)  # of a part that is observed (`recipe.observed`)
    return inside is not None and foreign(inside)
