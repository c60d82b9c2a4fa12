"""Correlated noise: release t carries x_t of x = C⁻¹z, so that noise cancels over the rounds.

z is independent Gaussian noise of deviation multiplier·C, and C is lower triangular, Toeplitz,
positive and not increasing along a column. All releases of a run are one Gaussian release
(docs/privacy.md, "Correlated noise"). The past noise is secret, and so is a checkpoint that has it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events
from fedveil.accounting.correlation import Column, optimized, prefix_errors, square_root
from fedveil.accounting.norms import Norms
from fedveil.accounting.rounding import rounded_up
from fedveil.errors import UserError
from fedveil.parts.checks import count, not_negative, numbers
from fedveil.parts.noise import MultiplierNoise, Noise, grid_of
from fedveil.parts.part import Begin, Tensors, foreign
from fedveil.random.samplers import normals, rounded_gaussian

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

FINE = 64  # integer z is drawn in steps of grid/FINE, so that past noise is subtracted precisely
LONG = 4096  # rounds after which the deviation of a round's noise no longer changes


@dataclass(frozen=True)
class _Correlated(MultiplierNoise):
    """x_t = z_t − Σ_{j>0} c_j·x_{t−j}, z_t ~ N(0, (multiplier·C)²·I).

    With `integer`, x_t is rounded to the grid of the messages, for secure noise.
    """

    integer: bool = False
    lost: int = 0  # rounds that were drawn again after a crash, for the accounting only

    correlated = True
    drift: ClassVar[float]  # grid steps by which rounding moves a coordinate between neighbours

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "lost", self.lost)

    @property
    @abstractmethod
    def column(self) -> Column:
        """c_0 = 1, c_1, …"""

    @abstractmethod
    def _past(self, state: Tensors) -> Tensor | None:
        """Σ_{j>0} c_j·x_{t−j}; None if there is nothing to subtract."""

    @abstractmethod
    def _after(self, state: Tensors, noise: Tensor) -> Tensors:
        """The state after x_t."""

    @property
    def needs_grid(self) -> bool:  # type: ignore[override]
        """Whether it is integers."""
        return self.integer

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """The noise of a first round: x_0 = z_0."""
        return self._less(None, message, rng)

    def step(
        self,
        message: Norms,
        arrived: int,
        expected: float,
        rng: np.random.Generator,
        state: Tensors,
    ) -> tuple[Tensor, Tensors]:
        """x_t, and the state with it."""
        noise = self._less(self._past(state), message, rng)
        return noise, self._after(state, noise.double())

    def _less(self, past: Tensor | None, message: Norms, rng: np.random.Generator) -> Tensor:
        """z_t − past, in floating point or as integers."""
        if self.integer:
            return self._whole_less(past, message, rng)
        fresh = torch.from_numpy(normals(message.dim, rng)).mul_(self.deviation(message))
        return fresh if past is None else fresh - past

    def _whole_less(self, past: Tensor | None, message: Norms, rng: np.random.Generator) -> Tensor:
        """round(z_t − past) in grid steps, where z_t and past are multiples of 1/FINE of a step."""
        steps = self.deviation(message) / grid_of(message)
        if past is None:
            return torch.from_numpy(rounded_gaussian(steps, message.dim, rng))
        fresh = torch.from_numpy(rounded_gaussian(FINE * steps, message.dim, rng))
        fine = fresh - (past * FINE).round().long()
        return (fine + FINE // 2).div(FINE, rounding_mode="floor")

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """A round of one Gaussian release over the run, for a unit that takes part every time."""
        ratio = self.deviation(message) / sensitivity.l2
        drift = 0.0
        if self.integer:
            drift = self.drift * grid_of(message) * math.sqrt(message.dim) / sensitivity.l2
        return events.Correlated(ratio, self.column, drift=drift, lost=self.lost)

    def describe(self) -> str:
        """The multiplier, and what is known of the matrix."""
        rounded = "Rounded " if self.integer else ""
        amount = rounded_up(self.multiplier or 0.0, 6)
        text = f"{rounded}Gaussian with noise multiplier {amount}, correlated over the rounds"
        return f"{text} ({self._matrix()})"

    @abstractmethod
    def _matrix(self) -> str:
        """The matrix in a few words."""

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float:
        """The deviation of x_t in late rounds."""
        return self.deviation(message) * float(np.linalg.norm(self.column.inverse(LONG)))

    def deviation_of_run(
        self, message: Norms, expected: float, surplus: float, rounds: int
    ) -> float:
        """The deviation of Σ_t x_t, over the square root of the number of rounds."""
        return self.deviation(message) * prefix_errors(self.column, rounds)[1] / math.sqrt(rounds)

    def prefix_error(self, rounds: int) -> float:
        """The root mean square of the prefix sums of C⁻¹z, for z of deviation 1."""
        return prefix_errors(self.column, rounds)[0]

    def secured(self) -> Noise:
        """The noise rounded to a grid."""
        return replace(self, integer=True)

    def misfit(self, recipe: Recipe) -> str | None:
        """It needs a fixed bound, and a cohort that keeps participations apart."""
        own = f"noise {type(self).__name__}"
        if recipe.bound.adapts:
            return (
                f"bound {type(recipe.bound).__name__} and {own} do not fit: past noise was drawn "
                "for another threshold. Use Clip, or independent noise."
            )
        if not recipe.cohort.spaced or foreign(recipe.cohort):
            return (
                f"cohort {type(recipe.cohort).__name__} and {own} do not fit: nothing is known "
                "about how often and how far apart a client takes part. Use Separated, "
                "CyclicPoisson or Everyone."
            )
        return super().misfit(recipe)


@dataclass(frozen=True)
class BandedNoise(_Correlated):
    """x_t = z_t − Σ_{0<j<bands} c_j·x_{t−j}, c_j the square-root coefficients.

    By default there are as many bands as rounds between two participations.  Kalinin and Lampert
    2024, Thm. 1.  State: the last bands − 1 noise vectors. One band is independent noise.
    """

    bands: int | None = None
    drift = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands is not None:
            count(self, "bands", self.bands)

    @property
    def column(self) -> Column:
        """The square-root coefficients."""
        return square_root(_planned(self, self.bands))

    def planned(self, rounds: int, separation: int, most: int | None) -> BandedNoise:
        """With as many bands as the separation, unless given."""
        return self if self.bands is not None else replace(self, bands=min(separation, rounds))

    @property
    def vectors(self) -> int:
        """bands − 1."""
        return int(_planned(self, self.bands)) - 1

    def initial_state(self, begin: Begin) -> Tensors:
        """No past noise."""
        past = self.vectors
        return {"past": torch.zeros(past, len(begin.x), dtype=torch.float64)} if past else {}

    def _past(self, state: Tensors) -> Tensor | None:
        if "past" not in state:
            return None
        return torch.tensor(self.column.coefficients[1:], dtype=torch.float64) @ state["past"]

    def _after(self, state: Tensors, noise: Tensor) -> Tensors:
        return {"past": torch.cat([noise[None], state["past"][:-1]])} if state else state

    def _matrix(self) -> str:
        return f"banded square root, {self.bands} band{'' if self.bands == 1 else 's'}"


@dataclass(frozen=True)
class BufferedNoise(_Correlated):
    """x_t = z_t − Σ_i ω_i·buffer_i, buffer_i ← θ_i·buffer_i + x_t.  Dvijotham et al. 2024, §4.

    Buffered linear Toeplitz noise (BLT): a few buffers remember all rounds. Weights ω and decays θ
    are optimized for the rounds and participations of a run, unless given.
    """

    buffers: int = 3
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    drift = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "buffers", self.buffers)
        numbers(self, "weights", self.weights)
        numbers(self, "decays", self.decays)
        if self.weights or self.decays:
            Column(weights=self.weights, decays=self.decays)  # refuses what is not a column

    @property
    def column(self) -> Column:
        """c_j = Σ_i ω_i·θ_i^(j−1)."""
        return Column(weights=_planned(self, self.weights or None), decays=self.decays)

    def planned(self, rounds: int, separation: int, most: int | None) -> BufferedNoise:
        """With optimized weights and decays, unless given."""
        if self.weights:
            return self
        found = optimized(self.buffers, rounds, separation, most)
        return replace(self, weights=found.weights, decays=found.decays)

    @property
    def vectors(self) -> int:
        """One for each buffer."""
        return self.buffers

    def initial_state(self, begin: Begin) -> Tensors:
        """Empty buffers."""
        return {"buffers": torch.zeros(len(self.weights), len(begin.x), dtype=torch.float64)}

    def _past(self, state: Tensors) -> Tensor | None:
        return torch.tensor(self.weights, dtype=torch.float64) @ state["buffers"]

    def _after(self, state: Tensors, noise: Tensor) -> Tensors:
        decays = torch.tensor(self.decays, dtype=torch.float64)[:, None]
        return {"buffers": decays * state["buffers"] + noise}

    def _matrix(self) -> str:
        return f"{len(self.weights)} buffers"


def _planned(noise: object, value: Any) -> Any:
    """A parameter that follows from the rounds of a run. Refused before it is known."""
    if value is None:
        raise UserError(
            f"{type(noise).__name__} follows from the rounds of a run, which are not known here. "
            "Give its parameters, or plan the recipe: recipe.planned(rounds, clients)."
        )
    return value
