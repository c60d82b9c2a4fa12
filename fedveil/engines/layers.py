"""Parameterised operations for a group of clients at once, with hand-written backward passes.

The activations of all clients of a group form one batch, [clients·width, …], so everything between
these operations runs as in any module. Each operation stores its parameters' changes in `stores`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function

from fedveil.engines.stores import Factors, Pace, Store, StoredRows, Turned, Written, worth_writing


class Layer(Protocol):
    """The parameters of one operation, used once or more in a forward pass."""

    def absorb(self, pace: Pace) -> None:
        """Take a step with the gradients that the backward pass stored here."""

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The total change of each parameter, by name."""


class _Site(Function):
    """One use of a layer: its forward and backward passes as plain functions."""

    @staticmethod
    def forward(x: Tensor, anchor: Tensor, use: Use) -> Tensor:
        """`anchor` requires a gradient, so that the backward pass runs even if x does not."""
        return _owned(use.forward(x.detach(), not x.requires_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Use], output: Tensor) -> None:
        """Save what the backward pass needs."""
        ctx.use = inputs[2]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, anchor: Tensor, use: Use
    ) -> tuple[Tensor, int]:
        """Where the module sees one client, the layer sees all of them, [clients·width, …]."""
        if in_dims[1] is None:
            raise RuntimeError("the module uses vmap over its own batch")
        place = in_dims[0]  # None for inputs that all clients share
        mapped = x.expand(info.batch_size, *x.shape) if place is None else x.movedim(place, 0)
        y = applied(use, mapped.flatten(0, 1), anchor)
        return y.reshape(*mapped.shape[:2], *y.shape[1:]), 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        """Store the gradient of the output in the layer; return that of the input if needed."""
        return ctx.use.backward(g, ctx.needs_input_grad[0]), None, None


def _owned(y: Tensor) -> Tensor:
    """The same numbers in a tensor that is not a view, so that it can be changed in place."""
    if y._base is None:
        return y
    unviewed: Tensor = torch.ops.aten._unsafe_view(y.contiguous(), y.shape)
    return unviewed


@dataclass
class Use:
    """Forward and backward functions of one use of a layer."""

    forward: Callable[[Tensor, bool], Tensor]  # inputs; whether they depend on no other parameter
    backward: Callable[[Tensor, bool], Tensor | None]


def applied(use: Use, x: Tensor, anchor: Tensor) -> Tensor:
    """Run a use as an autograd operation."""
    output: Tensor = _Site.apply(x, anchor, use)  # type: ignore[no-untyped-call]
    return output


@dataclass
class Shift:
    """A bias or any other added vector, [size], stored in full."""

    name: str
    store: Written
    pending: Tensor | None = None

    @classmethod
    def start(cls, name: str, shared: Tensor, clients: int) -> Shift:
        """All clients at the shared value."""
        return cls(name, Written(shared, clients))

    @property
    def each(self) -> Tensor:
        """The vector of each client, [clients or 1, *shape]."""
        weights = self.store.weights
        return self.store.shared[None] if weights is None else weights

    def leave(self, gradient: Tensor) -> None:
        """Accumulate gradients [clients, size] until they are absorbed."""
        self.pending = gradient if self.pending is None else self.pending + gradient

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.pending is None:
            shared = self.store.shared
            self.pending = shared.new_zeros(self.store.clients, *shared.shape)
        self.store.absorb(self.pending, pace)
        self.pending = None

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The vector's store, by name."""
        return {self.name: self.store.finished(pace)}


@dataclass
class LinearLayer:
    """y = x·(W + Δ_i)ᵀ + b + β_i: Δ_i as factors while they are few, else each client's weights.

    Merged factors include the bias, as the weight of an additional input that is always 1.
    """

    name: str
    weight: Tensor  # [out, in]
    clients: int
    bias: Shift | None
    repeated: bool  # whether every step of the plan uses the same batch
    store: Factors | Written | None = None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # gradients and inputs
    constant: bool = False  # whether its input depends on no other parameter
    base: Tensor | None = None  # x·Wᵀ + b, where x is the same in every step
    gram: Tensor | None = None  # x·xᵀ + 1, in that case

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
        """Uses x·Wᵀ + b computed in the first step and x·xᵀ computed in the second."""
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
        """Append the step's factors, or take a step on weights stored in full."""
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
        """Factors, if there will be few of them."""
        steps = 1 if merged else pace.plan.steps
        if merged or steps == 1 or not worth_writing(width * steps, self.weight):
            return Factors(self.weight, merged)
        return Written(self.weight, self.clients)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """Empty factors for a step in which the layer was not used."""
        out, size = self.weight.shape
        zeros = self.weight.new_zeros
        return zeros(self.clients, 1, out), zeros(self.clients, 1, size)

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
        return {self.bias.name: StoredRows(moved)}


def joined(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Gradients and inputs of all uses in a step, concatenated along the positions."""
    if len(uses) == 1:
        return uses[0]
    return torch.cat([g for g, _ in uses], 1), torch.cat([a for _, a in uses], 1)


def _grown(y: Tensor, pace: Pace) -> Tensor:
    """The output of the shared weights, corrected for weight decay."""
    return y * (1 + pace.gamma)[:, None, None] if pace.plan.weight_decay else y


@dataclass
class ScaleLayer:
    """y = x̂·(w + ω_i) + b + β_i after a normalization: vectors over some axes, stored in full.

    `first` is the axis of x̂ [clients·width, …] at which the axes of w and b start.
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
        """Each client's vector, broadcast to its examples, [clients·width or 1, 1, …, 1]."""
        each = part.each
        if len(each) > 1:
            each = each.repeat_interleave(len(x) // self.clients, 0)
        behind = x.dim() - first - (each.dim() - 1)
        return each.reshape(len(each), *[1] * (first - 1), *each.shape[1:], *[1] * behind)

    def _gathered(self, g: Tensor, part: Shift, first: int) -> Tensor:
        """Sum over all positions that an entry was broadcast to, [clients, *shape]."""
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
class TurnedLayer(LinearLayer):
    """y = x·(W + Δ_i) + b + β_i for a module's W [in, out]; `weight` is Wᵀ."""

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, in the module's order, and the bias's."""
        out, size = self.weight.shape
        found = super().finished(pace)
        return found | {self.name: Turned(found[self.name], (out, size))} if found else {}


@dataclass
class WholeLayer:
    """W + Δ_i, stored in full and used in any way: looked up, multiplied with, or as it is."""

    name: str
    weight: Tensor
    clients: int
    store: Written
    pending: Tensor | None = None

    def looked_up(self, padding: int | None) -> Use:
        """(W + Δ_i)[token] of tokens [clients·width, …]; the row `padding` gets no gradient."""
        count, size = self.weight.shape
        kept: list[Tensor] = []

        def forward(tokens: Tensor, constant: bool) -> Tensor:
            mine = tokens.reshape(self.clients, -1)
            first = count * torch.arange(self.clients, device=tokens.device)
            kept.append(mine + first[:, None])
            if self.store.weights is None:
                return F.embedding(tokens, self.weight)
            table = self.store.weights.reshape(-1, size)
            return F.embedding(kept[0], table).reshape(*tokens.shape, size)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            left = g.new_zeros(self.clients * count, size)
            left.index_add_(0, kept.pop().flatten(), g.reshape(-1, size))
            left = left.reshape(self.clients, count, size)
            if padding is not None:
                left[:, padding] = 0.0
            self.leave(left)
            return None

        return Use(forward, backward)

    def multiplied(self) -> Use:
        """x·(W + Δ_i)ᵀ, for a table that is also a linear layer (weight tying)."""
        kept: list[Tensor] = []

        def forward(x: Tensor, constant: bool) -> Tensor:
            kept.append(self._by_client(x))
            return (kept[0] @ self.each.transpose(1, 2)).reshape(*x.shape[:-1], -1)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            slope = self._by_client(g)
            self.leave(torch.bmm(slope.transpose(1, 2), kept.pop()))
            return (slope @ self.each).reshape(*g.shape[:-1], -1) if wanted else None

        return Use(forward, backward)

    def value(self) -> Use:
        """W + Δ_i for each example, [clients·width, *shape], for any operation."""

        def forward(x: Tensor, constant: bool) -> Tensor:
            width = len(x) // self.clients
            return (
                x.clone() if self.store.weights is None else self.each.repeat_interleave(width, 0)
            )

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            self.leave(g.reshape(self.clients, -1, *self.weight.shape).sum(1))
            return None

        return Use(forward, backward)

    @property
    def each(self) -> Tensor:
        """The parameter of each client, [clients or 1, *shape]."""
        weights = self.store.weights
        return self.weight[None] if weights is None else weights

    def leave(self, gradient: Tensor) -> None:
        """Accumulate gradients [clients, *shape] until they are absorbed."""
        self.pending = gradient if self.pending is None else self.pending + gradient

    def _by_client(self, x: Tensor) -> Tensor:
        """[clients·width, …, size] as [clients, positions, size]."""
        return x.reshape(self.clients, -1, x.shape[-1])

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.pending is None:
            self.pending = self.weight.new_zeros(self.clients, *self.weight.shape)
        self.store.absorb(self.pending, pace)
        self.pending = None

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The parameter's store."""
        return {self.name: self.store.finished(pace)}
