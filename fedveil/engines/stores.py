"""How far each client's parameter has moved: as factors, as merged factors, or written out.

A store holds Δ_i = y_i − x of one parameter for every client of a group and walks it by the inner
rule of parts/local.py. Weight decay pulls along the shared W itself, so a store that cannot write W
out keeps that part as one number a client, Δ_i = (…)_i + γ_i·W (`Pace`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedveil.parts.local import Plan


@dataclass
class Pace:
    """The rates of a step, and γ_i: how much of the shared weights decay has added to Δ_i."""

    plan: Plan
    gamma: Tensor  # [clients]
    velocity: Tensor  # of gamma
    step: int = 0

    @classmethod
    def start(cls, plan: Plan) -> Pace:
        """Nobody has moved yet."""
        clients = len(plan.rates)
        return cls(plan, torch.zeros(clients), torch.zeros(clients))

    @property
    def rates(self) -> Tensor:
        """η of this step, 0 for clients that have finished."""
        return self.plan.rates[:, self.step]

    @property
    def pull(self) -> float:
        """What multiplies Δ_i in the slope."""
        return self.plan.weight_decay + self.plan.proximal

    def advance(self) -> None:
        """γ ← γ − η·ν, ν ← momentum·ν + weight_decay·(1 + γ) + proximal·γ; then the next step."""
        if self.plan.weight_decay:
            slope = self.plan.weight_decay + self.pull * self.gamma
            self.velocity = self.plan.momentum * self.velocity + slope
            self.gamma = torch.where(
                self.rates > 0, self.gamma - self.rates * self.velocity, self.gamma
            )
        self.step += 1


class Store(Protocol):
    """Δ_i of one weight seen as a matrix [out, in]."""

    def squares(self) -> Tensor:
        """‖Δ_i‖² in float64, [clients]."""

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """Σ scale_i·Δ_i over the clients that are used, flat."""

    def rows(self) -> Tensor:
        """Δ_i written out, [clients, numbers]."""


def walk(moved: Tensor, velocity: Tensor | None, slope: Tensor, pace: Pace) -> Tensor | None:
    """One step of the inner rule on what is held of Δ, in place; the new velocity, if any.

    A client that takes no such step is left exactly as it is: 0·∞ would make NaN of it.
    """
    plan = pace.plan
    if pace.pull:
        slope = slope.add(moved, alpha=pace.pull)
    if plan.momentum:
        slope = slope if velocity is None else velocity.mul_(plan.momentum).add_(slope)
        velocity = slope
    rate = pace.rates.view(-1, *[1] * (moved.dim() - 1))
    if bool((pace.rates > 0).all()):
        moved.addcmul_(rate, slope, value=-1)
    else:
        moved.copy_(torch.where(rate > 0, moved - rate * slope, moved))
    return velocity


@dataclass
class Written:
    """Δ_i as it is, [clients, *shape]; for weights of small layers or of many factors."""

    shared: Tensor
    moved: Tensor
    velocity: Tensor | None = None
    current: Tensor | None = None  # y_i, until the next step

    @classmethod
    def start(cls, shared: Tensor, clients: int) -> Written:
        """Nobody has moved yet."""
        return cls(shared, torch.zeros(clients, *shared.shape))

    def absorb(self, slope: Tensor, pace: Pace) -> None:
        """Walk against a gradient [clients, *shape]; decay pulls along the shared weights too."""
        if pace.plan.weight_decay:
            slope = slope.add(self.shared, alpha=pace.plan.weight_decay)
        self.velocity = walk(self.moved, self.velocity, slope, pace)
        self.current = None

    def weights(self) -> Tensor:
        """y_i, [clients, *shape], added up once a step."""
        if self.current is None:
            self.current = self.shared + self.moved
        return self.current

    def squares(self) -> Tensor:
        """As they are held."""
        norms: Tensor = torch.linalg.vector_norm(self.rows(), dim=1, dtype=torch.float64)
        return norms.square()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """One matrix-vector product."""
        rows = self.rows()
        return scale @ rows if len(used) == len(rows) else scale @ rows[used]

    def rows(self) -> Tensor:
        """As they are held."""
        return self.moved.flatten(1)


@dataclass
class Factors:
    """Δ_i = Σ_s c_{i,s}·g_{i,s}ᵀ a_{i,s} + γ_i·W: factors of each step's gradient, not multiplied.

    With momentum the coefficients c have velocities of their own. Where every step sees the same
    inputs a there is a single block, and g itself walks (`merged`).
    """

    shared: Tensor  # [out, in]
    merged: bool
    inputs: list[Tensor] = field(default_factory=list)  # a_s, [clients, positions, in]
    slopes: list[Tensor] = field(default_factory=list)  # g_s, [clients, positions, out]
    coefficients: Tensor | None = None  # c, [clients, steps]
    velocities: Tensor | None = None  # of c, or of the merged g
    gram: Tensor | None = None  # a aᵀ, [clients, positions, positions], of merged inputs
    gamma: Tensor | None = None

    @property
    def rank(self) -> int:
        """How many factors there are."""
        return sum(block.shape[1] for block in self.inputs)

    def absorb(self, a: Tensor, g: Tensor, pace: Pace) -> None:
        """Take up a step's gradient gᵀa."""
        if self.merged:
            self._absorb_merged(a, g, pace)
            return
        walking = (pace.rates > 0)[:, None, None]
        if not bool(walking.all()):  # a coefficient of 0 would make NaN of what is not finite
            a, g = torch.where(walking, a, 0.0), torch.where(walking, g, 0.0)
        self.inputs.append(a)
        self.slopes.append(g)
        self._absorb_block(pace)

    def _absorb_merged(self, a: Tensor, g: Tensor, pace: Pace) -> None:
        if not self.inputs:
            self.inputs, self.slopes = [a], [torch.zeros_like(g)]
        self.velocities = walk(self.slopes[0], self.velocities, g, pace)

    def _absorb_block(self, pace: Pace) -> None:
        """d ← momentum·d + pull·c, 1 for the new block; c ← c − η·d."""
        clients, plan = len(pace.rates), pace.plan
        new = torch.zeros(clients, 1)
        c = new if self.coefficients is None else torch.cat([self.coefficients, new], dim=1)
        d = pace.pull * c
        if plan.momentum and self.velocities is not None:
            d = d + plan.momentum * torch.cat([self.velocities, new], dim=1)
        d[:, -1] = 1.0
        self.velocities = d
        rate = pace.rates[:, None]
        self.coefficients = torch.where(rate > 0, c - rate * d, c)

    def scaled(self) -> tuple[Tensor, Tensor]:
        """(A, G) with Δ_i = GᵢᵀAᵢ + γ_i·W: [clients, rank, in] and [clients, rank, out]."""
        if self.merged:
            return self.inputs[0], self.slopes[0]
        assert self.coefficients is not None
        parts = zip(self.slopes, self.coefficients.unbind(1), strict=True)
        return torch.cat(self.inputs, 1), torch.cat([g * c[:, None, None] for g, c in parts], 1)

    def correction(self, x: Tensor) -> Tensor:
        """x·(Gᵀ A)ᵀ = (x Aᵀ) G for inputs [clients, positions, in]."""
        a, g = self.scaled()
        if self.merged:
            if self.gram is None:
                self.gram = torch.bmm(x, a.transpose(1, 2))
            return torch.bmm(self.gram, g)
        return torch.bmm(torch.bmm(x, a.transpose(1, 2)), g)

    def back(self, g_out: Tensor) -> Tensor:
        """g_out·(Gᵀ A) = (g_out Gᵀ) A."""
        a, g = self.scaled()
        return torch.bmm(torch.bmm(g_out, g.transpose(1, 2)), a)

    def written(self, pace: Pace) -> Written:
        """The same Δ_i multiplied out, after the last step."""
        return Written(self.shared, self._multiplied(self.scaled(), pace.gamma))

    def _multiplied(self, factors: tuple[Tensor, Tensor], gamma: Tensor) -> Tensor:
        a, g = factors
        return torch.bmm(g.transpose(1, 2), a).add_(gamma[:, None, None] * self.shared)

    def finished(self, pace: Pace) -> Store:
        """What is read from in the end: written out unless the factors are few."""
        self.gamma = pace.gamma
        if not self.inputs or worth_writing(self.rank, self.shared):
            return self.written(pace) if self.inputs else Decayed(self.shared, pace.gamma)
        return self

    def squares(self) -> Tensor:
        """⟨GGᵀ, AAᵀ⟩ + 2γ·⟨G, AWᵀ⟩ + γ²‖W‖², and what rounding may have hidden of it."""
        # In float32 the products would err by more than the margin of a bound.
        a, g = (part.double() for part in self.scaled())
        products = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
        total, length = products.sum(dim=(1, 2)), (a.norm(dim=2) * g.norm(dim=2)).sum(dim=1)
        if self.gamma is not None and bool((self.gamma != 0).any()):
            gamma, size = self.gamma.double(), self.shared.double().norm()
            crossed = ((a @ self.shared.double().T) * g).sum(dim=(1, 2))
            total = total + 2 * gamma * crossed + gamma.square() * size.square()
            length = length + gamma.abs() * size
        longest: Tensor = total.clamp_min(0) + ROUNDING * length.square()
        return longest

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """One product of all factors: Σ_i s_i·G_iᵀA_i."""
        a, g = self.scaled()
        a, g = (a, g) if len(used) == len(a) else (a[used], g[used])
        summed = (g * scale[:, None, None]).flatten(0, 1).T @ a.flatten(0, 1)
        if self.gamma is not None:
            summed = summed.add_(self.shared, alpha=float(scale @ self.gamma[used]))
        return summed.flatten()

    def rows(self) -> Tensor:
        """Multiplied out."""
        gamma = torch.zeros(len(self.slopes[0])) if self.gamma is None else self.gamma
        return self._multiplied(self.scaled(), gamma).flatten(1)


@dataclass
class Decayed:
    """Δ_i = γ_i·W: a parameter that nothing used, and that decay alone has moved."""

    shared: Tensor
    gamma: Tensor

    def squares(self) -> Tensor:
        """γ²‖W‖²."""
        size: Tensor = self.shared.double().norm()
        return self.gamma.double().square() * size.square()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """W, once."""
        return (self.shared * float(scale @ self.gamma[used])).flatten()

    def rows(self) -> Tensor:
        """Multiplied out."""
        return self.gamma[:, None] * self.shared.flatten()


def worth_writing(rank: int, weight: Tensor) -> bool:
    """Whether so many factors cost more than the weight that they make up."""
    out, size = weight.shape[0], weight.numel()
    return rank * (out + size // out) >= size


ROUNDING = 2.0**-32  # of float64 sums of up to 2²⁰ products, relative to the lengths in them
