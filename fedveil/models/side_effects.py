"""Detects state that a module or a loss keeps between calls, which could carry clients' data.

A module is called for one client after another. Anything it writes outside its output (a buffer, an
attribute, a counter, a list in its closure, a global, a random generator) bypasses the bound and
the noise. `Footprint` lists every place that a module or a loss can reach, with what is there, and
finds the first place that has changed since.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.models.references import Named, imported, installed, of_library

SCALARS = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    *(types.GenericAlias, types.UnionType),  # annotations, which nothing can write to
)
CODE = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType),
    *(classmethod, staticmethod, property),
)
FEW = 2**14  # bytes of a tensor that are compared after every client; of more, their sum is
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
MISSING = object()
LOCKS = type(Lock()) | type(RLock())  # which another thread may hold for a moment
Held = Mapping[Any, object] | Collection[object]  # by name, or in order


def _never(name: object, value: object) -> bool:
    return False


@dataclass(frozen=True)
class Place:
    """A place that holds objects: how it is read, and what it held."""

    path: str
    read: Callable[[], Held]
    before: Held  # keeps objects alive: no other object has their identity
    derived: Callable[[Any, object], bool] = _never  # entries that are set again and carry nothing

    def changed(self) -> str | None:
        """The path of the first entry that is not the same; None if all are."""
        now, before = self.read(), self.before
        if len(now) == len(before) and (not before or _same(now, before)):
            return None
        return self._first(_entries(now), _entries(self.before))

    def _first(self, now: dict[str, object], before: dict[str, object]) -> str | None:
        for name in {**before, **now}:
            new, old = now.get(name, MISSING), before.get(name, MISSING)
            if not alike(new, old) and not self.derived(name, old if new is MISSING else new):
                return self.path + name
        return None


@dataclass(frozen=True)
class Fact:
    """What an object shows of its contents, such as a digest, a position or a count."""

    path: str
    read: Callable[[], object]
    before: object

    def changed(self) -> str | None:
        """The path if it shows something else now."""
        return None if self.read() == self.before else self.path


@dataclass(frozen=True)
class Footprint:
    """Every place that a module or a loss can reach, and what was there."""

    title: str  # such as "The model Net"
    places: tuple[Place | Fact, ...]
    digests: tuple[Fact, ...]  # of large tensors

    @classmethod
    def of(cls, thing: object, title: str = "", replaced: Collection[str] = ()) -> Footprint:
        """Footprint of a module, whose parameters of these names are replaced at every call."""
        own: set[int] = set()
        if isinstance(thing, nn.Module):
            own = {id(thing.get_parameter(name)) for name in replaced}
        walk = _Walk(own)
        walk.everything(thing)
        return cls(title or f"The model {type(thing).__name__}", (*walk.places,), (*walk.digests,))

    def refuse_change(self, briefly: bool = False) -> None:
        """Raise `UserError` at the first place that has changed.

        `briefly` is for after every client: of the numbers of large tensors it compares the sum.
        """
        for place in self.places if briefly else (*self.places, *self.digests):
            path = place.changed()
            if path is not None:
                raise UserError(
                    f"{self.title} changes '{path.lstrip('.')}' when it is called, which would "
                    "carry one client's data to others without noise. "
                    f"Use {self._without_state} no state between calls."
                )

    @property
    def _without_state(self) -> str:
        return "layers that keep" if self.title.startswith("The model") else "a function that keeps"


def alike(now: object, before: object) -> bool:
    """Whether it is the same object, or an equal number, text or tuple of these."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(alike, now, before))
    return isinstance(now, SCALARS) and (now == before or (now != now and before != before))


def _same(now: Held, before: Held) -> bool:
    """Whether two collections of one length hold the same objects, under the same names."""
    same = all(map(operator.is_, now, before))
    if not same or not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return same
    return all(map(operator.is_, now.values(), before.values()))


def _entries(held: Held) -> dict[str, object]:
    if isinstance(held, Mapping):
        return {_name(key): value for key, value in held.items()}
    return {f"[{place}]": value for place, value in enumerate(held)}


def _name(key: object) -> str:
    return key if isinstance(key, str) else f"{type(key).__name__} {_known(key)}"


def _known(key: object) -> str:
    scalar = isinstance(key, SCALARS)
    return repr(key) if scalar or isinstance(key, tuple | torch.Size) else f"at {id(key)}"


def refuse_parameters_of_others(module: nn.Module) -> None:
    """Refuse a module that reaches trained parameters which are not its own.

    A copy of such a module computes with those of the original, and its own are never trained.
    """
    walk, own = _Walk(set()), {id(leaf) for leaf in module.parameters()}
    walk.everything(module)
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
    """Visits every object once, and lists the places that can be written to."""

    def __init__(self, ignored: set[int]) -> None:
        self.places: list[Place | Fact] = []
        self.digests: list[Fact] = []
        self.visited: list[tuple[str, object]] = []  # keeps objects alive: no id is reused
        self._seen, self._replaced = set(ignored), frozenset(ignored)
        self._classes: set[int] = set()  # whose contents were visited
        self._modules: list[types.ModuleType] = []  # of the user's own code
        self._attributes: set[str] = set()  # that the code names, of whatever object
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}  # and the names used

    def everything(self, start: object) -> None:
        """An object, and all that its code can reach by name."""
        self.visit("", start)
        done: set[tuple[int, str]] = set()
        while named := self._named() - done:
            done |= named
            for place, name in sorted(named):
                module = self._modules[place]
                self.visit(f"{module.__name__}.{name}", vars(module)[name])
        for module in self._modules:
            self._variables(f"{module.__name__}.", vars(module), self._attributes)
        for space, names in self._globals.values():
            self._variables("global ", space, names)

    def _variables(self, path: str, space: dict[str, Any], names: set[str]) -> None:
        """A place that was visited already: the variables of these names."""
        read = partial(_common, space, frozenset(names))
        self.places.append(Place(path, read, read()))

    def _named(self) -> set[tuple[int, str]]:
        """Attributes of the user's modules that occur in the code."""
        return {
            (place, name)
            for place, module in enumerate(self._modules)
            for name in self._attributes & vars(module).keys()
        }

    def visit(self, path: str, value: Any) -> None:
        """A value and everything it holds."""
        if isinstance(value, SCALARS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.visited.append((path, value))
        if isinstance(value, Tensor | np.ndarray):
            self._numbers(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, Mapping | list | tuple | set | frozenset) or _is_deque(value):
            self._container(path, value)
        elif isinstance(value, CODE):
            self._code(path, value)
        elif not isinstance(value, types.BuiltinFunctionType | LOCKS):
            self._other(path, value)

    def _hold(
        self, path: str, read: Callable[[], Held], derived: Callable[[Any, object], bool] = _never
    ) -> None:
        """A place, and what it holds."""
        found = read()
        before: Held = dict(found.items()) if isinstance(found, Mapping) else tuple(found)
        self.places.append(Place(path, read, before, derived))
        for name, item in _entries(before).items():
            if not derived(name, item):
                self.visit(path + name, item)

    def _numbers(self, path: str, value: Tensor | np.ndarray) -> None:
        few = value.nbytes <= FEW
        look = _digest if few else _sum
        self.places.append(Fact(path, partial(look, value), look(value)))
        if not few:
            self.digests.append(Fact(path, partial(_digest, value), _digest(value)))
        if hasattr(value, "__dict__"):
            self._hold(f"{path}.", partial(vars, value))

    def _container(self, path: str, value: Any) -> None:
        """The items; nobody can write to those of a tuple."""
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                self.visit(f"{path}[{place}]", item)
        else:
            with suppress(Exception):  # a user's own mapping may raise anything
                mapping = isinstance(value, Mapping)
                self._hold(f"{path}." if mapping else path, partial(_itself, value))
        if type(value) not in PLAIN:
            self._held_by(path, value)

    def _code(self, path: str, value: Any) -> None:
        """A class, a function in any wrapping, or a module of the user's own."""
        if isinstance(value, type):
            if not installed(value):
                self._class(path, value)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.ModuleType):
            if not installed(value):
                self._modules.append(value)
        else:
            inner = value.fget if isinstance(value, property) else value.__func__
            self.visit(path, inner)
            if isinstance(value, types.MethodType):
                self.visit(path, value.__self__)

    def _module(self, path: str, module: nn.Module) -> None:
        """The attributes by name; parameters, buffers and submodules without the dictionary's."""
        for name in ("_parameters", "_buffers", "_modules"):
            self._hold(f"{path}.", partial(_itself, vars(module)[name]))
            self._seen.add(id(vars(module)[name]))
        self._hold(f"{path}.", partial(vars, module), partial(self._lists_parameters, module))
        self._class(path, type(module))

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

    def _class(self, path: str, kind: type) -> None:
        """The state of a user's class shared by its objects, and what its `forward` uses."""
        for owner in kind.__mro__:
            if not of_library(owner) and owner is not object and id(owner) not in self._classes:
                self._classes.add(id(owner))
                self._hold(f"{path}.", partial(vars, owner), _of_python)

    def _function(self, path: str, function: types.FunctionType) -> None:
        """The closure, defaults and attributes of a function, and the globals it names."""
        if of_library(function):
            return
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
            self._hold(f"{path}, ", partial(_parts, function))
        if vars(function):
            self._hold(f"{path}.", partial(vars, function))
        code = Named.by(function.__code__)
        self._attributes |= code.attributes
        space, known = self._globals.setdefault(
            id(function.__globals__), (function.__globals__, set())
        )
        for name in sorted(code.variables - known):
            known.add(name)
            if name in space:
                self.visit(f"global {name}", space[name])
        for module in imported(function):
            self.visit(module.__name__, module)

    def _other(self, path: str, value: Any) -> None:
        """By attributes, or, for an object without any, by how it would be copied."""
        plain = hasattr(value, "__dict__") or _slots(type(value))
        if not plain or isinstance(value, functools._lru_cache_wrapper):
            self.places.append(Fact(path, partial(_state, value), _state(value)))
        self._held_by(path, value)

    def _held_by(self, path: str, value: Any) -> None:
        """The attributes of an object and of its class."""
        if hasattr(value, "__dict__"):
            derived = _of_logging if isinstance(value, logging.Logger) else _never
            self._hold(f"{path}.", partial(vars, value), derived)
        if slots := _slots(type(value)):
            self._hold(f"{path}.", partial(_held_in, value, slots))
        self._class(path, type(value))


PLAIN = (dict, list, tuple, set, frozenset, types.MappingProxyType)


def _itself(value: Held) -> Held:
    return value


def _common(space: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    """The variables of these names."""
    return {name: space[name] for name in names & space.keys()}


def _is_deque(value: object) -> bool:
    return type(value).__name__ == "deque"


def _of_python(name: str, value: object) -> bool:
    """Whether Python or a library keeps this attribute of a class."""
    return name.startswith("__") and not isinstance(value, types.FunctionType)


def _of_logging(name: str, value: object) -> bool:
    """Whether an attribute connects a logger with all others, which any import may add to."""
    return name in ("parent", "manager", "handlers", "_cache")


def _parts(function: types.FunctionType) -> dict[str, object]:
    """What a function holds besides its code and attributes."""
    found: dict[str, object] = {
        f"variable {name}": _inside(cell)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
        if name != "__class__"
    }
    found["defaults"] = function.__defaults__
    found["defaults of keywords"] = function.__kwdefaults__
    return found


def _inside(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _slots(kind: type) -> tuple[str, ...]:
    """The names of attributes that objects of a class have without a dictionary."""
    found = (owner.__dict__.get("__slots__", ()) for owner in kind.__mro__)
    every = ((names,) if isinstance(names, str) else tuple(names) for names in found)
    return tuple(
        name for names in every for name in names if name not in ("__dict__", "__weakref__")
    )


def _held_in(value: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(value, name, None) for name in names}


def _digest(numbers: Tensor | np.ndarray) -> object:
    """Digest of all numbers: a tensor's version does not show writes through `.data`."""
    if isinstance(numbers, np.ndarray):
        return numbers.dtype.str, numbers.shape, hashlib.blake2b(numbers.tobytes()).digest()
    try:
        flat = numbers.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # no numbers of its own, such as inside vmap: compared by identity
        return None
    return hashlib.blake2b(flat.data, digest_size=16).digest()


def _sum(numbers: Tensor | np.ndarray) -> object:
    """Version and sum of the bits as integers, which costs less than any layer.

    Sees every write that is not through `.data`, and those that do not keep the sum.
    """
    if isinstance(numbers, np.ndarray):
        return _digest(numbers)
    version = None if numbers.is_inference() else numbers._version
    try:
        bits = numbers.detach().contiguous().view(WHOLE[numbers.element_size()])
        return version, int(bits.sum(dtype=torch.int64))
    except (RuntimeError, KeyError):
        return version, None


def _state(value: Any) -> object:
    """The contents of an object without attributes, where Python exposes them."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, types.GeneratorType):
        return getattr(value.gi_frame, "f_lasti", None)
    if isinstance(value, functools._lru_cache_wrapper) and not of_library(value):
        size: Any = value.cache_info()
        return size.misses, size.currsize
    try:
        return repr(value.__reduce_ex__(2))
    except Exception:  # the object does not expose them
        return repr(value)
