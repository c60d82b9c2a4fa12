"""What happened, as frozen values; how it is counted is `accounting`'s business.

An event speaks of one pair of neighbours under one adjacency, so it already contains the
sensitivity. Events are light: nothing here imports an accountant.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0,
          3.3, 3.6, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0,
          18.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0, 48.0, 56.0, 64.0, 80.0, 100.0, 128.0, 192.0,
          256.0, 512.0, 1024.0)  # fmt: skip


@dataclass(frozen=True)
class NonPrivate:
    """A release without any guarantee, and why: ε = ∞."""

    reason: str


@dataclass(frozen=True)
class GaussianRelease:
    """N(f, σ²I) with σ = ratio · sensitivity, the sensitivity of the event's own adjacency."""

    ratio: float


@dataclass(frozen=True)
class ApproximateRelease:
    """A release proven to be (ε, δ)-DP, of which nothing else is used."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class RenyiRelease:
    """D_α(P′‖Q′) ≤ divergences at ORDERS, for laws P′, Q′ near the release's own P, Q.

    P is within `escape` of P′ and Q = Q′; then both are within `distance` of the real laws, in
    total variation.
    """

    divergences: tuple[float, ...]
    escape: float = 0.0
    distance: float = 0.0


@dataclass(frozen=True)
class PoissonSampled:
    """The event on a cohort to which each unit belongs independently with probability rate.

    The unit's presence is hidden from the observer; add-remove adjacency.
    """

    rate: float
    event: GaussianRelease | ApproximateRelease


@dataclass(frozen=True)
class SampledWithoutReplacement:
    """The event on a uniformly drawn cohort of fixed size; replace-one adjacency."""

    cohort: int
    population: int
    event: GaussianRelease | ApproximateRelease


@dataclass(frozen=True)
class Dominated:
    """A release that distinguishes neighbours no better than the event `by`, but for two chances.

    With chance `escape` an output of either law is impossible under the other, and both laws are
    within `distance` of the real ones, in total variation.
    """

    by: GaussianRelease | PoissonSampled | SampledWithoutReplacement
    escape: float = 0.0
    distance: float = 0.0


@dataclass(frozen=True)
class Proven:
    """One release with several proofs; over all rounds the best of them counts."""

    ways: tuple[Round, ...]


Release = NonPrivate | GaussianRelease | ApproximateRelease | RenyiRelease | Dominated | Proven
Round = Release | PoissonSampled | SampledWithoutReplacement


@dataclass(frozen=True)
class Composed:
    """The same event, count times, each round chosen with knowledge of the earlier ones."""

    event: Round
    count: int


@dataclass(frozen=True)
class Attended:
    """In each of `rounds` rounds the release with probability rate, nothing otherwise.

    The coins are seen but depend on nobody's data, and come up `most` times at most.
    """

    event: Round
    rate: float
    rounds: int
    most: int


@dataclass(frozen=True)
class Either:
    """One run with several proofs: the best one counts."""

    ways: tuple[Composed, ...]


Spent = Composed | Attended | Either
