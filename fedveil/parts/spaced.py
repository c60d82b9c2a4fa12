"""Cohorts that keep the participations of a unit apart, for noise correlated over the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.accounting import events
from fedveil.errors import UserError
from fedveil.parts.checks import check, count, share
from fedveil.parts.cohort import Cohort, below_cap, check_cap, whole_size
from fedveil.parts.part import Begin, Tensors

if TYPE_CHECKING:
    from fedveil.recipe import Recipe


class _Spaced(Cohort):
    """Keeps participations apart. The accounting of lost rounds is that of correlated noise."""

    spaced = True

    def misfit(self, recipe: Recipe) -> str | None:
        """Only correlated noise accounts for lost rounds of such a cohort."""
        if recipe.noise.correlated or not recipe.private:
            return super().misfit(recipe)
        return (
            f"cohort {type(self).__name__} and noise {type(recipe.noise).__name__} do not fit: "
            "only correlated noise gains from participations that are apart. Use FixedSize or "
            "Poisson, or BandedNoise."
        )


@dataclass(frozen=True)
class Separated(_Spaced):
    """S_k: `clients` drawn uniformly from the units that were not drawn in separation − 1 rounds.

    At most `cap` times each. For correlated noise, which needs no secret sampling: who takes part
    may be known. The separation is ⌊n/clients⌋ by default, the largest that leaves enough units.
    """

    clients: int
    separation: int | None = None
    cap: int | None = None
    fixed = True

    def __post_init__(self) -> None:
        count(self, "clients", self.clients)
        if self.separation is not None:
            count(self, "separation", self.separation)
        check_cap(self, self.cap)

    def planned(self, population: int) -> Separated:
        """With the largest separation, unless one is given."""
        if self.separation is not None:
            return self
        return replace(self, separation=max(population // self.clients, 1))

    def found_as(self, saved: Cohort) -> Separated:
        """With the separation of a saved cohort, unless one is given."""
        return replace(self, separation=self.separation or saved.separation)

    def expected(self, population: int) -> float:
        """The fixed size."""
        apart = self.separation or 1
        if self.clients * apart > population:
            raise UserError(
                f"Separated needs {self.clients} clients in each of {apart} rounds, but there are "
                f"only {population}. Use a separation of at most {population // self.clients}, or "
                "fewer clients."
            )
        return float(self.clients)

    def initial_state(self, begin: Begin) -> Tensors:
        """The round, the last participation of each unit, and with a cap their number."""
        never = torch.full((begin.population,), -(2**62), dtype=torch.int64)
        return {**super().initial_state(begin), "last": never, "round": torch.tensor(0)}

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """A uniform subset of the units that may take part, all of them if they are fewer."""
        may = below_cap(population, self.cap, state)
        if state:
            rested = state["round"] - state["last"] >= (self.separation or 1)
            may = may & rested.numpy()
        found = np.flatnonzero(may)
        size = min(int(self.expected(population)), len(found))
        return np.sort(rng.choice(found, size=size, replace=False))

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        """One round later, with the drawn units' last participation."""
        last = state["last"].clone()
        last[torch.from_numpy(drawn)] = state["round"]
        return {**super().step(state, drawn), "last": last, "round": state["round"] + 1}

    def describe(self, unit: str, population: int) -> str:
        """The size, the separation and the cap."""
        apart = f"at least {self.separation} rounds apart"
        size = str(self.clients) if self.cap is None else f"up to {self.clients}"
        return (
            f"Separated: {size} {unit}s per round, each {apart}{self._capped()}. Who takes "
            "part need not be secret."
        )

    def with_size(self, size: float, population: int) -> Separated:
        """Another size, in whole clients, as far apart as possible."""
        return replace(self, clients=whole_size(size), separation=None).planned(population)

    def with_population(self, factor: float) -> Separated:
        """The same share of the population, rounded down so that all stay as far apart."""
        return replace(self, clients=max(math.floor(self.clients * factor * (1 + 1e-9)), 1))


@dataclass(frozen=True)
class CyclicPoisson(_Spaced):
    """In round k, each unit i ≡ k modulo separation takes part with probability rate·separation.

    Amplifies banded noise with at most `separation` bands.  Choquette-Choo et al. 2023, Alg. 2.
    """

    rate: float
    separation: int
    cyclic = True

    def __post_init__(self) -> None:
        share(self, "rate", self.rate)
        count(self, "separation", self.separation)
        most = math.floor(1 / self.rate * (1 + 1e-9))
        enough = self.separation <= most
        check(self, "separation", self.separation, enough, f"at most 1/rate, so {most} or fewer")

    @property
    def turn(self) -> float:
        """The probability that a unit takes part when it is its turn."""
        return min(self.rate * self.separation, 1.0)

    def expected(self, population: int) -> float:
        """q·n, whoever arrives."""
        return self.rate * population

    def initial_state(self, begin: Begin) -> Tensors:
        """The round."""
        return {"round": torch.tensor(0)}

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """One coin per unit. Those count whose turn it is."""
        comes = rng.random(population) < self.turn
        now = int(state["round"]) % self.separation if state else 0
        return np.flatnonzero(comes & (np.arange(population) % self.separation == now))

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        """One round later."""
        return {"round": state["round"] + 1}

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """One sampled release per cycle, for noise with at most as many bands as rounds in it."""
        if not isinstance(event, events.Correlated) or event.separation != self.separation:
            return event
        bands = event.column.bands
        fits = bands is not None and bands <= self.separation
        return events.CyclicSampled(self.turn, event) if fits else event

    def describe(self, unit: str, population: int) -> str:
        """The turns and their probability."""
        return (
            f"Cyclic Poisson: each {unit} has a turn every {self.separation} rounds, and takes "
            f"part in it with probability {self.turn:g}."
        )

    def with_size(self, size: float, population: int) -> CyclicPoisson:
        """Another rate."""
        return replace(self, rate=min(size / population, 1 / self.separation))

    def with_population(self, factor: float) -> CyclicPoisson:
        """The same rate."""
        return self
