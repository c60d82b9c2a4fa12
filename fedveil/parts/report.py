"""report: the update of a client, from the model x it started at and the model y it ended at.

Every update is affine in the local difference: u = scale·(y − x) + share·x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from fedveil.parts.part import Part


class Report(Part, ABC):
    """The update u as a function of (x, y), and the descent direction from the mean update."""

    divides: bool = False  # whether updates are divided by the local rate

    @abstractmethod
    def affine(self, rate: float) -> tuple[float, float]:
        """(scale, share) of u = scale·(y − x) + share·x, for the round's local rate."""

    @abstractmethod
    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """The direction that the server descends along."""


@dataclass(frozen=True)
class Difference(Report):
    """u = y − x."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(1, 0)."""
        return 1.0, 0.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """−mean: a descent step adds the mean difference."""
        return -mean


@dataclass(frozen=True)
class PseudoGradient(Report):
    """u = (x − y)/η_k: the sum of the local gradients if η_k is the local rate."""

    divides = True

    def affine(self, rate: float) -> tuple[float, float]:
        """(−1/η_k, 0), and (0, 0) for a rate of zero, where y = x."""
        return (-1.0 / rate if rate > 0 else 0.0), 0.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """The mean itself."""
        return mean


@dataclass(frozen=True)
class Model(Report):
    """u = y: the local model itself."""

    def affine(self, rate: float) -> tuple[float, float]:
        """(1, 1)."""
        return 1.0, 1.0

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        """x − mean: a step of 1 gives the mean model."""
        return x - mean
