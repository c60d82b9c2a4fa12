"""server: the next model from the noisy mean, and which model is handed out at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.checks import fraction, positive
from fedveil.parts.schedule import Constant, Schedule

Tensors = dict[str, Tensor]


class Server(Protocol):
    """x ← step(x, descent direction); its state is a dictionary of vectors."""

    def start(self, x: Tensor) -> Tensors:
        """The state before the first round."""

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """The next model and the next state."""


@dataclass(frozen=True)
class Step:
    """x ← x − β_k·d."""

    rate: Schedule = Constant(1.0)

    def start(self, x: Tensor) -> Tensors:
        """No state."""
        return {}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """Walk against the direction."""
        return x - self.rate(round) * descent, state


@dataclass(frozen=True)
class Momentum:
    """m ← μm + d, x ← x − β_k·m.  Das et al. 2022, App. G: μ = 0.8."""

    rate: Schedule = Constant(1.0)
    momentum: float = 0.8

    def __post_init__(self) -> None:
        fraction(self, "momentum", self.momentum)

    def start(self, x: Tensor) -> Tensors:
        """m = 0."""
        return {"momentum": torch.zeros_like(x)}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """Walk against the accumulated direction."""
        momentum = self.momentum * state["momentum"] + descent
        return x - self.rate(round) * momentum, {"momentum": momentum}


@dataclass(frozen=True)
class NormalizedStep:
    """x ← x − η_k·d/‖d‖, and x at d = 0.  Shulgin et al. 2025, Alg. 1, line 12."""

    rate: Schedule = Constant(1.0)

    def start(self, x: Tensor) -> Tensors:
        """No state."""
        return {}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """A step of length η_k, whatever the direction's length."""
        norm = float(torch.linalg.vector_norm(descent, dtype=torch.float64))
        return (x - (self.rate(round) / norm) * descent if norm > 0 else x), state


@dataclass(frozen=True)
class Adam:
    """Adam on the direction d (FedAdam, Reddi et al. 2021, Alg. 2), with bias correction."""

    rate: Schedule = Constant(0.01)
    first: float = 0.9
    second: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        fraction(self, "first", self.first)
        fraction(self, "second", self.second)
        positive(self, "floor", self.floor)

    def start(self, x: Tensor) -> Tensors:
        """Both moments zero."""
        return {"first": torch.zeros_like(x), "second": torch.zeros_like(x)}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """x ← x − η_k·m̂/(√v̂ + floor)."""
        first = self.first * state["first"] + (1 - self.first) * descent
        second = self.second * state["second"] + (1 - self.second) * descent**2
        mean = first / (1 - self.first ** (round + 1))
        spread = (second / (1 - self.second ** (round + 1))).sqrt()
        x = x - self.rate(round) * mean / (spread + self.floor)
        return x, {"first": first, "second": second}


class Output(Protocol):
    """Which of the models x_0 … x_K is handed out."""

    def start(self, x: Tensor, rounds: int, rng: np.random.Generator) -> Tensors:
        """What is kept before the first round."""

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """What is kept after a round that ended at x."""


@dataclass(frozen=True)
class LastIterate:
    """x_K."""

    def start(self, x: Tensor, rounds: int, rng: np.random.Generator) -> Tensors:
        """The first model."""
        return {"model": x}

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """The newest model."""
        return {"model": x}


@dataclass(frozen=True)
class RandomIterate:
    """x_k̃ with k̃ uniform on 0..K−1.  Das et al. 2022, Alg. 1, line 13."""

    def start(self, x: Tensor, rounds: int, rng: np.random.Generator) -> Tensors:
        """The first model, until the drawn round is reached."""
        return {"model": x, "chosen": torch.tensor(int(rng.integers(max(rounds, 1))))}

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """x_k is the model after round k − 1."""
        return {**kept, "model": x} if round + 1 <= int(kept["chosen"]) else kept


@dataclass(frozen=True)
class MovingAverage:
    """x̄ ← decay_k·x̄ + (1 − decay_k)·x, decay_k = min(decay, (1+k)/(10+k)).

    The warm-up forgets the early models quickly. DP-LSGD, Table 2 averages parameters so.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        fraction(self, "decay", self.decay)

    def start(self, x: Tensor, rounds: int, rng: np.random.Generator) -> Tensors:
        """The first model."""
        return {"model": x}

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """Lean towards the newest model."""
        decay = min(self.decay, (1 + round) / (10 + round))
        return {"model": decay * kept["model"] + (1 - decay) * x}
