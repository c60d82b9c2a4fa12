"""local: T_i, the training steps of a client on its own examples.

Every local part is a plan for one update rule, which the engines run:

    g ← ∇ mean loss(batch) + weight_decay·y + proximal·(y − x) + correction
    m ← momentum·m + g
    y ← y − rate·m
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedveil.errors import UserError
from fedveil.parts.checks import count, fraction, not_negative
from fedveil.parts.part import Part
from fedveil.parts.schedule import Schedule

if TYPE_CHECKING:
    from fedveil.parts.bound import Bound
    from fedveil.parts.cohort import Cohort
    from fedveil.parts.noise import Noise
    from fedveil.parts.quantize import Quantize
    from fedveil.parts.report import Report
    from fedveil.parts.server import Server


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """The batch and the learning rate of each client at each step.

    `index[i, t]` are positions in client i's own examples, padded with −1. If every step uses the
    same batch, `index` has it once: [clients, 1, width]. A client with fewer steps than others has
    rate 0 in the remaining steps.
    """

    index: Tensor  # int64 [clients, steps or 1, width]
    rates: Tensor  # float32 [clients, steps]
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    correction: Tensor | None = None  # float32 [clients, dim], added to every gradient

    @property
    def steps(self) -> int:
        """The maximum number of steps of a client."""
        return self.rates.shape[1]

    @property
    def repeated(self) -> bool:
        """Whether all steps use the same batch."""
        return self.index.shape[1] == 1

    def revisits(self, sizes: Tensor) -> bool:
        """Whether clients of these sizes use their examples at least twice."""
        return int((self.index >= 0).sum()) >= 2 * int(sizes.sum())

    def positions(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The examples of each step and their weights; client i's examples begin at starts[i].

        Both are [steps or 1, clients, width], and the weights of a batch sum to 1. A shorter batch
        is padded with its own first example, so that no other example can affect it.
        """
        index = self.index.transpose(0, 1)
        inside = index >= 0
        first = index[:, :, :1].clamp_min(0)
        weights = inside / inside.sum(dim=2, keepdim=True).clamp_min(1)
        return starts[:, None] + torch.where(inside, index, first), weights

    @classmethod
    def joined(cls, plans: Sequence[LocalPlan]) -> LocalPlan:
        """The plans of several clients as one, padded to the most steps and the widest batch."""
        common = {(plan.momentum, plan.weight_decay, plan.proximal) for plan in plans}
        if len(common) > 1 or any(plan.correction is not None for plan in plans):
            raise UserError(
                "The local plans of some clients differ in momentum, weight_decay or proximal, or "
                "have a correction. Only batches and rates may depend on a client's size."
            )
        steps = max(plan.steps for plan in plans)
        width = max(plan.index.shape[2] for plan in plans)
        times = 1 if all(plan.repeated for plan in plans) else steps

        def padded(plan: LocalPlan) -> Tensor:
            whole = plan.index if times == 1 else plan.index.expand(-1, plan.steps, -1)
            room = (0, width - whole.shape[2], 0, times - whole.shape[1])
            return functional.pad(whole, room, value=-1)

        index = torch.cat([padded(plan) for plan in plans])
        rates = [functional.pad(plan.rates, (0, steps - plan.steps)) for plan in plans]
        return replace(plans[0], index=index, rates=torch.cat(rates))

    def group(self, start: int, stop: int) -> LocalPlan:
        """The plan of clients start..stop−1, without unused padding."""
        index, rates = self.index[start:stop], self.rates[start:stop]
        width = int((index >= 0).any(dim=0).sum(dim=1).max())
        steps = int((rates > 0).any(dim=0).sum())
        if not self.repeated:
            index = index[:, :steps]
        correction = None if self.correction is None else self.correction[start:stop]
        return replace(
            self, index=index[:, :, :width], rates=rates[:, :steps], correction=correction
        )


class Inside(NamedTuple):
    """The parts of one step inside a silo, whose units are its records."""

    local: Local
    cohort: Cohort
    report: Report
    bound: Bound
    quantize: Quantize
    noise: Noise
    server: Server


class Local(Part, ABC):
    """A plan for any number of clients, which depends only on their sizes."""

    claims: ClassVar = ("by_record",)

    by_record: bool = False  # whether it is rounds over the client's records, with noise in each
    inner_steps: int = 1  # how many such rounds
    pull: float = 0.0  # λ, by which such rounds are pulled to the server's model

    @abstractmethod
    def rate(self, round: int) -> float:
        """The rate by which `PseudoGradient` divides."""

    @abstractmethod
    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """Batches and rates for clients of these sizes, drawn in client order."""

    @property
    def random(self) -> bool:
        """Whether its plans are random. If not, an update is deterministic."""
        return True

    @property
    def listed(self) -> int | None:
        """The number of silos, if they differ; None if all silos work alike."""
        return None

    def inside(self, silo: int, round: int, noise: Noise) -> Inside:
        """The parts of one step inside a silo, with its share of the recipe's noise."""
        raise UserError(f"Local {type(self).__name__} does not work record by record.")

    def describe(self, silos: int) -> str:
        """How records are sampled inside clients, for the statement."""
        return repr(self)


@dataclass(frozen=True)
class SGD(Local):
    """y ← y − η_k·g(batch), `steps` times or for `epochs` passes.  Zhang et al. 2022, Alg. 1.

    Without a batch size, every step uses all of the client's examples. With epochs, the last batch
    of a pass may be shorter. With steps, batches continue across reshuffled passes.
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
                f"{type(self).__name__}: both or neither of steps and epochs are given. Give "
                "exactly one of them."
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

    @property
    def random(self) -> bool:
        """Only with mini-batches."""
        return self.batch is not None

    def rate(self, round: int) -> float:
        """η_k."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """Full batches without randomness, or mini-batches from shuffled passes."""
        if self.batch is None:
            index, steps = all_examples(sizes), torch.full_like(sizes, self._full_steps())
        elif self.epochs is not None:
            index, steps = _batches_of_epochs(sizes, self.epochs, self.batch, rng)
        else:
            index, steps = _batches_of_steps(sizes, self._full_steps(), self.batch, rng)
        rates = _rates(steps, torch.full(sizes.shape, self.rate(round)))
        return LocalPlan(index, rates, self.momentum, self.weight_decay, self.proximal)

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
        """The strength of the proximal term."""
        return self.strength


@dataclass(frozen=True)
class GD(Local):
    """T steps of γ/T on the full local loss.  Shulgin et al. 2025, Thm. 1."""

    learning_rate: Schedule
    steps: int = 1

    def __post_init__(self) -> None:
        count(self, "steps", self.steps)

    def rate(self, round: int) -> float:
        """γ, not γ/T."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """The same full batch in every step."""
        each = torch.full(sizes.shape, self.rate(round) / self.steps)
        return LocalPlan(all_examples(sizes), _rates(torch.full_like(sizes, self.steps), each))

    @property
    def random(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class MiniBatchGD(GD):
    """T steps of γ/T on mini-batches from shuffled passes.  Shulgin et al. 2025, App. D: 32."""

    batch: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "batch", self.batch)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """T batches of min(batch, size) examples."""
        index, steps = _batches_of_steps(sizes, self.steps, self.batch, rng)
        return LocalPlan(
            index, _rates(steps, torch.full(sizes.shape, self.rate(round) / self.steps))
        )

    @property
    def random(self) -> bool:
        """Its batches are."""
        return True


@dataclass(frozen=True)
class IncrementalGradient(Local):
    """One pass in fixed order, γ/N on one example per step.  Shulgin et al. 2025, App. C."""

    learning_rate: Schedule

    def rate(self, round: int) -> float:
        """γ, not γ/N."""
        return self.learning_rate(round)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """Step t uses example t."""
        index = all_examples(sizes).transpose(1, 2)
        return LocalPlan(index, _rates(sizes, self.rate(round) / sizes))

    @property
    def random(self) -> bool:
        """Never."""
        return False


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
    """Each pass in ⌈size/batch⌉ batches, one pass after the other."""
    shuffled = _shuffled(sizes, epochs, rng)
    width = min(batch, shuffled.shape[2])
    per_pass = -(-shuffled.shape[2] // width) if width else 0
    padded = functional.pad(shuffled, (0, per_pass * width - shuffled.shape[2]), value=-1).reshape(
        len(sizes), epochs * per_pass, width
    )
    # The passes of a small client end early: move its empty batches behind its full ones.
    empty = (padded < 0).all(dim=2).long()
    order = empty.argsort(dim=1, stable=True)
    index = torch.gather(padded, 1, order[:, :, None].expand_as(padded))
    return index, epochs * (-(-sizes // batch))


def _batches_of_steps(
    sizes: Tensor, steps: int, batch: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """`steps` batches of min(batch, size) examples from reshuffled passes."""
    each = sizes.clamp_max(batch)
    passes = int((-(-steps * each // sizes)).max()) if len(sizes) else 1
    flat = _shuffled(sizes, passes, rng).flatten(1)
    # Remove the padding between passes.
    flat = torch.gather(flat, 1, (flat < 0).long().argsort(dim=1, stable=True))
    width = torch.arange(_largest(each))
    position = torch.arange(steps)[None, :, None] * each[:, None, None] + width
    inside = width < each[:, None, None]
    taken = torch.gather(flat, 1, torch.where(inside, position, 0).flatten(1))
    index = torch.where(inside, taken.reshape(position.shape), -1)
    return index, torch.full_like(sizes, steps)
