"""report: what a client tells of its local work, from where it started to where it ended.

Every report is affine in the local difference: u = scale·(y − x) + share·x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Report(Protocol):
    """What of (x, y) is reported, and how the mean report becomes a descent direction."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(scale, share) of u = scale·(y − x) + share·x, for the round's local rate."""

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """The direction the server walks against."""


@dataclass(frozen=True)
class Difference:
    """u = y − x."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(1, 0)."""
        return 1.0, 0.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """−mean: walking against it adds the mean difference."""
        return -mean


@dataclass(frozen=True)
class GradientScale:
    """u = (x − y)/η_k: the sum of the local gradients when η_k is the local rate."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(−1/η_k, 0); a rate of zero moved nothing and reports nothing."""
        return (-1.0 / rate if rate > 0 else 0.0), 0.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """The mean itself."""
        return mean


@dataclass(frozen=True)
class Model:
    """u = y: the local model itself."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(1, 1)."""
        return 1.0, 1.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """x − mean: a step of 1 lands on the mean model."""
        return x - mean
