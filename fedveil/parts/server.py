"""server: the next model from the noisy mean, and the output, the model that is released."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedveil.parts.checks import fraction, positive
from fedveil.parts.part import Begin, Part, Tensors
from fedveil.parts.schedule import Constant, Schedule

if TYPE_CHECKING:
    from fedveil.recipe import Recipe


class Server(Part, ABC):
    """x ← step(x, descent direction). Its state is a dictionary of vectors."""

    claims: ClassVar = ("inertia", "rate_at")

    inertia: float | None = None  # μ, the share of a direction repeated in the next; None: unknown

    @abstractmethod
    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """The next model and the next state."""

    def rate_at(self, round: int) -> float | None:
        """β_k, the factor of a direction; None if unknown."""
        return None


@dataclass(frozen=True)
class Step(Server):
    """x ← x − β_k·d."""

    rate: Schedule = Constant(1.0)
    inertia = 0.0

    def rate_at(self, round: int) -> float:
        """β_k."""
        return self.rate(round)

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """Step along the negative direction."""
        return x - self.rate(round) * descent, state


@dataclass(frozen=True)
class Momentum(Server):
    """m ← μm + d, x ← x − β_k·m.  Das et al. 2022, App. G: μ = 0.8."""

    rate: Schedule = Constant(1.0)
    momentum: float = 0.8

    def __post_init__(self) -> None:
        fraction(self, "momentum", self.momentum)

    @property
    def inertia(self) -> float:  # type: ignore[override]
        """μ."""
        return self.momentum

    def rate_at(self, round: int) -> float:
        """β_k."""
        return self.rate(round)

    def initial_state(self, begin: Begin) -> Tensors:
        """m = 0."""
        return {"momentum": torch.zeros_like(begin.x)}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """Step along the negative accumulated direction."""
        momentum = self.momentum * state["momentum"] + descent
        return x - self.rate(round) * momentum, {"momentum": momentum}


@dataclass(frozen=True)
class NormalizedStep(Server):
    """x ← x − η_k·d/‖d‖, and x at d = 0.  Shulgin et al. 2025, Alg. 1, line 12."""

    rate: Schedule = Constant(1.0)
    inertia = 0.0

    def rate_at(self, round: int) -> float:
        """η_k."""
        return self.rate(round)

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """A step of length η_k, whatever the norm of the direction."""
        norm = float(torch.linalg.vector_norm(descent, dtype=torch.float64))
        return (x - (self.rate(round) / norm) * descent if norm > 0 else x), state


@dataclass(frozen=True)
class _Adaptive(Server):
    """x ← x − η_k·m/(√v + τ), m ← β₁m + (1 − β₁)d.  Reddi et al. 2021, Alg. 2: v begins at τ².

    With `remove_noise`, d² loses the variance of the noise on a round's mean, which is public, and
    a negative v counts as zero, as DP-AdamBC does (Tang et al. 2024, Alg. 1).
    """

    rate: Schedule = Constant(0.01)
    first: float = 0.9
    second: float = 0.99
    floor: float = 1e-3
    remove_noise: bool = False

    def __post_init__(self) -> None:
        fraction(self, "first", self.first)
        fraction(self, "second", self.second)
        positive(self, "floor", self.floor)

    def rate_at(self, round: int) -> float:
        """η_k."""
        return self.rate(round)

    @abstractmethod
    def _gathered(self, second: Tensor, squares: Tensor) -> Tensor:
        """The next v from the last one and d²."""

    def initial_state(self, begin: Begin) -> Tensors:
        """m = 0 and v = τ²; with `remove_noise` also the variance of the noise."""
        moments = {
            "first": torch.zeros_like(begin.x),
            "second": torch.full_like(begin.x, self.floor**2),
        }
        return {**moments, "noise": torch.tensor(begin.noise**2)} if self.remove_noise else moments

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        """Step along the averaged direction, shorter where directions were long."""
        first = self.first * state["first"] + (1 - self.first) * descent
        squares = descent**2 - state["noise"] if self.remove_noise else descent**2
        second = self._gathered(state["second"], squares)
        mean, square = self._unbiased(first, second, round)
        x = x - self.rate(round) * mean / (square.clamp_min(0).sqrt() + self.floor)
        after = {"first": first, "second": second}
        return x, {**after, "noise": state["noise"]} if self.remove_noise else after

    def _unbiased(self, first: Tensor, second: Tensor, round: int) -> tuple[Tensor, Tensor]:
        """Both moments as they are, as in the paper."""
        return first, second

    def misfit(self, recipe: Recipe) -> str | None:
        """`remove_noise` needs noise of one known variance on the direction of every round."""
        if not self.remove_noise:
            return None
        varies = {
            f"bound {type(recipe.bound).__name__}": recipe.bound.adapts,
            f"memory {type(recipe.memory).__name__}": recipe.memory.kept,
            f"noise {type(recipe.noise).__name__}": recipe.noise.correlated,
        }
        for part, found in varies.items():
            if found:
                return (
                    f"server {type(self).__name__} with remove_noise and {part} do not fit: the "
                    "noise on the server's direction has no fixed variance. Remove remove_noise."
                )
        return None


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """x ← x − η_k·m/(√v + τ), v ← v + d².  FedAdagrad: Reddi et al. 2021, Alg. 2."""

    first: float = 0.0

    def _gathered(self, second: Tensor, squares: Tensor) -> Tensor:
        return second + squares


@dataclass(frozen=True)
class Adam(_Adaptive):
    """x ← x − η_k·m/(√v + τ), v ← β₂v + (1 − β₂)d².  FedAdam: Reddi et al. 2021, Alg. 2.

    With `bias_correction`, v begins at 0, and m and v are divided by 1 − β₁^{k+1} and 1 − β₂^{k+1},
    as in Adam itself.
    """

    bias_correction: bool = False

    def initial_state(self, begin: Begin) -> Tensors:
        """m = 0 and v = τ², or v = 0 with bias correction."""
        state = super().initial_state(begin)
        return {**state, "second": torch.zeros_like(begin.x)} if self.bias_correction else state

    def _gathered(self, second: Tensor, squares: Tensor) -> Tensor:
        return self.second * second + (1 - self.second) * squares

    def _unbiased(self, first: Tensor, second: Tensor, round: int) -> tuple[Tensor, Tensor]:
        """Divided by the total weight of the directions so far, with bias correction."""
        if not self.bias_correction:
            return first, second
        weights = 1 - self.first ** (round + 1), 1 - self.second ** (round + 1)
        return first / weights[0], second / weights[1]


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """x ← x − η_k·m/(√v + τ), v ← v − (1 − β₂)·d²·sign(v − d²).  Reddi et al. 2021, Alg. 2.

    FedYogi: v changes by a share of d², whatever v is.
    """

    def _gathered(self, second: Tensor, squares: Tensor) -> Tensor:
        return second - (1 - self.second) * squares.abs() * torch.sign(second - squares)


class Output(Part, ABC):
    """The model that is released, from x_0 … x_K: `model` of its state."""

    def initial_state(self, begin: Begin) -> Tensors:
        """The first model."""
        return {"model": begin.x}

    @abstractmethod
    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """The state after a round that ended at x."""


@dataclass(frozen=True)
class LastIterate(Output):
    """x_K."""

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """The newest model."""
        return {"model": x}


@dataclass(frozen=True)
class RandomIterate(Output):
    """x_k̃ with k̃ uniform on 0..K−1.  Das et al. 2022, Alg. 1, line 13."""

    def initial_state(self, begin: Begin) -> Tensors:
        """The first model, until the drawn round is reached."""
        chosen = int(begin.rng.integers(max(begin.rounds, 1)))
        return {"model": begin.x, "chosen": torch.tensor(chosen)}

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """x_k is the model after round k − 1."""
        return {**kept, "model": x} if round + 1 <= int(kept["chosen"]) else kept


@dataclass(frozen=True)
class MovingAverage(Output):
    """x̄ ← decay_k·x̄ + (1 − decay_k)·x, decay_k = min(decay, (1+k)/(10+k)).

    The warm-up forgets the early models quickly. DP-LSGD, Table 2 averages parameters in this way.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        fraction(self, "decay", self.decay)

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        """The next average."""
        decay = min(self.decay, (1 + round) / (10 + round))
        return {"model": decay * kept["model"] + (1 - decay) * x}
