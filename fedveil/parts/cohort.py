"""cohort: who takes part in a round, and how hidden participation amplifies privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedveil.errors import UserError
from fedveil.parts.checks import check, count
from fedveil.privacy import events
from fedveil.privacy.norms import Adjacency


class Cohort(Protocol):
    """Draws a round's cohort and states what drawing it is worth."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours under which `amplify` is a theorem."""

    @property
    def fixed(self) -> bool:
        """Whether the number of participants is the same in every round."""

    def expected(self, population: int) -> float:
        """The public denominator: how many take part on average."""

    def draw(self, population: int, rng: np.random.Generator) -> np.ndarray:
        """Indexes of the participants, ascending."""

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """The event as seen by one who does not know who took part."""


@dataclass(frozen=True)
class Everyone:
    """S_k = {1..n}.  No amplification."""

    fixed = True

    @property
    def adjacency(self) -> Adjacency:
        """Zero-out: how many there are is public, so a unit is blanked out, not removed."""
        return "zero-out"

    def expected(self, population: int) -> float:
        """n."""
        return float(population)

    def draw(self, population: int, rng: np.random.Generator) -> np.ndarray:
        """All of them."""
        return np.arange(population)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Nothing is hidden, so nothing is gained."""
        return event


@dataclass(frozen=True)
class Poisson:
    """i ∈ S_k independently with probability rate.  Amplifies under add-remove adjacency.

    A cohort may be empty: its round then releases noise alone, and is charged.
    """

    rate: float
    fixed = False

    def __post_init__(self) -> None:
        check(self, "rate", self.rate, 0 < self.rate <= 1, "above 0 and at most 1")

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return "add-remove"

    def expected(self, population: int) -> float:
        """q·n, whoever came."""
        return self.rate * population

    def draw(self, population: int, rng: np.random.Generator) -> np.ndarray:
        """One coin for each client."""
        return np.flatnonzero(rng.random(population) < self.rate)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Poisson subsampling."""
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.PoissonSampled(self.rate, event)
        return event


@dataclass(frozen=True)
class FixedSize:
    """S_k: `clients` drawn uniformly without replacement.  Amplifies under replace-one."""

    clients: int
    fixed = True

    def __post_init__(self) -> None:
        count(self, "clients", self.clients)

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one."""
        return "replace-one"

    def expected(self, population: int) -> float:
        """The fixed size."""
        if self.clients > population:
            raise UserError(
                f"FixedSize asks for {self.clients} clients a round, but there are only "
                f"{population}; ask for at most {population}."
            )
        return float(self.clients)

    def draw(self, population: int, rng: np.random.Generator) -> np.ndarray:
        """A uniform subset."""
        size = int(self.expected(population))
        return np.sort(rng.choice(population, size=size, replace=False))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Subsampling without replacement."""
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.SampledWithoutReplacement(self.clients, population, event)
        return event
