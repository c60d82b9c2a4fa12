"""Learning rates as functions of the round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fedveil.errors import UserError
from fedveil.parts.checks import not_negative, numbers, positive


class Schedule(ABC):
    """A learning rate for every round."""

    @abstractmethod
    def __call__(self, round: int) -> float:
        """The rate of a round, counted from 0."""


@dataclass(frozen=True)
class Constant(Schedule):
    """η_k = rate."""

    rate: float

    def __post_init__(self) -> None:
        not_negative(self, "rate", self.rate)

    def __call__(self, round: int) -> float:
        """The same in every round."""
        return self.rate


@dataclass(frozen=True)
class Decay(Schedule):
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
class Steps(Schedule):
    """η_k = rate · factor^(number of `at` that are ≤ k)."""

    rate: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        not_negative(self, "rate", self.rate)
        positive(self, "factor", self.factor)
        numbers(self, "at", self.at)

    def __call__(self, round: int) -> float:
        """Piecewise constant in the round."""
        return float(self.rate * self.factor ** sum(start <= round for start in self.at))


@dataclass(frozen=True)
class Piecewise(Schedule):
    """η_k = rates[number of `at` that are ≤ k].  Das et al. 2021, App. H.

    >>> [Piecewise((0.1, 0.05), at=(2,))(k) for k in range(4)]
    [0.1, 0.1, 0.05, 0.05]
    """

    rates: tuple[float, ...]
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers(self, "rates", self.rates)
        numbers(self, "at", self.at)
        for rate in self.rates:
            not_negative(self, "rates", rate)
        if len(self.rates) != len(self.at) + 1 or list(self.at) != sorted(set(self.at)):
            raise UserError(
                f"Piecewise: {len(self.rates)} rates and changes at rounds {self.at} do not fit. "
                "Give increasing rounds, and one rate more than rounds."
            )

    def __call__(self, round: int) -> float:
        """Constant between two changes."""
        return float(self.rates[sum(start <= round for start in self.at)])


def schedule(rate: float | Schedule, decay: float = 1.0) -> Schedule:
    """A number as a schedule: constant, or decaying if `decay` is not 1.

    >>> schedule(0.5), schedule(0.5, decay=0.99)
    (Constant(rate=0.5), Decay(rate=0.5, factor=0.99))
    """
    if not isinstance(rate, int | float):
        return rate
    return Constant(float(rate)) if decay == 1.0 else Decay(float(rate), decay)
