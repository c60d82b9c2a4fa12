"""bound: make every message small.  All bounds are radial: b = s(‖w‖)·w.

The contract holds in floating point too: a scale is shrunk by `MARGIN`, which is more than the
rounding of one float32 product, so ‖b‖ ≤ C for the numbers that are really summed.
Norms below `TINY` count as zero: their direction is rounding, not data. An update so large that
float32 cannot hold its scale is sent as zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.checks import check, not_negative, positive
from fedveil.privacy.events import GaussianRelease, NonPrivate, Release
from fedveil.privacy.norms import Adjacency, Norms

MARGIN = 1.0 - 2.0**-20
TINY = 2.0**-100
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # scales that float32 holds without loss
LEAST_NORM, LARGEST_NORM = 1e-12, 1e12  # of a threshold that moves by itself


class Bound(Protocol):
    """A radial bound and its guarantee."""

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) for finite norms r ≥ 0 in float64, [clients]."""

    def norms(self, dim: int) -> Norms:
        """What one bounded message can be at most."""


def within(norm: float, dim: int) -> Norms:
    """The ball ‖b‖₂ ≤ norm and what it implies for the other norms."""
    return Norms(dim, l1=norm * math.sqrt(dim), l2=norm, linf=norm)


def in_range(scale: Tensor) -> Tensor:
    """Scales as float32 can hold them: never larger, zero where they would lose their digits."""
    return torch.where(scale >= SMALLEST, scale.clamp_max(LARGEST), 0.0)


@dataclass(frozen=True)
class Unbounded:
    """b = w.  No bound: a message can be anything, so no noise makes it private."""

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = 1."""
        return torch.ones_like(norms)

    def norms(self, dim: int) -> Norms:
        """Infinite."""
        return within(math.inf, dim)


@dataclass(frozen=True)
class Clip:
    """clip_C(w) = min(1, C/‖w‖)·w.  ‖clip_C(w)‖ ≤ C.  Zhang et al. 2022, eq. 3."""

    norm: float

    def __post_init__(self) -> None:
        positive(self, "norm", self.norm)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = min(1, C/r), and 1 at r = 0."""
        return in_range((MARGIN * self.norm / norms.clamp_min(TINY)).clamp_max(1.0))

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ C."""
        return within(self.norm, dim)


@dataclass(frozen=True)
class ProbedClip(Clip):
    """Clip at c = factor·mean‖w‖ over all rounds of a run without bound or noise on the same data.

    Zhang et al. 2022, §3.1. *The threshold leaks*: no ε covers how it was found, and the statement
    says so. A norm of 0 stands for a threshold that has not been probed yet.
    """

    norm: float = 0.0
    factor: float = 0.5

    def __post_init__(self) -> None:
        not_negative(self, "norm", self.norm)
        positive(self, "factor", self.factor)

    @property
    def probed(self) -> bool:
        """Whether the threshold is known."""
        return self.norm > 0


@dataclass(frozen=True)
class AdaptiveClip:
    """C_{k+1} = C_k·exp(−η·(b̃ − γ)), b̃ the noisy fraction of updates no longer than C_k.

    Andrew et al. 2021, Alg. 1: C finds the γ-quantile of the norms. Each unit adds ±½ to the count,
    whose noise has deviation `count_noise` (a twentieth of the cohort if not given) and is in the
    accounting; the sum's noise follows the C_k of its own round.
    """

    start: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        inside = LEAST_NORM <= self.start <= LARGEST_NORM
        check(self, "start", self.start, inside, "from 1e-12 to 1e12")
        check(self, "quantile", self.quantile, 0 < self.quantile < 1, "above 0 and below 1")
        check(self, "rate", self.rate, 0 < self.rate <= 10, "above 0 and at most 10")
        if self.count_noise is not None:
            positive(self, "count_noise", self.count_noise)

    def scale(self, norms: Tensor) -> Tensor:
        """As Clip at the first threshold; a round asks `at` for its own."""
        return self.at(self.start).scale(norms)

    def norms(self, dim: int) -> Norms:
        """As Clip at the first threshold: ratios of noise to bound are the same at every other."""
        return self.at(self.start).norms(dim)

    def at(self, norm: float) -> Clip:
        """The bound of a round whose threshold is `norm`."""
        return Clip(norm)

    def deviation(self, expected: float) -> float:
        """Of the count's noise."""
        return self.count_noise or expected / 20

    def joined(self, release: Release, adjacency: Adjacency, expected: float) -> Release:
        """The sum and the count in one release: 1/ρ² = 1/ρ_sum² + 1/ρ_count².

        The count moves by ½ when a unit comes or goes, by 1 when it is replaced, by zero as well.
        """
        if not isinstance(release, GaussianRelease):
            return NonPrivate("the count of an adaptive clip is accounted with Gaussian noise only")
        move = 0.5 if adjacency == "add-remove" else 1.0
        ratio = self.deviation(expected) / move
        return GaussianRelease((release.ratio**-2 + ratio**-2) ** -0.5)

    def next(
        self, norm: float, short: int, arrived: int, expected: float, rng: np.random.Generator
    ) -> float:
        """C_{k+1} from how many of the arrived were short enough; the count is noised in halves."""
        from fedveil.samplers import rounded_gaussian

        halves = 2 * short - arrived  # Σ(b_i − ½) in units of ½
        noise = int(rounded_gaussian(2 * self.deviation(expected), 1, rng)[0])
        fraction = 0.5 + (halves + noise) / 2 / expected
        step = -self.rate * (min(max(fraction, 0.0), 1.0) - self.quantile)
        return min(max(norm * math.exp(step), LEAST_NORM), LARGEST_NORM)


@dataclass(frozen=True)
class Normalize:
    """norm_C(w) = C·w/‖w‖, and 0 at w = 0.  ‖norm_C(w)‖ ≤ C.  Das et al. 2022, Alg. 2, line 9."""

    norm: float

    def __post_init__(self) -> None:
        positive(self, "norm", self.norm)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = C/r, and 0 at r = 0."""
        scale = in_range(MARGIN * self.norm / norms.clamp_min(TINY))
        return torch.where(norms >= TINY, scale, 0.0)

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ C."""
        return within(self.norm, dim)


@dataclass(frozen=True)
class SmoothNormalize:
    """Norm_α(w) = w/(α + ‖w‖).  ‖Norm_α(w)‖ < 1.  Shulgin et al. 2025, Alg. 1, line 5."""

    alpha: float

    def __post_init__(self) -> None:
        positive(self, "alpha", self.alpha)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = 1/(α + r)."""
        return in_range(MARGIN / (self.alpha + norms))

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ 1."""
        return within(1.0, dim)
