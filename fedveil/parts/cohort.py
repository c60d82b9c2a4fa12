"""cohort: who takes part in a round, and how hidden participation amplifies privacy.

`cap` is the maximum participations of a unit in a run. `honest` is the least number of honest
clients that arrive in a round with noise at the clients. With fewer, the round is aborted.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from fedveil.accounting import events
from fedveil.accounting.norms import Adjacency
from fedveil.errors import UserError
from fedveil.parts.checks import check, count, share
from fedveil.parts.part import Begin, Part, Tensors

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

NOT_YET = (3e-7, 1e-8, 1e-10, 1e-13)  # probabilities of not reaching a cap that are set aside


class Participants(NamedTuple):
    """The number of participants of a round, averaged over a run."""

    mean: float
    exact: bool  # whether it is the expected number; otherwise an upper bound on it


class Cohort(Part, ABC):
    """Draws the cohort of a round, and accounts for its amplification."""

    claims: ClassVar = (
        "describe", "amplify", "adjacency", "fixed", "min_honest", "until_cap", "independent",
        "coin", "participants", "with_size", "with_population", "spaced", "separation", "cyclic",
    )  # fmt: skip

    adjacency: Adjacency = "zero-out"  # for which `amplify` is proved
    fixed: bool = False  # whether the number of participants is the same in every round
    cap: int | None = None  # maximum participations of a unit; None for no limit
    honest: int | None = None  # least number of honest clients; None: see `min_honest`
    independent: bool = False  # whether units are drawn independently of each other
    spaced: bool = False  # whether it keeps `separation`, which correlated noise relies on
    separation: int | None = None  # least number of rounds between two participations of a unit
    cyclic: bool = False  # whether units take turns, so that coins amplify banded noise

    @abstractmethod
    def expected(self, population: int) -> float:
        """The public denominator: the expected number of participants while none is at the cap."""

    @abstractmethod
    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """Indexes of the participants, ascending; with a cap, `state` counts participations."""

    def min_honest(self, population: int) -> int:
        """The least number of honest clients whose noise is in a released sum: the unit's own."""
        return self.honest or 1

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """The event in a view that hides who took part. [default: not amplified]

        It is that of a single round, over coins that `draw` takes from its stream, whatever the
        state and the earlier rounds. It then holds for a round that is drawn again, too.
        """
        return event

    def coin(self, population: int) -> float | None:
        """A unit's probability of being drawn, if rounds are independent; else None."""
        return None

    def participants(self, population: int, rounds: int) -> Participants:
        """min(expected, n·cap/K): units that have reached the cap stay away. [default: a bound]"""
        expected = self.expected(population)
        if self.cap is None or self.cap >= rounds:
            return Participants(expected, exact=True)
        return Participants(min(expected, population * self.cap / rounds), exact=False)

    def initial_state(self, begin: Begin) -> Tensors:
        """The participations of each unit, if there is a cap."""
        if self.cap is None:
            return {}
        return {"taken": torch.zeros(begin.population, dtype=torch.int64)}

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        """The state after a draw: one more participation for each drawn unit."""
        if "taken" not in state:
            return state
        taken = state["taken"].clone()
        taken[torch.from_numpy(drawn)] += 1
        return {**state, "taken": taken}

    def describe(self, unit: str, population: int) -> str:
        """How units are sampled, for the statement; `population` is 0 if unknown."""
        expected = self.expected(population or 1)
        often = f"{expected:g} times the number of {unit}s on average"
        if population:
            often = f"{expected:g} of {population:,} {unit}s on average"
        until = "" if self.cap is None else f" until {unit}s reach the cap"
        return (
            f"{self!r}: {often} per round{until}{self._capped()}, according to the cohort itself."
        )

    def _capped(self) -> str:
        return "" if self.cap is None else f", at most {self.cap} times per run"

    def until_cap(self, hidden: events.Composed, cap: int) -> tuple[events.Composed, ...]:
        """Shorter compositions of sampled rounds that a cap allows. [default: none]

        `cap` is the cohort's own, plus the rounds that were lost in a crash and drawn again.
        User-defined cohorts are not asked.
        """
        return ()

    def planned(self, population: int) -> Cohort:
        """This cohort with everything fixed that follows from the number of units."""
        return self

    def found_as(self, saved: Cohort) -> Cohort:
        """This cohort with what `planned` fixed in a saved one."""
        return self

    def with_size(self, size: float, population: int) -> Cohort | None:
        """The same kind of cohort with another expected size; None if unknown."""
        return None

    def with_population(self, factor: float) -> Cohort | None:
        """The same share of a population that is `factor` times as large; None if unknown."""
        return None

    def with_honest(self, honest: int) -> Cohort:
        """The same cohort, of whom at least this many add their noise."""
        raise UserError(
            f"Cohort {type(self).__name__} does not define `with_honest`. Give `honest` itself."
        )

    def misfit(self, recipe: Recipe) -> str | None:
        """With noise at the server, an aborted round would show how many clients arrived."""
        if self.honest is None or recipe.noise.at == "client":
            return None
        return (
            f"cohort {type(self).__name__} with honest and noise {type(recipe.noise).__name__} at "
            "the server do not fit: an aborted round would show how many clients arrived. Use "
            "noise at the clients, or remove honest."
        )


@dataclass(frozen=True)
class Everyone(Cohort):
    """S_k = {1..n}.  No amplification."""

    honest: int | None = None
    adjacency = "zero-out"  # the number of units is public, so a unit is zeroed out, not removed
    fixed = True
    cap = None
    independent = True
    spaced = True
    separation = 1

    def __post_init__(self) -> None:
        _check_honest(self, self.honest)

    def expected(self, population: int) -> float:
        """n."""
        return float(population)

    def min_honest(self, population: int) -> int:
        """All units, unless fewer are trusted."""
        return _at_most(self, self.honest or population, population)

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """All units."""
        return np.arange(population)

    def describe(self, unit: str, population: int) -> str:
        """All units."""
        return f"Every {unit} takes part in every round."

    def with_population(self, factor: float) -> Everyone:
        """Everyone, with the same share of honest clients."""
        return Everyone(None if self.honest is None else whole_size(self.honest * factor))

    def with_honest(self, honest: int) -> Everyone:
        """Everyone, of whom fewer are trusted."""
        return Everyone(honest)


@dataclass(frozen=True)
class Poisson(Cohort):
    """i ∈ S_k independently with probability rate.  Amplifies under add-remove adjacency.

    A cohort may be empty. Its round then releases noise only, and is charged.
    """

    rate: float
    cap: int | None = None
    honest: int | None = None
    adjacency = "add-remove"
    fixed = False
    independent = True

    def __post_init__(self) -> None:
        share(self, "rate", self.rate)
        check_cap(self, self.cap)
        _check_honest(self, self.honest)

    def expected(self, population: int) -> float:
        """q·n, whoever arrives."""
        return self.rate * population

    def min_honest(self, population: int) -> int:
        """Only the unit itself, unless rounds with fewer than `honest` are aborted."""
        return _at_most(self, self.honest or 1, population)

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """One coin per unit. A unit that has reached the cap is not drawn."""
        comes = rng.random(population) < self.rate
        return np.flatnonzero(comes & below_cap(population, self.cap, state))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Poisson subsampling. A cap depends only on the unit's own past coins."""
        if isinstance(event, events.Proven):
            return events.Proven(tuple(self.amplify(way, population) for way in event.ways))
        if isinstance(event, events.Dominated):
            return _sampled(event, self.amplify(event.by, population), self.rate)
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.PoissonSampled(self.rate, event)
        return event

    def coin(self, population: int) -> float:
        """The rate. A cap depends only on the unit's own past coins."""
        return self.rate

    def participants(self, population: int, rounds: int) -> Participants:
        """n·E[min(B, cap)]/K, B ~ Bin(K, rate), where E[min(B, cap)] = Σ_{j < cap} P(B > j)."""
        from scipy.special import bdtrc

        if self.cap is None or self.cap >= rounds:
            return Participants(self.expected(population), exact=True)
        rounds_of_unit = float(bdtrc(np.arange(self.cap), rounds, self.rate).sum())
        return Participants(population * rounds_of_unit / rounds, exact=True)

    def until_cap(self, hidden: events.Composed, cap: int) -> tuple[events.Composed, ...]:
        """The sampled rounds after which a unit has reached its cap with high probability.

        It takes part in no later round, except with the probability that is set aside.
        """
        event = hidden.event
        if not isinstance(event, events.PoissonSampled):
            return ()
        found = ((chance, rounds_until(event.rate, cap, chance)) for chance in NOT_YET)
        return tuple(
            events.Composed(events.Dominated(event, distance=chance / rounds), rounds, hidden.first)
            for chance, rounds in found
            if rounds < hidden.count
        )

    def describe(self, unit: str, population: int) -> str:
        """The rate and the cap."""
        often = f"takes part in a round with probability {self.rate:g}"
        return f"Poisson: each {unit} {often}{self._capped()}."

    def with_size(self, size: float, population: int) -> Poisson:
        """Another rate."""
        return replace(self, rate=min(size / population, 1.0))

    def with_honest(self, honest: int) -> Poisson:
        """The same rate; rounds with fewer are aborted."""
        return replace(self, honest=honest)

    def with_population(self, factor: float) -> Poisson:
        """The same rate."""
        return replace(self, honest=self.honest and whole_size(self.honest * factor))


@dataclass(frozen=True)
class FixedSize(Cohort):
    """S_k: `clients` drawn uniformly without replacement.  Amplifies under replace-one.

    With a cap, they are drawn from the units below it, which can be fewer than `clients`.
    """

    clients: int
    cap: int | None = None
    honest: int | None = None
    adjacency = "replace-one"
    fixed = True

    def __post_init__(self) -> None:
        count(self, "clients", self.clients)
        check_cap(self, self.cap)
        _check_honest(self, self.honest)
        if self.honest is not None:
            enough = self.honest <= self.clients
            check(self, "honest", self.honest, enough, f"at most clients = {self.clients}")

    def expected(self, population: int) -> float:
        """The fixed size."""
        return float(_at_most(self, self.clients, population))

    def min_honest(self, population: int) -> int:
        """All of the cohort, unless fewer are trusted."""
        return self.honest or self.clients

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        """A uniform subset."""
        may = np.flatnonzero(below_cap(population, self.cap, state))
        size = min(int(self.expected(population)), len(may))
        return np.sort(rng.choice(may, size=size, replace=False))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Subsampling without replacement. With a cap, draws depend on each other: none."""
        if isinstance(event, events.Proven):
            return events.Proven(tuple(self.amplify(way, population) for way in event.ways))
        if self.cap is not None:
            return event
        if isinstance(event, events.Dominated):
            return _sampled(event, self.amplify(event.by, population), self.clients / population)
        if isinstance(event, events.GaussianRelease | events.ApproximateRelease):
            return events.SampledWithoutReplacement(self.clients, population, event)
        return event

    def coin(self, population: int) -> float | None:
        """The share that is drawn; None with a cap, where it depends on the other units' coins."""
        return None if self.cap is not None else self.expected(population) / population

    def describe(self, unit: str, population: int) -> str:
        """The size and the cap."""
        size = str(self.clients) if self.cap is None else f"up to {self.clients}"
        drawn = f"{size} {unit}s per round, drawn without replacement"
        return f"Fixed size: {drawn}{self._capped()}."

    def with_size(self, size: float, population: int) -> FixedSize:
        """Another size, in whole clients."""
        return replace(self, clients=whole_size(size))

    def with_honest(self, honest: int) -> FixedSize:
        """The same size, of whom fewer are trusted."""
        return replace(self, honest=honest)

    def with_population(self, factor: float) -> FixedSize:
        """The same share of the population."""
        honest = self.honest and whole_size(self.honest * factor)
        return replace(self, clients=whole_size(self.clients * factor), honest=honest)


def _sampled(event: events.Dominated, by: events.Round, rate: float) -> events.Round:
    """A sampled pair dominates the sampled release, and escapes only if the unit is drawn."""
    if isinstance(by, events.PoissonSampled | events.SampledWithoutReplacement):
        return replace(event, by=by, escape=rate * event.escape)
    return event


def contradiction(cohort: Cohort, event: events.Round, population: int) -> str | None:
    """Why the theorem of a sampled event does not fit what the cohort says of its draws, if so."""
    expected = cohort.expected(population) * (1 - 1e-9)
    if isinstance(event, events.PoissonSampled):
        if not cohort.independent:
            return (
                "amplifies as PoissonSampled, which is proven for units that are drawn "
                "independently of each other. If they are, set independent = True."
            )
        drawn = event.rate * population
    elif isinstance(event, events.SampledWithoutReplacement):
        if cohort.cap is not None or event.population != population:
            return (
                "amplifies as SampledWithoutReplacement, which is proven for uniform draws from "
                f"all units, but it has cap = {cohort.cap} and draws from {event.population} of "
                f"{population}. Do not amplify."
            )
        drawn = event.cohort
    elif isinstance(event, events.CyclicSampled):
        drawn = event.rate * population / event.event.separation
    else:
        return None
    if drawn >= expected:
        return None
    return (
        f"amplifies as if {drawn:g} of {population} units were drawn, but expects "
        f"{cohort.expected(population):g}. Correct the rate in `amplify`, or `expected`."
    )


def below_cap(population: int, cap: int | None, state: Tensors | None) -> np.ndarray:
    """The units that are below their cap."""
    if cap is None or not state:
        return np.ones(population, dtype=bool)
    return state["taken"].numpy() < cap


def whole_size(number: float) -> int:
    """A whole number of clients, at least 1."""
    return max(1, round(number))


@functools.lru_cache(maxsize=256)
def rounds_until(rate: float, cap: int, chance: float) -> int:
    """The least number of rounds with P(Bin(rounds, rate) < cap) ≤ chance.

    >>> rounds_until(0.5, 1, 0.001), rounds_until(0.1, 5, 1e-9)
    (10, 301)
    """
    from scipy.special import bdtr

    low, high = 0, cap
    while bdtr(cap - 1, high, rate) * (1 + 1e-6) > chance:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = bdtr(cap - 1, middle, rate) * (1 + 1e-6) <= chance
        low, high = (low, middle) if enough else (middle, high)
    return high


def check_cap(cohort: object, cap: int | None) -> None:
    """None, or a whole number, at least 1."""
    if cap is not None:
        count(cohort, "cap", cap)


def _check_honest(cohort: object, honest: int | None) -> None:
    if honest is not None:
        count(cohort, "honest", honest)


def _at_most(cohort: object, clients: int, population: int) -> int:
    if clients > population:
        raise UserError(
            f"{type(cohort).__name__} needs {clients} clients per round, but there are only "
            f"{population}. Use at most {population}."
        )
    return clients
