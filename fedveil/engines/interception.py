"""Intercepts the operations on a module's parameters, for all clients of a group at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fedveil.engines.convolution import Source
from fedveil.engines.dropout import Masks
from fedveil.engines.layers import Layer, LinearLayer, Shift, WholeLayer, applied
from fedveil.engines.operations import HANDLERS, LOOKING_AT, PATCHING, NotServedError, Placed
from fedveil.engines.rewriting import rewritable, rewritten
from fedveil.engines.stores import Pace, Written
from fedveil.engines.task import Parameters, Task
from fedveil.engines.updates import Group
from fedveil.parts.local import LocalPlan

SMALL = 2**16  # numbers of a parameter that every example may get a copy of
DETACHING = (torch.detach, torch.Tensor.detach)


@dataclass
class Work:
    """The layers of a group of clients, created at their first use."""

    task: Task
    module: nn.Module
    names: dict[int, str]  # the module's parameter names, by id
    start: Parameters  # their values in this round
    clients: int
    repeated: bool  # whether every step has the same inputs, and so what follows from them alone
    layers: dict[str, Layer] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)  # vectors that belong to a layer
    anchor: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the mapped client
    numbers: int = 0  # activations in a forward pass
    products: int = 0  # multiply-adds in a forward pass
    source: Source | None = None  # of this step's batch
    masks: Masks | None = None  # of the mapped example

    @classmethod
    def begin(cls, task: Task, x: Tensor, clients: int, repeated: bool) -> Work:
        """All clients at x."""
        return cls(task, *task.here(), task.unflatten(x), clients, repeated)

    def batches(self, group: Group) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs [clients·width, …], labels and weights of each step."""
        if group.plan.repeated or not group.plan.revisits(group.sizes):
            for batch in group.steps():
                inputs, labels, weights = (part.flatten(0, 1) for part in batch)
                yield inputs, labels, weights
            return
        examples, classes, starts = group.together()
        rows, weights = (part.flatten(1) for part in group.positions(starts))
        for mine, shares in zip(rows, weights, strict=True):
            self.source = Source(examples, mine, examples.index_select(0, mine))
            yield self.source.batch, classes.index_select(0, mine), shares

    def outputs(self, inputs: Tensor, seeds: Tensor | None = None) -> Tensor:
        """The module's outputs, [clients·width, …]; the module sees one example at a time.

        `vmap` keeps examples apart, whatever a module does with its batch (docs/privacy.md, "One
        client alone"). Layers see all examples together: each use has an anchor that is mapped
        over.
        """

        def alone(example: Tensor, anchor: Tensor, *seed: Tensor) -> Tensor:
            self.anchor = anchor
            self.masks = Masks(seed[0]) if seed else None
            return self.task.called(self.module, example[None])[0]

        anchors = torch.zeros(len(inputs), device=inputs.device, requires_grad=True)
        answers: Tensor = vmap(alone)(inputs, anchors, *([] if seeds is None else [seeds]))
        return answers

    def count(self, func: Any, given: dict[str, Any], output: Tensor) -> None:
        """Add the cost of one use of a parameter; arguments are given by name."""
        looked_at = LOOKING_AT[func](given) if func in LOOKING_AT else 1
        patches = output[:, 0].numel() * looked_at if func in PATCHING else 0
        self.numbers += output.numel() + patches
        self.products += output.numel() * looked_at

    def name_of(self, tensor: object) -> str | None:
        """The name of a parameter; None for any other tensor."""
        return self.names.get(id(tensor))

    def shift(self, tensor: Tensor | None) -> Shift | None:
        """The layer of a vector parameter, if it is trained."""
        name = self.name_of(tensor)
        if tensor is None or name is None:
            return None
        if name in self.claimed or name in self.layers:
            raise NotServedError(f"{name} is used in two different ways")
        self.claimed.add(name)
        return Shift.start(name, self.start[name], self.clients)

    def whole(self, name: str) -> WholeLayer:
        """The layer of a parameter that is stored in full and used in any way."""
        if name not in self.layers and name not in self.claimed:
            shared = self.start[name]
            store = Written(shared, self.clients)
            self.layers[name] = WholeLayer(name, shared, self.clients, store)
        layer = self.layers.get(name)
        if not isinstance(layer, WholeLayer):
            raise NotServedError(f"{name} is shared by two kinds of operations")
        return layer

    def value(self, name: str, func: Any) -> Tensor:
        """The parameter of the mapped example's client, for an operation without a layer."""
        shared = self.start[name]
        if shared.numel() > SMALL or shared.dim() > 3:
            raise NotServedError(
                f"{name}, a parameter of shape {list(shared.shape)}, is used by {_called(func)}, "
                "which this engine does not support"
            )
        self.numbers += shared.numel()
        return applied(self.whole(name).value(), shared[None], self.anchor)[0]


class Interception(TorchFunctionMode):
    """Sends parameterised operations to their layers and leaves all others unchanged."""

    def __init__(self, work: Work, pace: Pace, counting: bool = False) -> None:
        super().__init__()
        self.work, self.pace, self.counting = work, pace, counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            output = handler(Placed(self.work, self.pace), *args, **kwargs)
            if output is not NotImplemented:
                if self.counting:
                    given = signature(handler).bind(None, *args, **kwargs).arguments
                    self.work.count(func, given, output)
                elif not torch.is_grad_enabled():  # an input without gradient may still change
                    self.work.repeated = False
                return output
        if func in DETACHING:
            self.work.repeated = False
        if rewritable(func, args, kwargs):
            with self:
                return rewritten(func, args, kwargs, self.work.masks)
        if not _harmless(func):
            args, kwargs = self._with_values(func, args, kwargs)
        return func(*args, **kwargs)

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments, with each client's own parameters."""
        found = {id(leaf): self.work.name_of(leaf) for leaf in _tensors((args, kwargs))}
        values = {
            place: self.work.value(name, func) for place, name in found.items() if name is not None
        }
        if not values:
            return args, kwargs
        return tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))


@dataclass(frozen=True)
class ForwardCost:
    """Cost of one example in a forward pass, and the size of the linear layers."""

    numbers: int  # activations kept
    products: int  # multiply-adds
    linear: int  # parameters of linear layers' weights


def cost(task: Task, example: Tensor) -> ForwardCost:
    """Measured on one example [1, …]; a NotServedError names the first unsupported parameter."""
    work = Work.begin(task, task.flatten().to(example.device), 1, repeated=False)
    plan = LocalPlan(torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1))
    pace = Pace.start(plan, example.device)
    with torch.no_grad(), Interception(work, pace, counting=True):
        work.outputs(example)
    layers = [layer for layer in work.layers.values() if isinstance(layer, LinearLayer)]
    linear = sum(layer.weight.numel() for layer in layers)
    return ForwardCost(work.numbers + example.numel(), work.products, linear)


def _harmless(func: Any) -> bool:
    """Whether a function reads only metadata of a tensor, such as its shape."""
    return _called(func) in (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse"),
        *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous"),
        *("__len__", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "element_size"),
    )


def _called(func: Any) -> str:
    """The name of a function, or of a property."""
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
