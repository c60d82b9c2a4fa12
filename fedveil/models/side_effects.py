"""Detects state that a module keeps between calls, which could carry data between clients.

A module is called for one client after another. Anything it writes outside its output (a buffer, an
attribute, a counter, a list in its closure, a global, a random generator) bypasses the bound and
the noise. `Footprint` records everything reachable from a module; two footprints differ where the
module has written.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import random
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import UserError

LIBRARIES = frozenset({"torch", "numpy", "fedveil", *sys.stdlib_module_names} - {"__main__"})
INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM")  # instructions of Python
SCALARS = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    *(types.GenericAlias, types.UnionType),  # annotations, which nothing can write to
)
CODE = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType),
    *(classmethod, staticmethod, property),
)


@dataclass(frozen=True)
class Footprint:
    """Every value that a module's forward pass can reach, by its path."""

    values: Mapping[str, list[object]]

    @classmethod
    def of(cls, module: nn.Module, replaced: Collection[str] = ()) -> Footprint:
        """Footprint of a module whose parameters with these names are replaced at every call."""
        own = {id(module.get_parameter(name)) for name in replaced}
        found: dict[str, list[object]] = {}
        for place, value in _Walk(own).everything(module):
            found.setdefault(place, []).append(value)
        return cls(found)

    def refuse_change(self, module: nn.Module, after: Footprint) -> None:
        """Raise `UserError` at the first value that has changed."""
        places = {**self.values, **after.values}
        for place in places:
            if self.values.get(place) != after.values.get(place):
                raise UserError(
                    f"The model {type(module).__name__} changes '{place.lstrip('.')}' when it is "
                    "called, which would carry one client's data to others without noise. Use "
                    "layers that keep no state between calls."
                )


def refuse_parameters_of_others(module: nn.Module) -> None:
    """Refuse a module that reaches trained parameters which are not its own.

    A copy of such a module computes with those of the original, and its own are never trained.
    """
    walk, own = _Walk(set()), {id(leaf) for leaf in module.parameters()}
    deque(walk.everything(module), maxlen=0)
    for place, leaf in walk.visited:
        if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in own:
            raise UserError(
                f"The model {type(module).__name__} computes with the parameter "
                f"'{place.lstrip('.')}', which is not among its own and would not be trained. "
                "Replace functions that refer to the model, such as lambdas over self, by methods. "
                "Make other layers submodules, or freeze them with requires_grad_(False)."
            )


@contextmanager
def refusing_randomness(module: nn.Module) -> Iterator[None]:
    """Refuse a module that draws from a global random generator within this context.

    The state of such a generator depends on earlier clients, and it is not the run's own.
    """
    before = _generators()
    yield
    if name := _moved(before):
        raise UserError(
            f"The model {type(module).__name__} draws from {name}'s global random generator "
            "when it is called, so one client's update would depend on the clients before it. "
            "Use torch's dropout layers, which draw from the client's own stream, or put other "
            "random layers into evaluation mode."
        )


@contextmanager
def refusing_draws(part: str) -> Iterator[None]:
    """Refuse a part, named as in "Noise Gaussian", that draws from a global random generator."""
    before = _generators()
    yield
    if name := _moved(before):
        raise UserError(
            f"{part} draws from {name}'s global random generator, so the run could not be "
            "resumed. Draw from the `rng` that the part is given, or not at all."
        )


def draws(call: Callable[[], object]) -> bool:
    """Whether a call draws from a global random generator."""
    before = _generators()
    call()
    return bool(_moved(before))


def _moved(before: list[tuple[str, object]]) -> str:
    """The name of a generator that has drawn since; empty if none has."""
    pairs = zip(before, _generators(), strict=True)
    return next((name for (name, was), (_, now) in pairs if was != now), "")


def _generators() -> list[tuple[str, object]]:
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    state = legacy["state"]
    devices = [("CUDA", each) for each in torch.cuda.get_rng_state_all()] if _cuda() else []
    if torch.backends.mps.is_available():
        devices.append(("MPS", torch.mps.get_rng_state()))
    return [
        *((name, each.numpy().tobytes()) for name, each in devices),
        ("torch", torch.get_rng_state().numpy().tobytes()),
        ("NumPy", (np.asarray(state["key"]).tobytes(), state.get("pos"))),
        ("Python", random.getstate()),
    ]


def _cuda() -> bool:
    return torch.cuda.is_available()


class _Walk:
    """Visits every object once and yields it, or its contents, for comparison."""

    def __init__(self, ignored: set[int]) -> None:
        self._seen, self._replaced = set(ignored), frozenset(ignored)
        self.visited: list[tuple[str, object]] = []  # keeps objects alive: no id is reused
        self._classes: set[int] = set()  # whose contents were visited
        self._modules: list[types.ModuleType] = []  # of the user's own code
        self._attributes: set[str] = set()  # that the code names, of whatever object

    def everything(self, start: nn.Module) -> Iterator[tuple[str, object]]:
        """(path, content) for a module and all that its code can reach by name."""
        yield from self.visit("", start)
        done: set[tuple[int, str]] = set()
        while named := self._named() - done:
            done |= named
            for place, name in sorted(named):
                module = self._modules[place]
                yield from self.visit(f"{module.__name__}.{name}", vars(module)[name])

    def _named(self) -> set[tuple[int, str]]:
        """Attributes of the user's modules that occur in the code."""
        return {
            (place, name)
            for place, module in enumerate(self._modules)
            for name in self._attributes & vars(module).keys()
        }

    def visit(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        """(path, content) for a value and everything it holds."""
        if isinstance(value, SCALARS):
            yield path, (type(value), value if value == value else "NaN")
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.visited.append((path, value))
        if isinstance(value, Tensor):
            yield path, (id(value), _digest(value))
        elif isinstance(value, np.ndarray):
            yield path, (id(value), value.dtype.str, value.shape, value.tobytes())
        elif isinstance(value, Mapping):
            yield path, (id(value), tuple(map(repr, value)))
            yield from self._items(path, ((f".{key}", item) for key, item in value.items()))
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
            yield path, (id(value), len(value))
            yield from self._items(path, ((f"[{i}]", item) for i, item in enumerate(value)))
        elif isinstance(value, nn.Module):
            yield from self._module(path, value)
        elif isinstance(value, CODE):
            yield from self._code(path, value)
        elif not isinstance(value, types.BuiltinFunctionType):
            yield from self._other(path, value)

    def _items(
        self, path: str, items: Iterable[tuple[str, object]]
    ) -> Iterator[tuple[str, object]]:
        for name, item in items:
            yield from self.visit(path + name, item)

    def _code(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        """A class, a function in any wrapping, or a module of the user's own."""
        if isinstance(value, type):
            yield path, id(value)
            if not installed(value):
                yield from self._class(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, types.ModuleType):
            if not installed(value):
                self._modules.append(value)
        else:
            inner = value.fget if isinstance(value, property) else value.__func__
            yield from self.visit(path, inner)
            if isinstance(value, types.MethodType):
                yield from self.visit(path, value.__self__)

    def _module(self, path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                for key, item in value.items():
                    yield from self.visit(f"{path}.{key}", item)
            elif not self._lists_parameters(module, name, value):
                yield from self.visit(f"{path}.{name}", value)
        yield from self._class(path, type(module))

    def _lists_parameters(self, module: nn.Module, name: str, value: object) -> bool:
        """Whether this is torch's own list of a recurrent layer's parameters, and carries nothing.

        `functional_call` sets every entry whose parameter is replaced before each call. The other
        entries must be the layer's own parameters. Weak references keep nothing.
        """
        if not isinstance(module, nn.RNNBase) or type(value) is not list:
            return False
        if name == "_flat_weight_refs":
            return all(item is None or type(item) is weakref.ref for item in value)
        if name != "_flat_weights":
            return False
        named = [module._parameters.get(each) for each in module._flat_weights_names]
        return len(named) == len(value) and all(
            own is item or id(own) in self._replaced for own, item in zip(named, value, strict=True)
        )

    def _class(self, path: str, kind: type) -> Iterator[tuple[str, object]]:
        """The state of a user's class shared by its objects, and what its `forward` uses."""
        for owner in kind.__mro__:
            if of_library(owner) or owner is object or id(owner) in self._classes:
                continue
            self._classes.add(id(owner))
            for name, value in vars(owner).items():
                if isinstance(value, types.FunctionType):
                    yield from self._function(f"{path}.{name}", value)
                elif not name.startswith("__"):
                    yield from self.visit(f"{path}.{name}", value)

    def _function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        """The closure, defaults and attributes of a function, and the globals it names."""
        if of_library(function):
            return
        self._seen.add(id(function))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if name != "__class__":
                yield from self._cell(f"{path}, variable {name}", cell)
        yield from self.visit(f"{path}, defaults", function.__defaults__)
        yield from self.visit(f"{path}, defaults", function.__kwdefaults__)
        yield from self.visit(path, vars(function))
        code = Named.by(function.__code__)
        self._attributes |= code.attributes
        for name in code.variables:
            if name in function.__globals__:
                yield from self.visit(f"global {name}", function.__globals__[name])
        for name in code.imports & sys.modules.keys():
            yield from self.visit(name, sys.modules[name])

    def _cell(self, path: str, cell: types.CellType) -> Iterator[tuple[str, object]]:
        try:
            yield from self.visit(path, cell.cell_contents)
        except ValueError:  # the cell is empty
            return

    def _other(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        """By attributes, or, for an object without any, by how it would be copied."""
        yield path, (id(value), _state(value))
        yield from self.visit(path, getattr(value, "__dict__", ()))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                yield from self.visit(f"{path}.{slot}", getattr(value, slot, None))
        yield from self._class(path, type(value))


@dataclass(frozen=True)
class Named:
    """The names in the code of a function and its inner functions."""

    variables: frozenset[str]  # outside the function
    attributes: frozenset[str]
    imports: frozenset[str]  # of modules

    @classmethod
    @functools.cache
    def by(cls, code: types.CodeType) -> Named:
        """Found by kind of instruction."""
        seen = [(step.opname, step.argval) for step in _instructions(code)]
        return cls(
            frozenset(name for kind, name in seen if kind in ("LOAD_GLOBAL", "LOAD_NAME")),
            frozenset(name for kind, name in seen if kind in ATTRIBUTES),
            frozenset(name for kind, name in seen if kind == "IMPORT_NAME"),
        )


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _instructions(part)


def installed(thing: Any) -> bool:
    """Whether a module, a class or a function is of an installed package, and not a user's own."""
    module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(module_of(thing))
    file = getattr(module, "__file__", None) or ""
    return of_library(thing) or file.startswith(INSTALLED)


def of_library(thing: Any) -> bool:
    """Whether it is of torch, NumPy, fedveil or Python."""
    return module_of(thing).partition(".")[0] in LIBRARIES


def module_of(thing: Any) -> str:
    """The module that defines a thing; a function may wrap one of another module by name."""
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    return str(getattr(thing, "__module__", ""))


def _digest(tensor: Tensor) -> bytes | None:
    """Digest of its numbers: its version does not show writes through `.data`."""
    try:
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # no numbers of its own, such as inside vmap: compared by identity
        return None
    return hashlib.blake2b(numbers.data, digest_size=16).digest()


def _state(value: Any) -> object:
    """The contents of an object without attributes, where Python exposes them."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, types.GeneratorType):
        return getattr(value.gi_frame, "f_lasti", None)
    if isinstance(value, functools._lru_cache_wrapper) and not of_library(value):
        size: Any = value.cache_info()
        return size.misses, size.currsize
    if hasattr(value, "__dict__"):
        return None
    try:
        return repr(value.__reduce_ex__(2))
    except Exception:  # the object does not expose them
        return repr(value)
