"""noise: what is added to the sum of messages, by the server or by the clients, and its event.

`multiplier` counts in units of what one message can be at most, so that noise follows the bound.
How much there is never depends on who came (docs/privacy.md, "Client-side noise"). Noise for
messages of finitely many bits is in `discrete`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.checks import positive
from fedveil.privacy import events
from fedveil.privacy.norms import Norms
from fedveil.samplers import normals

Place = Literal["server", "client"]
Amount = TypeVar("Amount", int, float)


class Share(NamedTuple):
    """What a round has to settle its noise with: clients, the run's ε, and a round's share of δ.

    Truncation may take a part of that δ.
    """

    expected: float
    epsilon: float
    delta: float


class Noise(Protocol):
    """Noise for a sum of messages, and what one such release amounts to."""

    @property
    def at(self) -> Place:
        """Who adds it: then the server sees clean messages, or noisy ones."""

    @property
    def needs_grid(self) -> bool:
        """Whether it is whole numbers of grid steps; then messages must be, too."""

    @property
    def settled(self) -> bool:
        """Whether its amount is fixed, or waits for a budget."""

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """This noise with its amount settled: more for a larger level."""

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """What is added to a round's sum [dim]: float64, or int64 grid steps if it needs a grid."""

    @property
    def on_messages(self) -> bool:
        """Whether each message carries its own noise, or all of it meets the sum."""

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        """What one client adds to its message, int64 grid steps [dim]."""

    @property
    def adds_up(self) -> bool:
        """Whether `event` makes use of more than one client's noise."""

    def reach(self, message: Norms) -> int:
        """How many grid steps the noise of one message can be at most."""

    def event(
        self, message: Norms, sensitivity: Norms, summands: float, expected: float
    ) -> events.Release:
        """A release that holds the noise of `summands` clients where `expected` make up a round."""


class _OnTheSum:
    """Noise that meets the sum: no message carries it in this simulation."""

    on_messages = False
    adds_up = True

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        """Nothing on messages."""
        return np.zeros(message.dim, dtype=np.int64)

    def reach(self, message: Norms) -> int:
        """Nothing on messages."""
        return 0


@dataclass(frozen=True)
class Silent(_OnTheSum):
    """z = 0.  Nothing is hidden: the event is non-private."""

    needs_grid = False
    settled = True

    @property
    def at(self) -> Place:
        """The server, who adds nothing."""
        return "server"

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """There is nothing to scale."""
        raise UserError("Silent: this recipe adds no noise, so it cannot meet a privacy budget.")

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Zeros."""
        return torch.zeros(message.dim, dtype=torch.float64)

    def event(
        self, message: Norms, sensitivity: Norms, summands: float, expected: float
    ) -> events.Release:
        """ε = ∞."""
        return events.NonPrivate("no noise is added")


@dataclass(frozen=True)
class Gaussian(_OnTheSum):
    """z ~ N(0, (multiplier·C)²·I) on the sum; `None` waits for a budget.

    At the clients each of `expected` adds its share, variance (multiplier·C)²/expected, and the
    server adds the share of those who stayed away.
    """

    multiplier: float | None = None
    at: Place = "server"
    needs_grid = False

    def __post_init__(self) -> None:
        if self.multiplier is not None:
            positive(self, "multiplier", self.multiplier)
        if self.at not in ("server", "client"):
            raise UserError(f"Gaussian: at is '{self.at}'; it must be 'server' or 'client'.")

    @property
    def settled(self) -> bool:
        """Whether the multiplier is known."""
        return self.multiplier is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Gaussian:
        """multiplier = level."""
        return replace(self, multiplier=level)

    def deviation(self, message: Norms) -> float:
        """Standard deviation on the sum: multiplier·C."""
        return settled_amount(self, self.multiplier) * message.l2

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """One Gaussian vector; shares of arrived clients and of the top-up add up to it."""
        shares = max(arrived / expected, 1.0) if self.at == "client" else 1.0
        unit = torch.from_numpy(normals(message.dim, rng))
        return unit.mul_(self.deviation(message) * math.sqrt(shares))

    def event(
        self, message: Norms, sensitivity: Norms, summands: float, expected: float
    ) -> events.Release:
        """A Gaussian release with σ/Δ₂; fewer summands hold a smaller share of the variance."""
        ratio = self.deviation(message) / sensitivity.l2
        return events.GaussianRelease(ratio * math.sqrt(min(summands / expected, 1.0)))


@dataclass(frozen=True)
class RoundedGaussian(_OnTheSum):
    """z = g·round(N(0, (multiplier·C/g)²)) on the sum of messages on a grid g, by the server.

    Whole messages plus rounded noise are the rounding of messages plus noise: post-processing of
    the Gaussian mechanism, with no float of the noise to be seen (docs/privacy.md, "Secure noise").
    """

    multiplier: float | None = None
    needs_grid = True

    def __post_init__(self) -> None:
        if self.multiplier is not None:
            positive(self, "multiplier", self.multiplier)

    @property
    def at(self) -> Place:
        """The server."""
        return "server"

    @property
    def settled(self) -> bool:
        """Whether the multiplier is known."""
        return self.multiplier is not None

    def scaled(
        self, level: float, message: Norms, sensitivity: Norms, share: Share
    ) -> RoundedGaussian:
        """multiplier = level."""
        return replace(self, multiplier=level)

    def deviation(self, message: Norms) -> float:
        """Standard deviation of the Gaussian before rounding: multiplier·C."""
        return settled_amount(self, self.multiplier) * message.l2

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Whole steps, exactly rounded."""
        from fedveil.samplers import rounded_gaussian

        steps = self.deviation(message) / grid_of(message)
        return torch.from_numpy(rounded_gaussian(steps, message.dim, rng))

    def event(
        self, message: Norms, sensitivity: Norms, summands: float, expected: float
    ) -> events.Release:
        """A Gaussian release with σ/Δ₂."""
        return events.GaussianRelease(self.deviation(message) / sensitivity.l2)


def settled_amount(noise: object, value: Amount | None) -> Amount:
    """The amount of noise, or a sentence that there is none yet."""
    if value is None:
        raise UserError(
            f"{type(noise).__name__}: its amount is not settled; give it, or give (ε, δ)."
        )
    return value


def grid_of(norms: Norms) -> float:
    """The grid that whole-number noise counts in."""
    if norms.grid is None:
        raise UserError("Discrete noise needs messages on a grid; quantize with StochasticRound.")
    return norms.grid
