"""What happened, as frozen values; how it is counted is `accounting`'s business.

An event speaks of one pair of neighbours under one adjacency, so it already contains the
sensitivity. Events are light: nothing here imports an accountant.
"""

from __future__ import annotations

from dataclasses import dataclass


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


Round = (
    NonPrivate | GaussianRelease | ApproximateRelease | PoissonSampled | SampledWithoutReplacement
)


@dataclass(frozen=True)
class Composed:
    """The same event, count times, each round chosen with knowledge of the earlier ones."""

    event: Round
    count: int
