"""Privacy events as frozen values; `accountant` accounts for them.

An event describes one pair of neighbours under one adjacency, so it already contains the
sensitivity. Events are light: nothing here imports an accountant. Users' parts make events, too, so
each one checks its numbers: what is not a number must not pass for a small loss.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import index
from typing import get_args

from fedveil.accounting.correlation import Column, energy, largest_row
from fedveil.accounting.norms import Adjacency
from fedveil.errors import UserError

ORDERS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0,
          3.3, 3.6, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0,
          18.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0, 48.0, 56.0, 64.0, 80.0, 100.0, 128.0, 192.0,
          256.0, 512.0, 1024.0)  # fmt: skip

FINITE = sys.float_info.max
MOST_COUNT = 10**18  # of rounds or units
MOST_RATIO = 1e6  # more noise counts as this much, which only makes a loss larger
LEAST_RATE = 1e-100  # a smaller rate above 0 counts as this one, for the same reason


def _numbers(event: object, most: float, *names: str) -> None:
    """Make fields plain numbers, from 0 to `most`."""
    wanted = "a finite number of at least 0" if most == FINITE else f"from 0 to {most:g}"
    for name in names:
        value = float(getattr(event, name))
        _require(event, name, value, 0 <= value <= most, wanted)
        object.__setattr__(event, name, value)


def _counts(event: object, least: int, *names: str) -> None:
    """Make fields whole numbers, from `least` to MOST_COUNT."""
    for name in names:
        value = index(getattr(event, name))
        fits = least <= value <= MOST_COUNT
        _require(event, name, value, fits, f"a whole number from {least} to {MOST_COUNT:.0e}")
        object.__setattr__(event, name, value)


def _known(event: object, name: str, found: Iterable[object], *kinds: type) -> None:
    """Require values of exactly these classes: a subclass could account for itself."""
    for one in found:
        _require(event, name, one, type(one) in kinds, " or ".join(k.__name__ for k in kinds))


def _require(event: object, name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise UserError(f"{type(event).__name__}: {name} is {value!r}. It must be {wanted}.")


@dataclass(frozen=True)
class NonPrivate:
    """A release without any guarantee, and the reason: ε = ∞."""

    reason: str


@dataclass(frozen=True)
class GaussianRelease:
    """N(f, σ²I) with σ = ratio · sensitivity, under the event's own adjacency."""

    ratio: float

    def __post_init__(self) -> None:
        _numbers(self, FINITE, "ratio")
        object.__setattr__(self, "ratio", min(self.ratio, MOST_RATIO))


@dataclass(frozen=True)
class ApproximateRelease:
    """A release proven to be (ε, δ)-DP; nothing else about it is used."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        _numbers(self, FINITE, "epsilon")
        _numbers(self, 1.0, "delta")


@dataclass(frozen=True)
class RenyiRelease:
    """D_α(P′‖Q′) ≤ divergences at ORDERS, for distributions P′, Q′ near the release's own P, Q.

    P is within `escape` of P′ and Q = Q′; then both are within `distance` of the actual
    distributions, in total variation.
    """

    divergences: tuple[float, ...]
    escape: float = 0.0
    distance: float = 0.0

    def __post_init__(self) -> None:
        found = tuple(map(float, self.divergences))
        fits = len(found) == len(ORDERS) and all(one >= 0 for one in found)
        _require(self, "divergences", found, fits, f"{len(ORDERS)} numbers of at least 0")
        object.__setattr__(self, "divergences", found)
        _numbers(self, FINITE, "escape", "distance")


@dataclass(frozen=True)
class PoissonSampled:
    """The event on a cohort to which each unit belongs independently with probability rate.

    The unit's presence is hidden from the observer. Adjacency: add/remove.
    """

    rate: float
    event: GaussianRelease | ApproximateRelease

    def __post_init__(self) -> None:
        _numbers(self, 1.0, "rate")
        object.__setattr__(self, "rate", max(self.rate, LEAST_RATE) if self.rate else 0.0)
        _known(self, "event", [self.event], GaussianRelease, ApproximateRelease)


@dataclass(frozen=True)
class SampledWithoutReplacement:
    """The event on a uniformly drawn cohort of fixed size. Adjacency: replace-one."""

    cohort: int
    population: int
    event: GaussianRelease | ApproximateRelease

    def __post_init__(self) -> None:
        _counts(self, 1, "cohort")
        _counts(self, self.cohort, "population")
        _known(self, "event", [self.event], GaussianRelease, ApproximateRelease)


@dataclass(frozen=True)
class Dominated:
    """A release that the event `by` dominates, up to the probabilities `escape` and `distance`.

    With probability `escape` an output of either distribution is impossible under the other, and
    both are within `distance` of the actual ones, in total variation.
    """

    by: GaussianRelease | PoissonSampled | SampledWithoutReplacement
    escape: float = 0.0
    distance: float = 0.0

    def __post_init__(self) -> None:
        _known(self, "by", [self.by], GaussianRelease, PoissonSampled, SampledWithoutReplacement)
        _numbers(self, FINITE, "escape", "distance")


@dataclass(frozen=True)
class Correlated:
    """One round of N(f, σ²(CᵀC)⁻¹) over a run, with σ = ratio · sensitivity of one message.

    The first n rounds together are one Gaussian release, for a unit that takes part at most `most`
    times, at least `separation` rounds apart. `first` is the round at which a noise stream took
    over, `lost` the number of rounds that were drawn again, and `drift` how far rounding can move
    a release, over the sensitivity.
    """

    ratio: float
    column: Column
    separation: int = 1
    most: int | None = None
    drift: float = 0.0
    first: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        _numbers(self, FINITE, "ratio", "drift")
        _known(self, "column", [self.column], Column)
        _counts(self, 1, "separation", *(["most"] if self.most is not None else []))
        _counts(self, 0, "first", "lost")

    def whole(self, rounds: int) -> GaussianRelease:
        """The release of this many rounds: ‖Σ_j C[:, jb]‖₂ of the leading submatrix.

        A lost round is a release of its own, which one unit moves by at most a row of C.
        """
        limits = self.separation, self.most
        lost = min(self.lost, rounds)
        kept = self.first + rounds - lost
        squares = energy(self.column, kept, *limits, self.first) if rounds > lost else 0.0
        if lost:
            squares += lost * largest_row(self.column, self.first + rounds, *limits) ** 2
        return GaussianRelease(self.ratio / (math.sqrt(squares) + self.drift * math.sqrt(rounds)))


@dataclass(frozen=True)
class CyclicSampled:
    """A correlated release whose units take turns, each in its turn with probability rate.

    A unit's turns are `separation` rounds apart, and C has at most as many bands. The unit's
    presence is hidden from the observer. After lost rounds, sampling does not count.
    """

    rate: float
    event: Correlated

    def __post_init__(self) -> None:
        _numbers(self, 1.0, "rate")
        _known(self, "event", [self.event], Correlated)
        bands, turns = self.event.column.bands, self.event.separation
        fits = bands is not None and bands <= turns
        _require(self, "event", self.event, fits, f"noise with at most separation = {turns} bands")

    def whole(self, rounds: int) -> Composed:
        """⌈rounds/separation⌉ sampled Gaussian releases.  Choquette-Choo et al. 2023, Thm. 4."""
        if self.event.first or self.event.lost:
            return Composed(self.event.whole(rounds), 1)
        cycle = self.event.whole(self.event.separation)
        turns = -(-rounds // self.event.separation)
        return Composed(PoissonSampled(self.rate, cycle), turns)


@dataclass(frozen=True)
class Proven:
    """One release with several proofs; the best one over all rounds counts."""

    ways: tuple[Round, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", tuple(self.ways))
        _known(self, "ways", self.ways, *OF_ONE_ROUND)


@dataclass(frozen=True)
class InSilos:
    """One round in which every silo makes `times` releases of its own records.

    A record is in one silo, so the largest loss of a silo counts.
    """

    silos: tuple[Round, ...]  # one release of each silo, or of one if all are alike
    times: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "silos", tuple(self.silos))
        _known(self, "silos", self.silos, Proven, *OF_ONE_ROUND)
        _counts(self, 1, "times")


Release = (
    NonPrivate
    | GaussianRelease
    | ApproximateRelease
    | RenyiRelease
    | Dominated
    | Proven
    | Correlated
    | InSilos
)
Round = Release | PoissonSampled | SampledWithoutReplacement | CyclicSampled
OF_ONE_ROUND = (
    NonPrivate,
    GaussianRelease,
    ApproximateRelease,
    RenyiRelease,
    Dominated,
    PoissonSampled,
    SampledWithoutReplacement,
)  # events whose rounds compose one by one


@dataclass(frozen=True)
class Composed:
    """The same event, `count` times; each round may depend on the earlier ones.

    `first` is another release before them, on which all rounds may depend.
    """

    event: Round
    count: int
    first: Dominated | None = None

    def __post_init__(self) -> None:
        _known(self, "event", [self.event], *get_args(Round))
        _counts(self, 0, "count")


@dataclass(frozen=True)
class ParticipationMixture:
    """In each of `rounds` rounds the release with probability `rate`, otherwise nothing.

    The coins are observed but do not depend on anyone's data; at most `most` of them come up.
    """

    event: Round
    rate: float
    rounds: int
    most: int

    def __post_init__(self) -> None:
        _known(self, "event", [self.event], *get_args(Round))
        _numbers(self, 1.0, "rate")
        _counts(self, 0, "rounds", "most")


@dataclass(frozen=True)
class Either:
    """One run with several proofs: the best one counts."""

    ways: tuple[Composed, ...]


Spent = Composed | ParticipationMixture | Either

PROVEN_FOR: dict[type, Adjacency] = {
    PoissonSampled: "add-remove",
    SampledWithoutReplacement: "replace-one",
    CyclicSampled: "zero-out",
}  # the adjacency of the theorem on sampling


def sampled_in(event: Round) -> Iterator[Round]:
    """The sampled events that an event consists of."""
    inner: Iterable[Round] = ()
    if isinstance(event, Dominated):
        inner = (event.by,)
    elif isinstance(event, Proven):
        inner = event.ways
    elif type(event) in PROVEN_FOR:
        yield event
    for one in inner:
        yield from sampled_in(one)


def alike(one: object, other: object) -> bool:
    """Whether two events are equal up to rounding errors.

    >>> alike(GaussianRelease(0.3), GaussianRelease(0.1 + 0.2)), alike(1.0, 1.1)
    (True, False)
    """
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if not is_dataclass(one):
        return one == other
    return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
