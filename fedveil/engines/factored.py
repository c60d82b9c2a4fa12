"""factored: a client's weights are never stored but kept as the factors of its gradient steps.

W_i = W − Σ g aᵀ. Parameterised operations are intercepted wherever a module calls them, so that no
module has to be rewritten; an operation that is not known here makes the engine refuse the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedveil.engines.convolution import ConvLayer, GroupedConvLayer, Source, Window
from fedveil.engines.layers import (
    EmbeddingLayer,
    Layer,
    LinearLayer,
    ScaleLayer,
    Shift,
    applied,
)
from fedveil.engines.recurrent import unrollable, unrolled
from fedveil.engines.stores import Decayed, Pace, Store, Written
from fedveil.engines.task import Parameters, Task
from fedveil.engines.updates import DenseUpdates, Group, Updates
from fedveil.parts.local import Plan

GROUP_NUMBERS = 2**25  # parameters and activations of a group: 128 MB
GROUP_WEIGHTS = 2**21  # of these, weights of clients that are written out: 8 MB
MOST = 1024  # clients of a group
FEW = 4  # examples of a client whose linear layers stay factors


class NotServedError(Exception):
    """A parameter is used by an operation that this engine does not know."""


@dataclass(frozen=True, eq=False)
class FactoredEngine:
    """All clients of a group as one batch; what differs between them is in their layers' stores."""

    task: Task
    group_size: int
    name: str = "factored"

    @classmethod
    def sized(cls, task: Task, cost: Cost, width: int) -> FactoredEngine:
        """Groups as large as memory allows, for clients whose batches have up to this width."""
        written = task.dim - cost.linear if width <= FEW else task.dim
        room = GROUP_NUMBERS // max(1, 2 * written + width * cost.numbers)
        return cls(task, max(1, min(MOST, room, GROUP_WEIGHTS // max(1, written))))

    def updates(self, x: Tensor, group: Group) -> Updates:
        """The plan's steps: forward, backward, walk."""
        start, plan = self.task.unflatten(x), group.plan
        pace = Pace.start(plan)
        module, names = self.task.here()
        work = _Group(module, names, start, len(group.clients), plan.repeated)
        for inputs, labels, weights in work.batches(group):
            self._differentiate(work, pace, inputs, labels, weights)
            for layer in work.layers.values():
                layer.absorb(pace)
            pace.advance()
        sizes = [leaf.numel() for leaf in start.values()]
        return FactoredUpdates(tuple(_stores(work, start, pace)), sizes, len(group.clients))

    def _differentiate(
        self, work: _Group, pace: Pace, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> None:
        """Leave the gradients of each client's mean loss with the layers."""
        with torch.enable_grad(), _Interception(work, pace):
            outputs = work.outputs(inputs)
        if outputs.requires_grad:
            slope = self.task.slope_of_losses(outputs.detach(), labels, weights)
            torch.autograd.backward(outputs, slope)


@dataclass
class _Group:
    """The layers of a group of clients, made when they are first used."""

    module: nn.Module
    names: dict[int, str]  # of the module's parameters, by id
    start: Parameters  # what they stand for in this round
    clients: int
    repeated: bool
    layers: dict[str, Layer] = field(default_factory=dict)
    anchor: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the client mapped over
    numbers: int = 0  # that go through the layers of a forward pass
    products: int = 0  # of numbers that are added up in it
    source: Source | None = None  # of the batch of this step

    def batches(self, group: Group) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each step's inputs [clients·width, …], labels and weights likewise."""
        if self.repeated or not group.plan.revisits(group.sizes):
            for batch in group.steps():
                inputs, labels, weights = (part.flatten(0, 1) for part in batch)
                yield inputs, labels, weights
            return
        examples, classes, starts = group.together()
        rows, weights = (part.flatten(1) for part in group.plan.positions(starts))
        for mine, shares in zip(rows, weights, strict=True):
            self.source = Source(examples, mine, examples.index_select(0, mine))
            yield self.source.batch, classes.index_select(0, mine), shares

    def outputs(self, inputs: Tensor) -> Tensor:
        """The module's answers, [clients·width, …], where it sees one example at a time.

        Whatever a module does with its batch, `vmap` keeps examples apart (docs/privacy.md, "One
        client alone"). Layers see all of them together: each use has an anchor that is mapped over.
        """

        def alone(example: Tensor, anchor: Tensor) -> Tensor:
            self.anchor = anchor
            answer: Tensor = self.module(example[None])[0]
            return answer

        answers: Tensor = vmap(alone)(inputs, torch.zeros(len(inputs), requires_grad=True))
        return answers

    def count(self, func: Any, args: Any, output: Tensor) -> None:
        """What one use of a parameter costs."""
        looked_at = args[1][0].numel() if func in (F.linear, F.conv2d) else 1
        patches = output[:, 0].numel() * looked_at if func is F.conv2d else 0
        self.numbers += output.numel() + patches
        self.products += output.numel() * looked_at

    def name_of(self, tensor: object) -> str | None:
        """The name of a parameter; None for any other tensor."""
        return self.names.get(id(tensor))

    def shift(self, tensor: Tensor | None) -> Shift | None:
        """A vector parameter, if it is one that is trained."""
        name = self.name_of(tensor)
        if tensor is None or name is None:
            return None
        return Shift.start(name, self.start[name], self.clients)


class _Interception(TorchFunctionMode):
    """Sends parameterised operations to their layers, and lets everything else pass."""

    def __init__(self, work: _Group, pace: Pace, counting: bool = False) -> None:
        super().__init__()
        self.work, self.pace, self.counting = work, pace, counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            output = handler(self, *args, **kwargs)
            if self.counting:
                self.work.count(func, args, output)
            return output
        if unrollable(func, args):
            with self:
                return unrolled(func, args)
        for leaf in _tensors((args, kwargs)):
            name = self.work.name_of(leaf)
            if name is not None and not _harmless(func):
                raise NotServedError(f"{name} goes through {_called(func)}")
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Cost:
    """What one example costs in a forward pass, and how much of the model is linear layers."""

    numbers: int  # kept of it
    products: int  # of two numbers, added up
    linear: int  # numbers of linear layers' weights


def cost(task: Task, example: Tensor) -> Cost:
    """From one example [1, …]; a NotServedError says which parameter is used in another way."""
    module, names = task.here()
    work = _Group(module, names, task.unflatten(task.flatten()), 1, repeated=False)
    pace = Pace.start(Plan(torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1)))
    with torch.no_grad(), _Interception(work, pace, counting=True):
        work.outputs(example)
    layers = [layer for layer in work.layers.values() if isinstance(layer, LinearLayer)]
    linear = sum(layer.weight.numel() for layer in layers)
    return Cost(work.numbers + example.numel(), work.products, linear)


def _harmless(func: Any) -> bool:
    """Questions about a tensor that its numbers do not answer, such as its shape."""
    return _called(func) in (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse"),
        *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous"),
        *("__len__", "is_quantized", "is_mkldnn", "is_nested"),
    )


def _called(func: Any) -> str:
    """What a function is called; for a property, the property's name."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def _linear(
    mode: _Interception, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        return _shifted(mode, F.linear(input, weight), bias, input.dim() - 1)
    if name not in mode.work.layers:
        shift = mode.work.shift(bias)
        mode.work.layers[name] = LinearLayer(
            name, mode.work.start[name], mode.work.clients, shift, mode.work.repeated
        )
    layer = mode.work.layers[name]
    if not isinstance(layer, LinearLayer):
        raise NotServedError(f"{name} is shared by operations of two kinds")
    output = applied(layer.use(mode.pace), input, mode.work.anchor)
    frozen = bias is not None and layer.bias is None
    return output + bias if frozen and bias is not None else output


def _conv2d(
    mode: _Interception,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        output = F.conv2d(input, weight, None, stride, padding, dilation, groups)
        return _shifted(mode, output, bias, 1)
    window = Window(_pair(weight.shape[2:]), _pair(stride), _pair(dilation))
    named = isinstance(padding, str)
    images, window = window.around(input, padding if named else _pair(padding))
    if name not in mode.work.layers:
        facts = (name, mode.work.start[name], mode.work.clients, mode.work.shift(bias), window)
        mode.work.layers[name] = (
            ConvLayer(*facts, mode.work.repeated)
            if groups == 1
            else GroupedConvLayer(*facts, groups)
        )
    layer = mode.work.layers[name]
    if not isinstance(layer, ConvLayer | GroupedConvLayer) or layer.window != window:
        raise NotServedError(f"{name} is used in two ways")
    if bias is not None and layer.bias is None:
        raise NotServedError(f"the bias of {name} is frozen")
    if isinstance(layer, GroupedConvLayer):
        return applied(layer.use(), images, mode.work.anchor)
    return applied(layer.use(mode.work.source), images, mode.work.anchor)


def _shifted(mode: _Interception, output: Tensor, bias: Tensor | None, axis: int) -> Tensor:
    """The bias behind a frozen weight, trained or frozen itself."""
    if bias is None or mode.work.name_of(bias) is not None:
        return _scaled(mode, output, None, bias, axis)
    return output + bias.view(-1, *[1] * (output.dim() - axis - 1))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _embedding(
    mode: _Interception, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        return F.embedding(input, weight, *args, **kwargs)
    if any(args) or any(value not in (None, False, 2.0) for value in kwargs.values()):
        raise NotServedError(
            f"{name} is an embedding with padding, a largest norm or sparse gradients"
        )
    if name not in mode.work.layers:
        shared, clients = mode.work.start[name], mode.work.clients
        mode.work.layers[name] = EmbeddingLayer(name, shared, clients, Written(shared, clients))
    layer = mode.work.layers[name]
    if not isinstance(layer, EmbeddingLayer):
        raise NotServedError(f"{name} is shared by operations of two kinds")
    return applied(layer.use(), input, mode.work.anchor)


def _group_norm(
    mode: _Interception,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # With channels last, torch's sums of squares lose digits and take longer.
    normal = F.group_norm(input.contiguous(), num_groups, None, None, eps)
    return _scaled(mode, normal, weight, bias, 1)


def _layer_norm(
    mode: _Interception,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scaled(mode, normal, weight, bias, input.dim() - len(normalized_shape))


def _scaled(
    mode: _Interception, normal: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int
) -> Tensor:
    """The trained scale and shift behind a normalization."""
    names = [mode.work.name_of(part) for part in (weight, bias) if part is not None]
    if not names:
        return normal
    if None in names:
        raise NotServedError(
            "a normalization has one trained and one frozen parameter, or frozen ones"
        )
    name = str(names[0])
    if name not in mode.work.layers:
        scale, shift = mode.work.shift(weight), mode.work.shift(bias)
        mode.work.layers[name] = ScaleLayer(scale, shift, mode.work.clients)
    layer = mode.work.layers[name]
    if not isinstance(layer, ScaleLayer):
        raise NotServedError(f"{name} is shared by operations of two kinds")
    return applied(layer.use(axis), normal, mode.work.anchor)


HANDLERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.embedding: _embedding,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}


def _stores(work: _Group, start: Parameters, pace: Pace) -> Iterator[Store]:
    """Every parameter's store, in the order of the flat vector."""
    found: dict[str, Store] = {}
    for layer in work.layers.values():
        found |= layer.finished(pace)
    for name, leaf in start.items():
        yield found.get(name) or Decayed(leaf, pace.gamma)


class FactoredUpdates:
    """The differences y_i − x, parameter by parameter, times a number."""

    def __init__(
        self, stores: tuple[Store, ...], sizes: list[int], clients: int, scale: float = 1.0
    ) -> None:
        self._stores, self._sizes, self._clients, self._scale = stores, sizes, clients, scale
        self._lengths: Tensor | None = None  # ‖Δ_i‖, once somebody has asked

    def norms(self) -> Tensor:
        """√Σ‖Δ_i‖² over the parameters, in float64."""
        if self._lengths is None:
            squares = torch.zeros(self._clients, dtype=torch.float64)
            for store in self._stores:
                squares += store.squares()
            self._lengths = squares.sqrt()
        return self._lengths * abs(self._scale)

    def dots(self, vector: Tensor) -> Tensor:
        """Σ over the parameters, through whatever holds them."""
        found = torch.zeros(self._clients, dtype=torch.float64)
        for store, part in zip(self._stores, torch.split(vector, self._sizes), strict=True):
            found += store.dots(part)
        return found * self._scale

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """Σ scale_i·u_i over the reports whose scale is not 0."""
        used = torch.nonzero(scale).flatten()
        weights = (scale[used] * self._scale).float()
        return torch.cat([store.weighted_sum(weights, used) for store in self._stores])

    def rows(self) -> Tensor:
        """The reports written out."""
        rows = torch.cat([store.rows() for store in self._stores], dim=1)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def affine(self, scale: float, share: float, x: Tensor) -> Updates:
        """Scaled as they are; written out where a share of x is added."""
        if share == 0.0:
            scale *= self._scale
            scaled = FactoredUpdates(self._stores, self._sizes, self._clients, scale)
            scaled._lengths = self._lengths
            return scaled
        return DenseUpdates(self.rows()).affine(scale, share, x)
