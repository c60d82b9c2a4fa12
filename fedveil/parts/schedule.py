"""Learning rates as functions of the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedveil.parts.checks import not_negative, positive


class Schedule(Protocol):
    """A learning rate for every round."""

    def __call__(self, round: int) -> float:
        """The rate of this round; rounds count from 0."""


@dataclass(frozen=True)
class Constant:
    """η_k = rate."""

    rate: float

    def __post_init__(self) -> None:
        not_negative(self, "rate", self.rate)

    def __call__(self, round: int) -> float:
        """The same in every round."""
        return self.rate


@dataclass(frozen=True)
class Decay:
    """η_k = rate · factor^k.  Das et al. 2022, App. G: factor 0.99."""

    rate: float
    factor: float = 0.99

    def __post_init__(self) -> None:
        not_negative(self, "rate", self.rate)
        positive(self, "factor", self.factor)

    def __call__(self, round: int) -> float:
        """Geometric in the round."""
        return float(self.rate * self.factor**round)


@dataclass(frozen=True)
class Steps:
    """η_k = rate · factor^(how many of `at` are ≤ k)."""

    rate: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        not_negative(self, "rate", self.rate)
        positive(self, "factor", self.factor)

    def __call__(self, round: int) -> float:
        """Piecewise constant in the round."""
        return float(self.rate * self.factor ** sum(start <= round for start in self.at))


def schedule(rate: float | Schedule, decay: float = 1.0) -> Schedule:
    """A number as a schedule: constant, or decaying when `decay` is not 1.

    >>> schedule(0.5), schedule(0.5, decay=0.99)
    (Constant(rate=0.5), Decay(rate=0.5, factor=0.99))
    """
    if not isinstance(rate, int | float):
        return rate
    return Constant(float(rate)) if decay == 1.0 else Decay(float(rate), decay)
