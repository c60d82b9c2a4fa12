"""noise: what the server or the clients add to the sum of messages, and its privacy event.

`multiplier` is relative to the maximum norm of one message, so that noise scales with the bound.
The amount of noise never depends on who arrives (docs/privacy.md, "Client-side noise"). Noise for
messages of finitely many bits is in `discrete`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events
from fedveil.accounting.correlation import Column, prefix_errors
from fedveil.accounting.norms import Norms
from fedveil.accounting.rounding import rounded_up
from fedveil.errors import UserError
from fedveil.parts.checks import one_of, positive
from fedveil.parts.part import Part, Tensors
from fedveil.random.samplers import normals

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

Place = Literal["server", "client"]
Amount = TypeVar("Amount", int, float)


class Share(NamedTuple):
    """The inputs of calibration: expected clients, the run's ε, and a round's share of δ.

    Truncation may take a part of that δ.
    """

    expected: float
    epsilon: float
    delta: float


class Noise(Part, ABC):
    """Noise for a sum of messages, and the event of its release."""

    claims: ClassVar = (
        "describe", "event", "noise_multiplier", "topped_up", "scale_free", "deviation_of_sum",
        "deviation_of_message", "uncalibrated", "secured", "stand_in", "like", "deviation_of_run",
        "prefix_error", "correlated", "by_silo",
    )  # fmt: skip

    at: Place = "server"  # who adds it: the server to clean messages, or each client to its own
    private: bool = True  # whether it is meant for privacy
    needs_grid: bool = False  # whether it is integer grid steps, as messages must be then
    calibrated: bool = True  # whether its amount is fixed, or still needs a budget
    on_messages: bool = False  # whether each message has its own noise, or only the sum
    adds_up: bool = False  # whether `event` relies on more than one client's noise
    topped_up: bool = False  # whether the server adds the noise shares of missing clients
    scale_free: bool = False  # whether a calibrated level depends on neither bound nor dimension
    correlated: bool = False  # whether a round's noise depends on that of the rounds before
    by_silo: bool = False  # whether silos add it in the steps of their local work

    @abstractmethod
    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """The noise on the sum of a round, [dim]: float64, or int64 grid steps on a grid."""

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """The release of a sum with noise from `noise_shares` of the `expected` clients.

        Noise that does not define its event gives no guarantee.
        """
        return events.NonPrivate(f"noise {type(self).__name__} does not define its event")

    def step(
        self,
        message: Norms,
        arrived: int,
        expected: float,
        rng: np.random.Generator,
        state: Tensors,
    ) -> tuple[Tensor, Tensors]:
        """The noise of a round and the next state. Noise without state is drawn afresh."""
        return self.draw(message, arrived, expected, rng), state

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """This noise, calibrated to a level. A larger level means more noise."""
        raise UserError(
            f"Noise {type(self).__name__} has a fixed amount and cannot be calibrated to a budget. "
            "Remove epsilon."
        )

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        """The noise that one client adds to its message, int64 grid steps [dim]."""
        return np.zeros(message.dim, dtype=np.int64)

    def max_magnitude(self, message: Norms) -> int:
        """The maximum noise in a coordinate of one message, in grid steps."""
        return 0

    def describe(self) -> str:
        """The distribution, for the statement."""
        return repr(self)

    @property
    def listed(self) -> int | None:
        """The number of silos, if they differ; None if all silos add the same noise."""
        return None

    def inside(self, silo: int) -> Noise:
        """The noise of one step inside a silo."""
        raise UserError(f"Noise {type(self).__name__} is not added inside silos.")

    def share(self, silo: int) -> float:
        """The budget of a silo as a share of ε."""
        return 1.0

    def with_multipliers(self, multipliers: tuple[float, ...]) -> Noise:
        """This noise with a multiplier for each silo."""
        raise UserError(f"Noise {type(self).__name__} is not added inside silos.")

    @property
    def vectors(self) -> int:
        """The number of vectors of past noise that are kept between rounds."""
        return 0

    @property
    def noise_multiplier(self) -> float | None:
        """Standard deviation on the sum over the l2 bound of one message, for Gaussian noise."""
        return None

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float | None:
        """Standard deviation of one coordinate of a round's sum; None if unknown.

        `surplus` is E max(arrived/expected, 1), because clients above the mean also add noise.
        """
        return None

    def deviation_of_message(self, message: Norms) -> float | None:
        """Standard deviation of one coordinate of a message's own noise, in grid steps, if any."""
        return None

    def deviation_of_run(
        self, message: Norms, expected: float, surplus: float, rounds: int
    ) -> float | None:
        """Deviation of independent noise in each round whose sum over the run varies as much."""
        return self.deviation_of_sum(message, expected, surplus)

    def prefix_error(self, rounds: int) -> float:
        """Deviation of Σ_{s ≤ t} noise_s, root mean square over t, by that of the first round.

        [default: that of independent rounds]
        """
        return prefix_errors(Column(), rounds)[0]

    def planned(self, rounds: int, separation: int, most: int | None) -> Noise:
        """This noise with everything fixed that follows from the rounds and participations."""
        return self

    def uncalibrated(self) -> Noise | None:
        """The same kind of noise before calibration; None if it cannot be calibrated."""
        return None

    def secured(self) -> Noise:
        """This noise as integers, which can be drawn from secret randomness."""
        raise UserError(
            f"noise {type(self).__name__} is user-defined and does not define `secured`, so it "
            "cannot be drawn from secret randomness. For noise='secure', use Gaussian or integer "
            "noise."
        )

    def stand_in(self) -> Noise:
        """Noise of about the same amount at the same level that is faster to calibrate."""
        return self

    def like(self, stand_in: Noise) -> Noise:
        """This noise with the amount of its calibrated stand-in."""
        return stand_in

    def misfit(self, recipe: Recipe) -> str | None:
        """Integer noise needs messages on a grid, and so does noise on each message."""
        on_grid = self.needs_grid or self.on_messages
        if not on_grid or recipe.message(1).grid is not None:
            return None
        return (
            f"quantize {type(recipe.quantize).__name__} and noise {type(self).__name__} do not "
            "fit: integer noise needs messages on a grid. Use StochasticRound(levels), or Gaussian "
            "noise."
        )


@dataclass(frozen=True)
class NoNoise(Noise):
    """z = 0.  No privacy: the event is non-private."""

    private = False
    adds_up = True

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """Refused, because there is no noise to calibrate."""
        raise UserError(
            "NoNoise: this recipe adds no noise, so it cannot meet a privacy budget. Use Gaussian "
            "noise, or remove epsilon."
        )

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Zeros."""
        return torch.zeros(message.dim, dtype=torch.float64)

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """ε = ∞."""
        return events.NonPrivate("no noise is added")

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float:
        """Zero."""
        return 0.0


@dataclass(frozen=True)
class MultiplierNoise(Noise):
    """Noise of deviation multiplier·C. `None` is calibrated to a budget."""

    multiplier: float | None = None
    adds_up = True
    scale_free = True

    def __post_init__(self) -> None:
        if self.multiplier is not None:
            positive(self, "multiplier", self.multiplier)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether the multiplier is given."""
        return self.multiplier is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Self:
        """multiplier = level."""
        return replace(self, multiplier=level)

    def uncalibrated(self) -> Self:
        """The same noise without a multiplier."""
        return replace(self, multiplier=None)

    def deviation(self, message: Norms) -> float:
        """Standard deviation of the Gaussian: multiplier·C."""
        return calibrated_amount(self, self.multiplier) * message.l2

    @property
    def noise_multiplier(self) -> float | None:
        """The multiplier."""
        return self.multiplier


@dataclass(frozen=True)
class Gaussian(MultiplierNoise):
    """z ~ N(0, (multiplier·C)²·I) on the sum.

    At the clients, each of `expected` clients adds a noise share of variance
    (multiplier·C)²/expected, and the server adds the shares of missing clients.
    """

    at: Place = "server"
    topped_up = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "at", self.at, "server", "client")

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """One Gaussian vector: the sum of the shares of arrived clients and of the server."""
        shares = max(arrived / expected, 1.0) if self.at == "client" else 1.0
        unit = torch.from_numpy(normals(message.dim, rng))
        return unit.mul_(self.deviation(message) * math.sqrt(shares))

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """A Gaussian release with σ/Δ₂, where σ² is proportional to the noise shares."""
        ratio = self.deviation(message) / sensitivity.l2
        return events.GaussianRelease(ratio * math.sqrt(min(noise_shares / expected, 1.0)))

    def describe(self) -> str:
        """The multiplier."""
        return f"Gaussian with noise multiplier {rounded_up(self.multiplier or 0.0, 6)} on the sum"

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float:
        """multiplier·C, and more with noise from clients above the expected number."""
        shares = surplus if self.at == "client" else 1.0
        return self.deviation(message) * math.sqrt(shares)

    def secured(self) -> Noise:
        """The noise rounded to a grid."""
        if self.at == "client":
            raise UserError(
                "Gaussian noise at the clients is only simulated, as one draw. For noise='secure', "
                "use noise at the server, or dp_norm_fedavg_secagg."
            )
        return RoundedGaussian(self.multiplier)


@dataclass(frozen=True)
class RoundedGaussian(MultiplierNoise):
    """z = g·round(N(0, (multiplier·C/g)²)) by the server, on the sum of messages on a grid g.

    Integer messages plus rounded noise are the rounding of messages plus noise. This is
    post-processing of the Gaussian mechanism, and no floating-point noise is visible
    (docs/privacy.md, "Secure noise").
    """

    needs_grid = True

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Integer grid steps, rounded exactly."""
        from fedveil.random.samplers import rounded_gaussian

        steps = self.deviation(message) / grid_of(message)
        return torch.from_numpy(rounded_gaussian(steps, message.dim, rng))

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """A Gaussian release with σ/Δ₂."""
        return events.GaussianRelease(self.deviation(message) / sensitivity.l2)

    def describe(self) -> str:
        """The multiplier."""
        multiplier = rounded_up(self.multiplier or 0.0, 6)
        return f"Rounded Gaussian with noise multiplier {multiplier} on the sum"

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float:
        """The deviation of the noise and of its rounding."""
        return math.hypot(self.deviation(message), grid_of(message) / math.sqrt(12))

    def secured(self) -> RoundedGaussian:
        """Unchanged: it is already integers."""
        return self


def calibrated_amount(noise: object, value: Amount | None) -> Amount:
    """The amount of noise. Refused if it is not calibrated."""
    if value is None:
        raise UserError(
            f"The noise {type(noise).__name__} is not calibrated. Give its amount, or epsilon "
            "(and delta)."
        )
    return value


def grid_of(norms: Norms) -> float:
    """The grid step of integer noise."""
    if norms.grid is None:
        raise UserError("Integer noise needs messages on a grid. Quantize with StochasticRound.")
    return norms.grid
