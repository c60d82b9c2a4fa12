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
from torch.nn.grad import conv2d_input

from fedveil.engines.stores import Decayed, Factors, Pace, Store, Written, worth_writing


class Layer(Protocol):
    """The parameters of one operation, used once or more in a forward pass."""

    def absorb(self, pace: Pace) -> None:
        """Walk by the gradients that the backward pass has left here."""

    def finished(self, pace: Pace) -> dict[str, Store]:
        """How far each parameter has moved, by name."""


class _Site(Function):
    """One use of a layer: its forward and backward passes as plain functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, use: Use) -> Tensor:
        """`anchor` requires a gradient, so that a backward pass comes by even if x does not."""
        ctx.use = use
        return _owned(use.forward(x.detach()))

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

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, bool], Tensor | None]


def applied(use: Use, x: Tensor, anchor: Tensor) -> Tensor:
    """Run a use as a step of autograd."""
    output: Tensor = _Site.apply(x, anchor, use)  # type: ignore[no-untyped-call]
    return output


@dataclass
class Shift:
    """A bias or any other vector that is added, [size]: Δ_i is written out."""

    name: str
    store: Written
    pending: Tensor | None = None

    def leave(self, gradient: Tensor) -> None:
        """Add up gradients [clients, size] until they are absorbed."""
        self.pending = gradient if self.pending is None else self.pending + gradient

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.pending is None:
            self.pending = torch.zeros_like(self.store.moved)
        self.store.absorb(self.pending, pace)
        self.pending = None


@dataclass
class LinearLayer:
    """y = x·(W + Δ_i)ᵀ + b + β_i: Δ_i as factors while they are few, written out after that."""

    name: str
    weight: Tensor  # [out, in]
    clients: int
    bias: Shift | None
    repeated: bool  # whether every step of the plan has the same batch
    store: Factors | Written | None = None
    pending: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    base: Tensor | None = None  # x·Wᵀ, where x is the same in every step

    def use(self, pace: Pace) -> Use:
        """One use in this step's forward pass."""
        kept: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            kept.append(x)
            return self._forward(x, pace)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            (x,) = kept
            self._leave(self._in_groups(x), self._in_groups(g), constant=not wanted)
            return self._back(g, pace) if wanted else None

        return Use(forward, backward)

    def _in_groups(self, x: Tensor) -> Tensor:
        """[clients·width, …, size] as [clients, positions, size]."""
        return x.reshape(self.clients, -1, x.shape[-1])

    def _forward(self, x: Tensor, pace: Pace) -> Tensor:
        if isinstance(self.store, Written):
            y = torch.bmm(self._in_groups(x), self.store.weights().transpose(1, 2))
        else:
            y = self._shared(x)
            if self.store is not None:
                y = _grown(y, pace) + self.store.correction(self._in_groups(x))
        if self.bias is not None:
            y = y + self.bias.store.weights()[:, None, :]
        return y.reshape(*x.shape[:-1], -1)

    def _shared(self, x: Tensor) -> Tensor:
        """x·Wᵀ, multiplied once where x never changes."""
        if self.base is not None and self.store is not None:
            return self.base
        y = self._in_groups(F.linear(x, self.weight))
        self.base = y.clone() if self.repeated and self.bias is None else y
        return y

    def _back(self, g: Tensor, pace: Pace) -> Tensor:
        if isinstance(self.store, Written):
            back = torch.bmm(self._in_groups(g), self.store.weights())
        else:
            back = self._in_groups(g @ self.weight)
            if self.store is not None:
                back = _grown(back, pace) + self.store.back(self._in_groups(g))
        return back.reshape(*g.shape[:-1], -1)

    def _leave(self, a: Tensor, g: Tensor, constant: bool) -> None:
        self.pending.append((a, g, constant))
        if self.bias is not None:
            self.bias.leave(g.sum(dim=1))

    def absorb(self, pace: Pace) -> None:
        """Take up the step's factors, or walk what is written out."""
        uses, self.pending = self.pending, []
        if self.bias is not None:
            self.bias.absorb(pace)
        if not uses:
            uses = [self._nothing()]
        a = uses[0][0] if len(uses) == 1 else torch.cat([a for a, _, _ in uses], 1)
        g = uses[0][1] if len(uses) == 1 else torch.cat([g for _, g, _ in uses], 1)
        if self.store is None:
            merged = self.repeated and len(uses) == 1 and uses[0][2]
            rank = a.shape[1] * (1 if merged else pace.plan.steps)
            few = merged or pace.plan.steps == 1 or not worth_writing(rank, self.weight)
            start = Factors(self.weight, merged)
            self.store = start if few else Written.start(self.weight, self.clients)
        if isinstance(self.store, Factors):
            self.store.absorb(a, g, pace)
        else:
            self.store.absorb(torch.bmm(g.transpose(1, 2), a), pace)
        if not (isinstance(self.store, Factors) and self.store.merged):
            self.base = None

    def _nothing(self) -> tuple[Tensor, Tensor, bool]:
        """A step in which the layer was not used."""
        out, size = self.weight.shape
        return torch.zeros(self.clients, 1, size), torch.zeros(self.clients, 1, out), False

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, and the bias's."""
        store: Store = Decayed(self.weight, pace.gamma)
        if isinstance(self.store, Factors):
            store = self.store.finished(pace)
        elif self.store is not None:
            store = self.store
        return {self.name: store} | ({self.bias.name: self.bias.store} if self.bias else {})


def _grown(y: Tensor, pace: Pace) -> Tensor:
    """What the shared weights give, with the part that decay has taken of them."""
    return y * (1 + pace.gamma)[:, None, None] if pace.plan.weight_decay else y


@dataclass
class ConvLayer:
    """A convolution, as a product with unfolded patches once clients differ; Δ_i is written out."""

    name: str
    weight: Tensor  # [out, in/groups, height, width]
    clients: int
    bias: Shift | None
    options: dict[str, Any]
    store: Written | None = None
    pending: Tensor | None = None

    def use(self, pace: Pace) -> Use:
        """One use in this step's forward pass: shared weights at first, each client's own later."""
        kept: dict[str, Tensor] = {}

        def forward(x: Tensor) -> Tensor:
            kept["x"] = x  # patches are made again in the backward pass: they take much room
            if self.store is None:
                y = F.conv2d(x, self.weight, **self.options)
            else:
                y = self._product(self._patches(x), x.shape)
            if self.bias is not None:
                shift = self.bias.store.weights().repeat_interleave(len(x) // self.clients, 0)
                y = y + shift[:, :, None, None]
            return y

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            x = kept["x"]
            self._leave(self._patches(x), g)
            if not wanted:
                return None
            if self.store is None:
                back: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
                    x.shape, self.weight, g, **self.options
                )
                return back
            return self._folded(g, x.shape)

        return Use(forward, backward)

    def _patches(self, x: Tensor) -> Tensor:
        """[clients, width, in·height·width, positions]."""
        options = {name: self.options[name] for name in ("padding", "dilation", "stride")}
        patches = F.unfold(x, self.weight.shape[2:], **options)
        return patches.reshape(self.clients, -1, *patches.shape[1:])

    def _weights(self) -> Tensor:
        assert self.store is not None
        return self.store.weights().flatten(2)[:, None]  # [clients, 1, out, in·height·width]

    def _product(self, patches: Tensor, shape: torch.Size) -> Tensor:
        y = torch.matmul(self._weights(), patches).flatten(0, 1)
        return y.reshape(*y.shape[:2], *_conv_size(shape, self.weight, self.options))

    def _leave(self, patches: Tensor, g: Tensor) -> None:
        per_example = g.flatten(2).reshape(*patches.shape[:2], g.shape[1], -1)
        gradient = torch.matmul(per_example, patches.transpose(2, 3)).sum(dim=1)
        gradient = gradient.reshape(self.clients, *self.weight.shape)
        self.pending = gradient if self.pending is None else self.pending + gradient
        if self.bias is not None:
            self.bias.leave(per_example.sum(dim=(1, 3)))

    def _folded(self, g: Tensor, shape: torch.Size) -> Tensor:
        per_example = g.flatten(2).reshape(self.clients, -1, g.shape[1], g[0, 0].numel())
        patches = torch.matmul(self._weights().transpose(2, 3), per_example).flatten(0, 1)
        options = {name: self.options[name] for name in ("padding", "dilation", "stride")}
        folded: Tensor = F.fold(patches, shape[2:], self.weight.shape[2:], **options)
        return folded

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        if self.store is None:
            self.store = Written.start(self.weight, self.clients)
        slope = torch.zeros_like(self.store.moved) if self.pending is None else self.pending
        self.store.absorb(slope, pace)
        self.pending = None
        if self.bias is not None:
            self.bias.absorb(pace)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, and the bias's."""
        store: Store = self.store or Decayed(self.weight, pace.gamma)
        return {self.name: store} | ({self.bias.name: self.bias.store} if self.bias else {})


def _conv_size(shape: torch.Size, weight: Tensor, options: dict[str, Any]) -> list[int]:
    """Height and width of a convolution's output."""
    return [
        (size + 2 * pad - gap * (kernel - 1) - 1) // stride + 1
        for size, kernel, pad, gap, stride in zip(
            shape[2:],
            weight.shape[2:],
            options["padding"],
            options["dilation"],
            options["stride"],
            strict=True,
        )
    ]


@dataclass
class ScaleLayer:
    """y = x̂·(w + ω_i) + b + β_i after a normalization: vectors over channels, written out.

    `axes` says how x̂ [clients·width, …] is seen as [clients, before, size, behind].
    """

    scale: Shift | None
    shift: Shift | None
    clients: int

    def use(self, behind: int) -> Use:
        """One use in this step's forward pass; `behind` numbers follow each channel."""
        kept: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            kept.append(x)
            y = self._seen(x, behind)
            if self.scale is not None:
                y = y * self.scale.store.weights().flatten(1)[:, None, :, None]
            if self.shift is not None:
                y = y + self.shift.store.weights().flatten(1)[:, None, :, None]
            return y.reshape(x.shape)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            (x,) = kept
            seen = self._seen(g, behind)
            if self.shift is not None:
                self.shift.leave(seen.sum(dim=(1, 3)).reshape_as(self.shift.store.moved))
            if self.scale is None:
                return g
            left = (seen * self._seen(x, behind)).sum(dim=(1, 3))
            self.scale.leave(left.reshape_as(self.scale.store.moved))
            back = seen * self.scale.store.weights().flatten(1)[:, None, :, None]
            return back.reshape(x.shape) if wanted else None

        return Use(forward, backward)

    def _seen(self, x: Tensor, behind: int) -> Tensor:
        known = self.scale or self.shift
        assert known is not None
        return x.reshape(self.clients, -1, known.store.shared.numel(), behind)

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        for part in (self.scale, self.shift):
            if part is not None:
                part.absorb(pace)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """Both vectors' stores."""
        return {part.name: part.store for part in (self.scale, self.shift) if part is not None}


@dataclass
class EmbeddingLayer:
    """y = (W + Δ_i)[token]: Δ_i is written out."""

    name: str
    weight: Tensor  # [tokens, size]
    clients: int
    store: Written
    pending: Tensor | None = None

    def use(self, tokens: Tensor) -> Use:
        """One use in this step's forward pass; tokens [clients·width, …]."""
        count, size = self.weight.shape
        mine = tokens.reshape(self.clients, -1)
        places = mine + count * torch.arange(self.clients)[:, None]

        def forward(_: Tensor) -> Tensor:
            table = self.store.weights().reshape(-1, size)
            return F.embedding(places, table).reshape(*tokens.shape, size)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            left = torch.zeros(self.clients * count, size)
            left.index_add_(0, places.flatten(), g.reshape(-1, size))
            left = left.reshape(self.clients, count, size)
            self.pending = left if self.pending is None else self.pending + left
            return None

        return Use(forward, backward)

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        slope = torch.zeros_like(self.store.moved) if self.pending is None else self.pending
        self.store.absorb(slope, pace)
        self.pending = None

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The table's store."""
        return {self.name: self.store}
