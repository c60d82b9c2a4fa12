"""The change of each client's parameter: as factors, as merged factors, or stored in full.

During local training, `Written` and `Factors` hold the current weights and follow the inner rule of
parts/local.py. At the end every parameter is a `Store` of Δ_i = y_i − x. Weight decay pulls towards
multiples of the shared W, so factors keep that part as one number per client,
Δ_i = (…)_i + γ_i·W (`Pace`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedveil.engines.updates import lengths
from fedveil.parts.local import LocalPlan


@dataclass
class Pace:
    """The learning rates of a step, and γ_i: the multiple of W that decay has added."""

    plan: LocalPlan
    each: Tensor  # the learning rates [clients, steps], where the clients are computed
    gamma: Tensor  # [clients]
    velocity: Tensor  # momentum of gamma
    common: list[float | None]  # the learning rate of each step, if all clients share it
    step: int = 0

    @classmethod
    def start(cls, plan: LocalPlan, device: torch.device | None = None) -> Pace:
        """At the first step, with every γ_i at 0."""
        clients, rates = len(plan.rates), plan.rates
        alike = ((rates == rates[:1]) & (rates > 0)).all(dim=0).tolist()
        common = [
            rate if same else None for rate, same in zip(rates[0].tolist(), alike, strict=True)
        ]
        gamma, velocity = torch.zeros(2, clients, device=device)
        return cls(plan, rates.to(device), gamma, velocity, common)

    @property
    def rates(self) -> Tensor:
        """η of this step for each client; 0 for clients that have finished."""
        return self.each[:, self.step]

    @property
    def rate(self) -> float | None:
        """η of this step, if every client has the same."""
        return self.common[self.step]

    @property
    def pull(self) -> float:
        """The factor of Δ_i in the gradient."""
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

    def follow(self, velocity: Tensor | None, slope: Tensor) -> Tensor:
        """m ← momentum·m + slope, in place once m exists."""
        if not self.plan.momentum or velocity is None:
            return slope
        return velocity.mul_(self.plan.momentum).add_(slope)

    def walk(self, place: Tensor, velocity: Tensor) -> None:
        """y ← y − η·m, in place.

        A client that takes no such step keeps its exact values: 0·∞ would be NaN.
        """
        if self.rate is not None:
            place.add_(velocity, alpha=-self.rate)
            return
        rate = self.rates.view(-1, *[1] * (place.dim() - 1))
        place.copy_(torch.where(rate > 0, place - rate * velocity, place))


class Store(Protocol):
    """Δ_i of one parameter."""

    def squares(self) -> Tensor:
        """‖Δ_i‖² in float64, [clients]."""

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """Σ scale_i·Δ_i over the clients in `used`, flat."""

    def dots(self, vector: Tensor) -> Tensor:
        """⟨Δ_i, vector⟩, [clients]; the vector is flat."""

    def rows(self) -> Tensor:
        """Δ_i as rows, [clients, numbers]."""


@dataclass
class Written:
    """y_i in full, [clients, *shape]; for weights of small layers or with many factors."""

    shared: Tensor
    clients: int
    weights: Tensor | None = None  # y_i; None while every client has the shared weights
    velocity: Tensor | None = None

    def absorb(self, slope: Tensor, pace: Pace) -> None:
        """Take a step against a gradient [clients, *shape]."""
        y, plan = self._own(), pace.plan
        if plan.weight_decay:
            slope = slope.add(y, alpha=plan.weight_decay)
        if plan.proximal:
            slope = slope + plan.proximal * (y - self.shared)
        self.velocity = pace.follow(self.velocity, slope)
        pace.walk(y, self.velocity)

    def absorb_product(self, g: Tensor, a: Tensor, pace: Pace) -> None:
        """Take a step against gᵀa, g [clients, positions, out] and a [clients, positions, in].

        A large product with few positions is accumulated in place and never stored itself; with
        many positions that would lose precision.
        """
        turned, momentum = g.transpose(1, 2), pace.plan.momentum
        if pace.pull or pace.rate is None or g.shape[1] > self.shared.shape[1]:
            self.absorb(torch.bmm(turned, a), pace)
        elif momentum:
            if self.velocity is None:
                self.velocity = torch.bmm(turned, a)
            else:
                self.velocity.baddbmm_(turned, a, beta=momentum)
            pace.walk(self._own(), self.velocity)
        elif self.weights is None:
            self.weights = torch.baddbmm(self.shared, turned, a, alpha=-pace.rate)
        else:
            self.weights.baddbmm_(turned, a, alpha=-pace.rate)

    def _own(self) -> Tensor:
        if self.weights is None:
            self.weights = self.shared.expand(self.clients, *self.shared.shape).clone()
        return self.weights

    def finished(self, pace: Pace) -> StoredRows:
        """Δ_i, after the last step."""
        return StoredRows(self._own().sub_(self.shared).reshape(self.clients, -1))


@dataclass
class StoredRows:
    """Δ_i as rows, [clients, numbers]."""

    moved: Tensor

    def squares(self) -> Tensor:
        """Row by row."""
        return lengths(self.moved).square()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """One matrix-vector product."""
        return scale @ (self.moved if len(used) == len(self.moved) else self.moved[used])

    def dots(self, vector: Tensor) -> Tensor:
        """One matrix-vector product."""
        return self.moved @ vector

    def rows(self) -> Tensor:
        """The rows themselves."""
        return self.moved


@dataclass
class Reordered:
    """Rows of a weight whose axes the engine orders differently from the module."""

    held: StoredRows
    shape: tuple[int, ...]  # of one client's weight, as stored
    order: tuple[int, ...]  # of the module's axes among them

    def squares(self) -> Tensor:
        """Independent of the order."""
        return self.held.squares()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """Reorders the sum only."""
        return self.held.weighted_sum(scale, used).reshape(self.shape).permute(self.order).flatten()

    def dots(self, vector: Tensor) -> Tensor:
        """Reorders the vector only."""
        seen = vector.reshape([self.shape[axis] for axis in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return self.held.dots(seen.permute(back).flatten())

    def rows(self) -> Tensor:
        """In the module's order."""
        seen = self.held.moved.reshape(-1, *self.shape)
        return seen.permute(0, *(axis + 1 for axis in self.order)).flatten(1)


@dataclass
class Turned:
    """The store of Wᵀ, for a module that keeps W."""

    held: Store
    shape: tuple[int, int]  # of Wᵀ

    def squares(self) -> Tensor:
        """Independent of the order."""
        return self.held.squares()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """Turns the sum only."""
        return self.held.weighted_sum(scale, used).reshape(self.shape).T.flatten()

    def dots(self, vector: Tensor) -> Tensor:
        """Turns the vector only."""
        return self.held.dots(vector.reshape(self.shape[::-1]).T.flatten())

    def rows(self) -> Tensor:
        """In the module's order."""
        return self.held.rows().reshape(-1, *self.shape).transpose(1, 2).flatten(1)


@dataclass
class Factors:
    """Δ_i = Σ_s c_{i,s}·g_{i,s}ᵀ a_{i,s} + γ_i·W: factors of each step's gradient, not multiplied.

    With momentum, decay or a proximal term the coefficients c keep changing; otherwise g is stored
    already multiplied by c. If every step sees the same inputs a, there is a single block, and the
    steps change g itself (`merged`).
    """

    shared: Tensor  # [out, in]
    merged: bool
    inputs: Tensor | None = None  # a, [clients, room for positions, in]
    slopes: Tensor | None = None  # g, [clients, room for positions, out]
    rank: int = 0  # number of factors
    positions: list[int] = field(default_factory=list)  # in each step's block
    coefficients: Tensor | None = None  # c, [clients, steps], while they change
    velocities: Tensor | None = None  # momentum of c, or of the merged g
    gamma: Tensor | None = None

    def absorb(self, a: Tensor, g: Tensor, pace: Pace) -> None:
        """Append a step's gradient gᵀa."""
        if self.merged:
            self._absorb_merged(a, g, pace)
            return
        if pace.rate is None:  # a coefficient of 0 would turn non-finite values into NaN
            walking = (pace.rates > 0)[:, None, None]
            a, g = torch.where(walking, a, 0.0), torch.where(walking, g, 0.0)
        if pace.pull or pace.plan.momentum:
            self._follow(pace)
        else:
            g = g * -pace.rates[:, None, None]
        self._append(a, g, pace.plan.steps)

    def _append(self, a: Tensor, g: Tensor, steps: int) -> None:
        """Allocates memory for all steps at the first one."""
        first, self.rank = self.rank, self.rank + a.shape[1]
        if self.inputs is None or self.slopes is None:
            self.inputs, self.slopes = _room(a, steps), _room(g, steps)
        elif self.rank > self.inputs.shape[1]:
            self.inputs = torch.cat([self.inputs[:, :first], _room(a, steps)], 1)
            self.slopes = torch.cat([self.slopes[:, :first], _room(g, steps)], 1)
        self.inputs[:, first : self.rank] = a
        self.slopes[:, first : self.rank] = g
        self.positions.append(a.shape[1])

    def _absorb_merged(self, a: Tensor, g: Tensor, pace: Pace) -> None:
        if pace.plan.steps == 1 and pace.rate is not None:
            self.inputs, self.slopes, self.rank = a, g * -pace.rate, a.shape[1]
            return
        if self.slopes is None:
            self.inputs, self.slopes, self.rank = a, torch.zeros_like(g), a.shape[1]
            g = g.clone()  # another layer may share it, and it becomes the velocity
        slope = g.add(self.slopes, alpha=pace.pull) if pace.pull else g
        self.velocities = pace.follow(self.velocities, slope)
        pace.walk(self.slopes, self.velocities)

    def _follow(self, pace: Pace) -> None:
        """d ← momentum·d + pull·c, 1 for the new block; c ← c − η·d."""
        clients, plan = len(pace.rates), pace.plan
        new = pace.gamma.new_zeros(clients, 1)
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
        assert self.inputs is not None
        assert self.slopes is not None
        a, g = self.inputs[:, : self.rank], self.slopes[:, : self.rank]
        if self.coefficients is None:
            return a, g
        each = torch.tensor(self.positions, device=g.device)
        return a, g * self.coefficients.repeat_interleave(each, dim=1)[:, :, None]

    def finished(self, pace: Pace) -> Store:
        """The final store: rows, unless the factors are few."""
        self.gamma = pace.gamma
        if self.inputs is None:
            return Decayed(self.shared, pace.gamma)
        return StoredRows(self.rows()) if worth_writing(self.rank, self.shared) else self

    def squares(self) -> Tensor:
        """⟨GGᵀ, AAᵀ⟩ + 2γ·⟨G, AWᵀ⟩ + γ²‖W‖², enlarged by what rounding may add to a message.

        docs/privacy.md, "The bound in floating point".
        """
        a, g = self.scaled()
        inputs, slopes = lengths(a), lengths(g)
        length = (inputs * slopes).sum(dim=1)
        decayed = self.gamma is not None and bool((self.gamma != 0).any())
        if self.rank == 1 and not decayed:
            total = length.square()
        else:
            a, g = a.double(), g.double()  # float32 errors would exceed the margin of a bound
            products = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
            total = products.sum(dim=(1, 2))
        if self.gamma is not None and decayed:
            gamma, size = self.gamma.double(), self.shared.double().norm()
            crossed = ((a @ self.shared.double().T) * g).sum(dim=(1, 2))
            total = total + 2 * gamma * crossed + gamma.square() * size.square()
            length = length + gamma.abs() * size
        exact = (total.clamp_min(0) + ROUNDING * length.square()).sqrt()
        lost = (self.rank + 4) * PRODUCT * length
        small = UNDERFLOW * len(self.shared) ** 0.5 * inputs.sum(dim=1)
        longest = torch.where(length == 0, 0.0, exact + lost + small).square()
        bounded: Tensor = torch.where(slopes.amax(dim=1) <= LARGEST, longest, torch.inf)
        return bounded

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """One product of all factors: Σ_i s_i·G_iᵀA_i."""
        a, g = self.scaled()
        a, g = (a, g) if len(used) == len(a) else (a[used], g[used])
        summed = (g * scale[:, None, None]).flatten(0, 1).T @ a.flatten(0, 1)
        decayed = 0.0 if self.gamma is None else float(scale @ self.gamma[used])
        if decayed:
            summed.add_(self.shared, alpha=decayed)
        return summed.flatten()

    def dots(self, vector: Tensor) -> Tensor:
        """⟨G_i, A_i·Vᵀ⟩ + γ_i·⟨W, V⟩, without computing rows."""
        a, g = self.scaled()
        seen = vector.view_as(self.shared)
        found = ((a @ seen.T) * g).sum(dim=(1, 2))
        return found if self.gamma is None else found + self.gamma * (self.shared * seen).sum()

    def rows(self) -> Tensor:
        """The product of the factors."""
        a, g = self.scaled()
        moved = torch.bmm(g.transpose(1, 2), a)
        if self.gamma is not None and bool((self.gamma != 0).any()):
            moved.addcmul_(self.gamma[:, None, None], self.shared)
        return moved.flatten(1)


@dataclass
class Decayed:
    """Δ_i = γ_i·W: a parameter that no operation used, changed by weight decay alone."""

    shared: Tensor
    gamma: Tensor

    def squares(self) -> Tensor:
        """γ²‖W‖²."""
        size: Tensor = self.shared.double().norm()
        return self.gamma.double().square() * size.square()

    def weighted_sum(self, scale: Tensor, used: Tensor) -> Tensor:
        """A multiple of W."""
        return (self.shared * float(scale @ self.gamma[used])).flatten()

    def dots(self, vector: Tensor) -> Tensor:
        """γ_i·⟨W, V⟩."""
        return self.gamma * (self.shared.flatten() @ vector)

    def rows(self) -> Tensor:
        """Multiples of W."""
        return self.gamma[:, None] * self.shared.flatten()


def _room(block: Tensor, steps: int) -> Tensor:
    """Memory for a block [clients, positions, size] per step."""
    return block.new_empty(block.shape[0], block.shape[1] * steps, block.shape[2])


def worth_writing(rank: int, weight: Tensor) -> bool:
    """Whether this many factors cost more than the weight itself."""
    out, size = weight.shape[0], weight.numel()
    return rank * (out + size // out) >= size


ROUNDING = 2.0**-32  # of float64 sums of up to 2²⁰ products, relative to the norms in them
PRODUCT = 2.0**-23  # at least the error of a float32 product of factors, for each of them
SMALLEST, LARGEST = 2.0**-60, 2.0**60  # of the scales that multiply factors
UNDERFLOW = 2.0**-66  # 2⁻¹²⁶, below which float32 loses digits, over the smallest scale
