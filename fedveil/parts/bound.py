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

import torch
from torch import Tensor

from fedveil.parts.checks import positive
from fedveil.privacy.norms import Norms

MARGIN = 1.0 - 2.0**-20
TINY = 2.0**-100
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # scales that float32 holds without loss


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
