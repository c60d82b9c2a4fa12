"""Parameterised operations on a group of clients at once, with hand-written backward passes.

Activations of all clients of a group form one batch, [clients·width, …], so everything between
these operations runs as in any module. Each operation keeps how its parameters move in `stores`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function

from fedveil.engines.stores import Factors, Pace, Rows, Store, Written, worth_writing


class Layer(Protocol):
    """The parameters of one operation, used once or more in a forward pass."""

    def absorb(self, pace: Pace) -> None:
        """Walk by the gradients that the backward pass has left here."""

    def finished(self, pace: Pace) -> dict[str, Store]:
        """How far each parameter has moved, by name."""


class _Site(Function):
    """One use of a layer: its forward and backward passes as plain functions."""

    @staticmethod
    def forward(x: Tensor, anchor: Tensor, use: Use) -> Tensor:
        """`anchor` requires a gradient, so that a backward pass comes by even if x does not."""
        return _owned(use.forward(x.detach(), not x.requires_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Use], output: Tensor) -> None:
        """What the backward pass needs."""
        ctx.use = inputs[2]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, anchor: Tensor, use: Use
    ) -> tuple[Tensor, int]:
        """Where the module sees one client, the layer sees all of them, [clients·width, …]."""
        if in_dims[1] is None:
            raise RuntimeError("the module maps over its own batch, which layers cannot follow")
        place = in_dims[0]  # None for inputs that are the same for all clients
        mapped = x.expand(info.batch_size, *x.shape) if place is None else x.movedim(place, 0)
        y = applied(use, mapped.flatten(0, 1), anchor)
        return y.reshape(*mapped.shape[:2], *y.shape[1:]), 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        """Leave the gradient of the output with the layer; pass on that of the input if asked."""
        return ctx.use.backward(g, ctx.needs_input_grad[0]), None, None


def _owned(y: Tensor) -> Tensor:
    """The same numbers as a tensor that is not a view: what follows may change it in place."""
    if y._base is None:
        return y
    unviewed: Tensor = torch.ops.aten._unsafe_view(y.contiguous(), y.shape)
    return unviewed


@dataclass
class Use:
    """What one use of a layer does."""

    forward: Callable[[Tensor, bool], Tensor]  # of inputs, that may come from no other parameter
    backward: Callable[[Tensor, bool], Tensor | None]


def applied(use: Use, x: Tensor, anchor: Tensor) -> Tensor:
    """Run a use as a step of autograd."""
    output: Tensor = _Site.apply(x, anchor, use)  # type: ignore[no-untyped-call]
    return output


@dataclass
class Shift:
    """A bias or any other vector that is added, [size]: written out."""

    name: str
    store: Written
    pending: Tensor | None = None

    @classmethod
    def start(cls, name: str, shared: Tensor, clients: int) -> Shift:
        """Nobody has moved yet."""
        return cls(name, Written(shared, clients))

    @property
    def each(self) -> Tensor:
        """The vector of each client, [clients or 1, *shape]."""
        weights = self.store.weights
        return self.store.shared[None] if weights is None else weights

    def leave(self, gradient: Tensor) -> None:
        """Add up gradients [clients, size] until they are absorbed."""
        self.pending = gradient if self.pending is None else self.pending + gradient

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.pending is None:
            self.pending = torch.zeros(self.store.clients, *self.store.shared.shape)
        self.store.absorb(self.pending, pace)
        self.pending = None

    def finished(self, pace: Pace) -> dict[str, Store]:
        """By name."""
        return {self.name: self.store.finished(pace)}


@dataclass
class LinearLayer:
    """y = x·(W + Δ_i)ᵀ + b + β_i: Δ_i as factors while they are few, else each client's weights.

    Merged factors carry the bias, too: it is the weight of one more input that is always 1.
    """

    name: str
    weight: Tensor  # [out, in]
    clients: int
    bias: Shift | None
    repeated: bool  # whether every step of the plan has the same batch
    store: Factors | Written | None = None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # gradients and inputs
    constant: bool = False  # whether its input comes from no other parameter
    base: Tensor | None = None  # x·Wᵀ + b, where x is the same in every step
    gram: Tensor | None = None  # x·xᵀ + 1, there

    def use(self, pace: Pace) -> Use:
        """One use in this step's forward pass."""
        kept: list[Tensor] = []

        def forward(x: Tensor, constant: bool) -> Tensor:
            self.constant = constant
            kept.append(x)
            return self._forward(self._in_groups(x), pace).reshape(*x.shape[:-1], -1)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            slope = self._in_groups(g)
            self.pending.append((slope, self._in_groups(kept.pop())))
            return self._back(slope, pace).reshape(*g.shape[:-1], -1) if wanted else None

        return Use(forward, backward)

    def _in_groups(self, x: Tensor) -> Tensor:
        """[clients·width, …, size] as [clients, positions, size]."""
        return x.reshape(self.clients, -1, x.shape[-1])

    def _forward(self, x: Tensor, pace: Pace) -> Tensor:
        store = self.store
        if isinstance(store, Factors) and store.merged:
            return self._merged_forward(x, store.scaled()[1], pace)
        if isinstance(store, Factors):
            a, g = store.scaled()
            y = _grown(x @ self.weight.T, pace).baddbmm_(torch.bmm(x, a.transpose(1, 2)), g)
            return y if self.bias is None else y.add_(self.bias.each[:, None])
        if store is None or store.weights is None:
            shared = None if self.bias is None else self.bias.store.shared
            self.base = F.linear(x, self.weight, shared)
            return self.base
        turned = store.weights.transpose(1, 2)
        if self.bias is None:
            return torch.bmm(x, turned)
        return torch.baddbmm(self.bias.each[:, None], x, turned)

    def _merged_forward(self, x: Tensor, g: Tensor, pace: Pace) -> Tensor:
        """x·Wᵀ + b was multiplied in the first step, and x·xᵀ is in the second."""
        assert self.base is not None
        if self.gram is None:
            self.gram = torch.bmm(x, x.transpose(1, 2))
            if self.bias is not None:
                self.gram += 1
        return torch.baddbmm(_grown(self.base, pace), self.gram, g)

    def _back(self, g: Tensor, pace: Pace) -> Tensor:
        if isinstance(self.store, Written) and self.store.weights is not None:
            return torch.bmm(g, self.store.weights)
        back = g @ self.weight
        if isinstance(self.store, Factors):
            a, slopes = self.store.scaled()
            back = _grown(back, pace).baddbmm_(torch.bmm(g, slopes.transpose(1, 2)), a)
        return back

    def absorb(self, pace: Pace) -> None:
        """Take up the step's factors, or walk what is written out."""
        used, self.pending = self.pending, []
        g, a = joined(used) if used else self._nothing()
        if self.store is None:
            again = self.repeated and self.constant
            merged = len(used) == 1 and (again or pace.plan.steps == 1)
            self.store = self._started(merged, a.shape[1], pace)
        if isinstance(self.store, Written):
            self.store.absorb_product(g, a, pace)
        else:
            self.store.absorb(a, g, pace)
        if not self._merged:
            self.base = None
            if self.bias is not None:
                self.bias.leave(g.sum(dim=1))
                self.bias.absorb(pace)

    @property
    def _merged(self) -> bool:
        return isinstance(self.store, Factors) and self.store.merged

    def _started(self, merged: bool, width: int, pace: Pace) -> Factors | Written:
        """Factors where there will be few of them."""
        steps = 1 if merged else pace.plan.steps
        if merged or steps == 1 or not worth_writing(width * steps, self.weight):
            return Factors(self.weight, merged)
        return Written(self.weight, self.clients)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """A step in which the layer was not used."""
        out, size = self.weight.shape
        return torch.zeros(self.clients, 1, out), torch.zeros(self.clients, 1, size)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, and the bias's."""
        if self.store is None:
            return {}
        store = self.store.finished(pace)
        if self.bias is None:
            return {self.name: store}
        return {self.name: store} | (self._merged_bias(pace) or self.bias.finished(pace))

    def _merged_bias(self, pace: Pace) -> dict[str, Store]:
        """Σ g + γ·b of merged factors."""
        if self.bias is None or not isinstance(self.store, Factors) or not self.store.merged:
            return {}
        slopes = self.store.scaled()[1]
        moved = slopes[:, 0] if slopes.shape[1] == 1 else slopes.sum(dim=1)
        if pace.plan.weight_decay:
            moved = moved + pace.gamma[:, None] * self.bias.store.shared
        return {self.bias.name: Rows(moved)}


def joined(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Gradients and inputs of all uses in a step, one after the other along the positions."""
    if len(uses) == 1:
        return uses[0]
    return torch.cat([g for g, _ in uses], 1), torch.cat([a for _, a in uses], 1)


def _grown(y: Tensor, pace: Pace) -> Tensor:
    """What the shared weights give, with the part that decay has taken of them."""
    return y * (1 + pace.gamma)[:, None, None] if pace.plan.weight_decay else y


@dataclass
class ScaleLayer:
    """y = x̂·(w + ω_i) + b + β_i after a normalization: vectors over some axes, written out.

    `first` is the axis of x̂ [clients·width, …] at which those of w and b begin.
    """

    scale: Shift | None
    shift: Shift | None
    clients: int

    def use(self, first: int) -> Use:
        """One use in this step's forward pass."""
        kept: list[Tensor] = []

        def forward(x: Tensor, constant: bool) -> Tensor:
            kept.append(x)
            y = x if self.scale is None else x * self._spread(self.scale, x, first)
            return y if self.shift is None else y + self._spread(self.shift, x, first)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            (x,) = kept
            if self.shift is not None:
                self.shift.leave(self._gathered(g, self.shift, first))
            if self.scale is None:
                return g
            self.scale.leave(self._gathered(g * x, self.scale, first))
            return g * self._spread(self.scale, g, first) if wanted else None

        return Use(forward, backward)

    def _spread(self, part: Shift, x: Tensor, first: int) -> Tensor:
        """Each client's vector beside each of its examples, [clients·width or 1, 1, …, 1]."""
        each = part.each
        if len(each) > 1:
            each = each.repeat_interleave(len(x) // self.clients, 0)
        behind = x.dim() - first - (each.dim() - 1)
        return each.reshape(len(each), *[1] * (first - 1), *each.shape[1:], *[1] * behind)

    def _gathered(self, g: Tensor, part: Shift, first: int) -> Tensor:
        """The sum over all that one number of the vector was spread to, [clients, *shape]."""
        shape = part.store.shared.shape
        kept = (0, *range(first, first + len(shape)))
        spread = [axis for axis in range(g.dim()) if axis not in kept]
        summed = g.sum(dim=spread) if spread else g
        return summed.reshape(self.clients, -1, *shape).sum(dim=1)

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        for part in (self.scale, self.shift):
            if part is not None:
                part.absorb(pace)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """Both vectors' stores."""
        found: dict[str, Store] = {}
        for part in (self.scale, self.shift):
            found |= {} if part is None else part.finished(pace)
        return found


@dataclass
class EmbeddingLayer:
    """y = (W + Δ_i)[token]: written out."""

    name: str
    weight: Tensor  # [tokens, size]
    clients: int
    store: Written
    pending: Tensor | None = None

    def use(self) -> Use:
        """One use in this step's forward pass, of tokens [clients·width, …]."""
        count, size = self.weight.shape
        kept: list[Tensor] = []

        def forward(tokens: Tensor, constant: bool) -> Tensor:
            mine = tokens.reshape(self.clients, -1)
            kept.append(mine + count * torch.arange(self.clients)[:, None])
            if self.store.weights is None:
                return F.embedding(tokens, self.weight)
            table = self.store.weights.reshape(-1, size)
            return F.embedding(kept[0], table).reshape(*tokens.shape, size)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            places = kept.pop()
            left = torch.zeros(self.clients * count, size)
            left.index_add_(0, places.flatten(), g.reshape(-1, size))
            left = left.reshape(self.clients, count, size)
            self.pending = left if self.pending is None else self.pending + left
            return None

        return Use(forward, backward)

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.pending is None:
            self.pending = torch.zeros(self.clients, *self.weight.shape)
        self.store.absorb(self.pending, pace)
        self.pending = None

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The table's store."""
        return {self.name: self.store.finished(pace)}
