"""Parts of a stranger: one file beside which nothing else has to be touched."""

import math
from dataclasses import dataclass, replace

import torch

from fedveil import Recipe
from fedveil.accounting.events import GaussianRelease, PoissonSampled
from fedveil.accounting.norms import Norms
from fedveil.parts import SGD, Bound, Cohort, Constant, Memory, Noise, Quantize, Server


@dataclass(frozen=True)
class CoinFlips(Cohort):
    """Every client tosses a coin in every round, and stays at home after `cap` rounds."""

    rate: float
    cap: int | None = None
    adjacency = "add-remove"
    independent = True

    def expected(self, population):
        return self.rate * population

    def draw(self, population, rng, state=None):
        comes = rng.random(population) < self.rate
        if self.cap is not None and state:
            comes &= (state["taken"] < self.cap).numpy()
        return comes.nonzero()[0]

    def amplify(self, event, population):
        return PoissonSampled(self.rate, event) if isinstance(event, GaussianRelease) else event


@dataclass(frozen=True)
class BlockClip(Bound):
    """Four blocks of coordinates, each clipped to C/2, so that a message is at most C."""

    norm: float
    radial = False

    def rows(self, updates):
        blocks = torch.tensor_split(updates, 4, dim=1)
        return torch.cat([self.clipped(block) for block in blocks], dim=1)

    def clipped(self, block):
        length = torch.linalg.vector_norm(block, dim=1, keepdim=True, dtype=torch.float64)
        return block * (self.norm / 2 / length.clamp_min(1e-30)).clamp_max(1).float()

    def norms(self, dim):
        return Norms(dim, l1=self.norm * math.sqrt(dim), l2=self.norm, linf=self.norm / 2)


@dataclass(frozen=True)
class Rounding(Quantize):
    """The nearest of 2·levels + 1 values, which moves a coordinate by half a step at most."""

    levels: int = 64

    def __call__(self, rows, bound, rng):
        return (rows.double() * (self.levels / bound.linf)).round().long()

    def norms(self, bound):
        grid = bound.linf / self.levels
        l2 = bound.l2 + grid * math.sqrt(bound.dim) / 2
        return replace(bound, l1=bound.l1 + grid * bound.dim / 2, l2=l2, grid=grid)


@dataclass(frozen=True)
class OwnNoise(Noise):
    """Gaussian noise of `multiplier` messages on the sum."""

    multiplier: float | None = None

    @property
    def calibrated(self):
        return self.multiplier is not None

    def draw(self, message, arrived, expected, rng):
        return torch.from_numpy(rng.normal(0, self.multiplier * message.l2, message.dim))

    def event(self, message, sensitivity, noise_shares, expected):
        return GaussianRelease(self.multiplier * message.l2 / sensitivity.l2)

    def scaled(self, level, message, sensitivity, share):
        return replace(self, multiplier=level)

    def deviation_of_sum(self, message, expected, surplus):
        return self.multiplier * message.l2


@dataclass(frozen=True)
class Fading(Memory):
    """Clients remember their messages, and forget a tenth each time; the server counts rounds."""

    def learn(self, remembered, message):
        return 0.9 * remembered + 0.1 * message

    def initial_state(self, begin):
        return super().initial_state(begin) | {"rounds": torch.zeros(1)}

    def step(self, state, mean):
        direction = self.learn(state["direction"], mean)
        return direction, {"direction": direction, "rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class Nesterov(Server):
    """m ← μm + d, x ← x − β·(d + μm)."""

    rate: float = 0.1
    momentum: float = 0.5

    def initial_state(self, begin):
        return {"velocity": torch.zeros_like(begin.x)}

    def step(self, x, descent, state, round):
        velocity = self.momentum * state["velocity"] + descent
        return x - self.rate * (descent + self.momentum * velocity), {"velocity": velocity}


def dp_own(
    rate: float = 0.2, cap: int | None = None, clip: float = 1.0, multiplier: float | None = None
) -> Recipe:
    """Block-wise clipped FedAvg with Nesterov momentum, every part of it my own."""
    return Recipe(
        name="dp_own", local=SGD(Constant(0.1), steps=2), cohort=CoinFlips(rate, cap),
        bound=BlockClip(clip), noise=OwnNoise(multiplier), server=Nesterov(),
    )  # fmt: skip


def dp_own_memory(
    rate: float = 0.2, clip: float = 1.0, levels: int = 64, multiplier: float | None = None
) -> Recipe:
    """The same with rounded messages and fading memory."""
    base = dp_own(rate=rate, clip=clip, multiplier=multiplier)
    return replace(base, name="dp_own_memory", quantize=Rounding(levels), memory=Fading())
