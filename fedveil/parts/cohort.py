"""cohort: who takes part in a round, and how hidden participation amplifies privacy.

`cap` is how often a unit takes part at most in a whole run. `honest` is how many honest clients are
sure to arrive in a round whose noise the clients bring: with fewer the round is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedveil.errors import UserError
from fedveil.parts.checks import check, count
from fedveil.privacy import events
from fedveil.privacy.norms import Adjacency

Taken = np.ndarray | None  # how often each unit has taken part, where that matters


class Cohort(Protocol):
    """Draws a round's cohort and states what drawing it is worth."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours under which `amplify` is a theorem."""

    @property
    def fixed(self) -> bool:
        """Whether the number of participants is the same in every round."""

    @property
    def cap(self) -> int | None:
        """How often a unit takes part at most; None for no limit."""

    @property
    def honest(self) -> int | None:
        """How many honest clients are sure to arrive; None for what the cohort itself promises."""

    def expected(self, population: int) -> float:
        """The public denominator: how many take part on average."""

    def sure(self, population: int) -> int:
        """How many honest clients' noise a released sum holds at least."""

    def draw(self, population: int, rng: np.random.Generator, taken: Taken = None) -> np.ndarray:
        """Indexes of the participants, ascending."""

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """The event as seen by one who does not know who took part."""


@dataclass(frozen=True)
class Everyone:
    """S_k = {1..n}.  No amplification."""

    honest: int | None = None
    fixed = True
    cap = None

    def __post_init__(self) -> None:
        _check_honest(self, self.honest)

    @property
    def adjacency(self) -> Adjacency:
        """Zero-out: how many there are is public, so a unit is blanked out, not removed."""
        return "zero-out"

    def expected(self, population: int) -> float:
        """n."""
        return float(population)

    def sure(self, population: int) -> int:
        """All, unless fewer are trusted."""
        return _at_most(self, self.honest or population, population)

    def draw(self, population: int, rng: np.random.Generator, taken: Taken = None) -> np.ndarray:
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
    cap: int | None = None
    honest: int | None = None
    fixed = False

    def __post_init__(self) -> None:
        check(self, "rate", self.rate, 0 < self.rate <= 1, "above 0 and at most 1")
        _check_cap(self, self.cap)
        _check_honest(self, self.honest)

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return "add-remove"

    def expected(self, population: int) -> float:
        """q·n, whoever came."""
        return self.rate * population

    def sure(self, population: int) -> int:
        """None but the unit itself, unless rounds with fewer are rejected."""
        return _at_most(self, self.honest or 1, population)

    def draw(self, population: int, rng: np.random.Generator, taken: Taken = None) -> np.ndarray:
        """One coin for each unit; it does not count for one that has taken part often enough."""
        comes = rng.random(population) < self.rate
        return np.flatnonzero(comes & _may(population, self.cap, taken))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Poisson subsampling; a cap looks at the unit's own past coins only."""
        if isinstance(event, events.Proven):
            return events.Proven(tuple(self.amplify(way, population) for way in event.ways))
        if isinstance(event, events.Dominated):
            return _sampled(event, self.amplify(event.by, population), self.rate)
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.PoissonSampled(self.rate, event)
        return event


@dataclass(frozen=True)
class FixedSize:
    """S_k: `clients` drawn uniformly without replacement.  Amplifies under replace-one.

    Of those who may take part, if there is a cap; there can be fewer than `clients` of them.
    """

    clients: int
    cap: int | None = None
    honest: int | None = None
    fixed = True

    def __post_init__(self) -> None:
        count(self, "clients", self.clients)
        _check_cap(self, self.cap)
        _check_honest(self, self.honest)
        if self.honest is not None:
            enough = self.honest <= self.clients
            check(self, "honest", self.honest, enough, f"at most clients = {self.clients}")

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one."""
        return "replace-one"

    def expected(self, population: int) -> float:
        """The fixed size."""
        return float(_at_most(self, self.clients, population))

    def sure(self, population: int) -> int:
        """All of the cohort, unless fewer are trusted."""
        return self.honest or self.clients

    def draw(self, population: int, rng: np.random.Generator, taken: Taken = None) -> np.ndarray:
        """A uniform subset."""
        may = np.flatnonzero(_may(population, self.cap, taken))
        size = min(int(self.expected(population)), len(may))
        return np.sort(rng.choice(may, size=size, replace=False))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Subsampling without replacement; a cap makes draws depend on earlier ones and ends it."""
        if isinstance(event, events.Proven):
            return events.Proven(tuple(self.amplify(way, population) for way in event.ways))
        if self.cap is not None:
            return event
        if isinstance(event, events.Dominated):
            return _sampled(event, self.amplify(event.by, population), self.clients / population)
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.SampledWithoutReplacement(self.clients, population, event)
        return event


def _sampled(event: events.Dominated, by: events.Round, rate: float) -> events.Round:
    """A sampled pair dominates the sampled release, and escapes only where the unit is drawn."""
    if isinstance(by, events.PoissonSampled | events.SampledWithoutReplacement):
        return replace(event, by=by, escape=rate * event.escape)
    return event


def _may(population: int, cap: int | None, taken: Taken) -> np.ndarray:
    """Who has not taken part `cap` times yet."""
    if cap is None or taken is None:
        return np.ones(population, dtype=bool)
    return taken < cap


def _check_cap(cohort: object, cap: int | None) -> None:
    if cap is not None:
        count(cohort, "cap", cap)


def _check_honest(cohort: object, honest: int | None) -> None:
    if honest is not None:
        count(cohort, "honest", honest)


def _at_most(cohort: object, clients: int, population: int) -> int:
    if clients > population:
        raise UserError(
            f"{type(cohort).__name__} asks for {clients} clients a round, but there are only "
            f"{population}; ask for at most {population}."
        )
    return clients
