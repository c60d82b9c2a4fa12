"""local: T_i, the steps a client takes on its own examples.

Every local part is a plan for one inner rule, which the engines run:

    g ← ∇ mean loss(batch) + weight_decay·y + proximal·(y − x)
    m ← momentum·m + g
    y ← y − rate·m
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.checks import count, fraction, not_negative
from fedveil.parts.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Plan:
    """Which examples each client uses at each step, and how far it goes.

    `index[i, t]` are positions within client i's own examples, −1 where a batch is shorter.
    When every step uses the same batch, `index` holds it once: [clients, 1, width].
    A client with fewer steps than others has rate 0 in the steps it does not take.
    """

    index: Tensor  # int64 [clients, steps or 1, width]
    rates: Tensor  # float32 [clients, steps]
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0

    @property
    def steps(self) -> int:
        """The most steps any client takes."""
        return self.rates.shape[1]

    @property
    def repeated(self) -> bool:
        """Whether all steps use one and the same batch."""
        return self.index.shape[1] == 1

    def revisits(self, sizes: Tensor) -> bool:
        """Whether clients of these sizes see their examples twice and more."""
        return int((self.index >= 0).sum()) >= 2 * int(sizes.sum())

    def positions(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Examples of each step, where client i's begin at starts[i], and how they are weighted.

        [steps or 1, clients, width] both; the weights of a batch add up to 1. A shorter batch is
        filled up with its own first example, so that no other example can disturb it.
        """
        index = self.index.transpose(0, 1)
        inside = index >= 0
        first = index[:, :, :1].clamp_min(0)
        weights = inside / inside.sum(dim=2, keepdim=True).clamp_min(1)
        return starts[:, None] + torch.where(inside, index, first), weights

    def group(self, start: int, stop: int) -> Plan:
        """The plan of clients start..stop−1, without padding that none of them needs."""
        index, rates = self.index[start:stop], self.rates[start:stop]
        width = int((index >= 0).any(dim=0).sum(dim=1).max())
        steps = int((rates > 0).any(dim=0).sum())
        if not self.repeated:
            index = index[:, :steps]
        return replace(self, index=index[:, :, :width], rates=rates[:, :steps])


class Local(Protocol):
    """A plan for any number of clients, from their sizes alone."""

    def rate(self, round: int) -> float:
        """The rate by which a report on the gradient scale divides."""

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> Plan:
        """Batches and rates for clients of these sizes, drawn for all of them in order."""


@dataclass(frozen=True)
class SGD:
    """y ← y − η_k·g(batch), `steps` times or for `epochs` passes.  Zhang et al. 2022, Alg. 1.

    Without a batch size every step uses all of the client's examples. With epochs the last batch
    of a pass may be shorter; with steps, reshuffled passes follow each other without a gap.
    """

    learning_rate: Schedule
    steps: int | None = None
    epochs: int | None = None
    batch: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UserError(
                f"{type(self).__name__}: give either steps or epochs, the length of local work."
            )
        for field in ("steps", "epochs", "batch"):
            if getattr(self, field) is not None:
                count(self, field, getattr(self, field))
        fraction(self, "momentum", self.momentum)
        not_negative(self, "weight_decay", self.weight_decay)

    @property
    def proximal(self) -> float:
        """No proximal term."""
        return 0.0

    def rate(self, round: int) -> float:
        """η_k."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> Plan:
        """Full batches need no draw; mini-batches are cut from shuffled passes."""
        if self.batch is None:
            index, steps = all_examples(sizes), torch.full_like(sizes, self._full_steps())
        elif self.epochs is not None:
            index, steps = _batches_of_epochs(sizes, self.epochs, self.batch, rng)
        else:
            index, steps = _batches_of_steps(sizes, self._full_steps(), self.batch, rng)
        rates = _rates(steps, torch.full(sizes.shape, self.rate(round)))
        return Plan(index, rates, self.momentum, self.weight_decay, self.proximal)

    def _full_steps(self) -> int:
        return self.steps or self.epochs or 1


@dataclass(frozen=True)
class Proximal(SGD):
    """SGD on f_i(y) + (strength/2)·‖y − x‖².  FedProx: Li et al. 2020, Alg. 2."""

    strength: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "strength", self.strength)

    @property
    def proximal(self) -> float:
        """The strength of the pull to x."""
        return self.strength


@dataclass(frozen=True)
class GD:
    """T steps of γ/T on the full local loss.  Shulgin et al. 2025, Thm. 1."""

    learning_rate: Schedule
    steps: int = 1

    def __post_init__(self) -> None:
        count(self, "steps", self.steps)

    def rate(self, round: int) -> float:
        """γ, not γ/T."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> Plan:
        """The same full batch in every step."""
        each = torch.full(sizes.shape, self.rate(round) / self.steps)
        return Plan(all_examples(sizes), _rates(torch.full_like(sizes, self.steps), each))


@dataclass(frozen=True)
class IncrementalGradient:
    """One cyclic pass, γ/N on one example a step, fixed order.  Shulgin et al. 2025, App. C."""

    learning_rate: Schedule

    def rate(self, round: int) -> float:
        """γ, not γ/N."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> Plan:
        """Step t uses example t."""
        index = all_examples(sizes).transpose(1, 2)
        return Plan(index, _rates(sizes, self.rate(round) / sizes))


def all_examples(sizes: Tensor) -> Tensor:
    """Positions 0..size−1 of each client, −1 beyond: [clients, 1, largest size]."""
    positions = torch.arange(_largest(sizes))
    return torch.where(positions < sizes[:, None], positions, -1)[:, None, :]


def _largest(sizes: Tensor) -> int:
    return int(sizes.max()) if len(sizes) else 0


def _rates(steps: Tensor, each: Tensor) -> Tensor:
    """Client i has rate each[i] in its first steps[i] steps and 0 afterwards."""
    taken = torch.arange(_largest(steps)) < steps[:, None]
    return (taken * each[:, None]).float()


def _shuffled(sizes: Tensor, passes: int, rng: np.random.Generator) -> Tensor:
    """[clients, passes, largest]: each pass a permutation of 0..size−1, padding last."""
    keys = torch.from_numpy(rng.random((len(sizes), passes, _largest(sizes))))
    absent = torch.arange(_largest(sizes)) >= sizes[:, None]
    order = keys.masked_fill_(absent[:, None, :], 2.0).argsort(dim=2)
    return torch.where(absent[:, None, :], -1, order)


def _batches_of_epochs(
    sizes: Tensor, epochs: int, batch: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Each pass cut into ⌈size/batch⌉ batches; the passes of a client follow without a gap."""
    shuffled = _shuffled(sizes, epochs, rng)
    width = min(batch, shuffled.shape[2])
    per_pass = -(-shuffled.shape[2] // width) if width else 0
    padded = torch.nn.functional.pad(
        shuffled, (0, per_pass * width - shuffled.shape[2]), value=-1
    ).reshape(len(sizes), epochs * per_pass, width)
    # A small client's passes end early: move its empty batches behind its full ones.
    empty = (padded < 0).all(dim=2).long()
    order = empty.argsort(dim=1, stable=True)
    index = torch.gather(padded, 1, order[:, :, None].expand_as(padded))
    return index, epochs * (-(-sizes // batch))


def _batches_of_steps(
    sizes: Tensor, steps: int, batch: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """`steps` batches of min(batch, size), cut from endless reshuffled passes."""
    each = sizes.clamp_max(batch)
    passes = int((-(-steps * each // sizes)).max()) if len(sizes) else 1
    flat = _shuffled(sizes, passes, rng).flatten(1)
    # Squeeze out the padding, so that one pass follows the other.
    flat = torch.gather(flat, 1, (flat < 0).long().argsort(dim=1, stable=True))
    width = torch.arange(_largest(each))
    position = torch.arange(steps)[None, :, None] * each[:, None, None] + width
    inside = width < each[:, None, None]
    taken = torch.gather(flat, 1, torch.where(inside, position, 0).flatten(1))
    index = torch.where(inside, taken.reshape(position.shape), -1)
    return index, torch.full_like(sizes, steps)
