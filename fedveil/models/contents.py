"""Reads what decides the function of a user's module or loss, for the key of a run's noise.

Two runs with one key add the same noise, so the key must differ wherever their sums may. `contents`
reads everything that an object holds and its code refers to: attributes, buffers, closures,
defaults, and global variables, as values and not as addresses, so that the digest is the same in
every process. Functions and classes of installed packages are read by their names and files, those
of torch, NumPy, fedveil and Python by their names.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import random
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.models.references import Named, imported, installed, module_of, of_library
from fedveil.models.side_effects import SCALARS

ALIKE = (  # what they hold decides no function: drawing from the first is refused
    *(random.Random, torch.Generator, np.random.Generator, np.random.RandomState),
    *(np.random.BitGenerator, type(Lock()), type(RLock()), torch.library.Library),
)
NAMED = (  # functions that are not written in Python
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType),
    *(types.MethodWrapperType, np.ufunc),
)
OF_PYTHON = frozenset({  # attributes of a class that Python makes, and annotations
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__conditional_annotations__", "__orig_bases__", "__parameters__", "__dict__", "__weakref__",
    "__firstlineno__", "__static_attributes__", "__slotnames__", "_abc_impl",
    # and pydantic, from fields and validators that are read: other ones in every process
    "__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__",
    "__pydantic_parent_namespace__", "__pydantic_setattr_handlers__", "__signature__",
})  # fmt: skip
CACHES = ("dispatch_cache", "cache_token")  # of functools.singledispatch, filled by calls
BY_NAME = frozenset({"getattr", "vars"})  # builtins that reach any attribute of what they are given
BLIND = frozenset({"globals", "eval", "exec", "__import__"})  # that reach any variable or module
OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
HASHES = ("_original_object_hash",)  # of transformers: of texts, other ones in every process
HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # of torch, numbered as they come


@dataclass(frozen=True)
class Contents:
    """A digest of what an object holds, and the places of what cannot be read."""

    digest: str
    unread: tuple[str, ...]


def contents(value: object) -> Contents:
    """What decides the function of an object, equal for equal ones in every process.

    >>> contents(functools.partial(pow, 2)) == contents(functools.partial(pow, 2))
    True
    >>> contents(functools.partial(pow, 2)) == contents(functools.partial(pow, 3))
    False
    """
    reader = _Reader({})
    reader.everything(value)
    return reader.found()


class _Reader:
    """Reads every object once; a second reference is written as the place of the first."""

    def __init__(self, places: dict[int, int]) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._places = places
        self._kept: list[object] = []  # keeps objects alive: no id is reused
        self._unread: list[str] = []
        self._path: list[str] = []
        self._modules: list[types.ModuleType] = []  # of the user's own code
        self._attributes: set[str] = set()  # that the code names, of whatever object
        self._by_name = False  # whether the code may use any attribute

    def found(self) -> Contents:
        return Contents(self._hash.hexdigest(), tuple(self._unread))

    def everything(self, start: object) -> None:
        """An object, and the attributes of the user's modules that any code names."""
        self.read(start)
        done: set[tuple[str, str]] = set()
        while named := self._in_modules().keys() - done:
            done |= named
            found = self._in_modules()
            for module, name in sorted(named):
                self._entry(f"{module}.{name}", found[module, name])

    def _in_modules(self) -> dict[tuple[str, str], object]:
        return {
            (module.__name__, name): value
            for module in self._modules
            for name, value in dict(vars(module)).items()
            if name in self._attributes or (self._by_name and not name.startswith("__"))
        }

    def read(self, value: Any) -> None:
        """Add a value and everything it holds."""
        kind = type(value)
        self._write(_name(kind))
        if kind in SCALARS:
            self._write(repr(value))
        elif kind is tuple:  # has no identity: equal constants may be one object
            self._items(value)
        elif isinstance(value, set | frozenset):
            self._set(value)
        elif id(value) in self._places:
            self._write(str(self._places[id(value)]))
        else:
            self._places[id(value)] = len(self._places)
            self._kept.append(value)
            self._first(value)

    def _first(self, value: Any) -> None:
        """A value that was not read before."""
        if isinstance(value, Tensor | np.ndarray):
            self._array(value)
        elif isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            self._write(value.save_to_buffer({}))
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Mapping | list | tuple | deque):
            self._container(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self._write(value.__name__)
            if not installed(value):
                self._modules.append(value)
        elif not isinstance(value, ALIKE):
            self._wrapped_or_other(value)

    def _wrapped_or_other(self, value: Any) -> None:
        """Another object; of wrappers around functions and objects, what they wrap."""
        if isinstance(value, OPERATIONS):
            self._write(str(value))
        elif isinstance(value, np.ufunc) and not _of_numpy(value):
            self._opaque(value)
        elif isinstance(value, NAMED):
            self._write(f"{getattr(value, '__module__', '')}.{_qualname(value)}")
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, types.ModuleType):
                self.read(owner)
        elif isinstance(value, types.MethodType | classmethod | staticmethod):
            self.read(value.__func__)
            self.read(getattr(value, "__self__", None))
        elif isinstance(value, property):
            self._items((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            self.read(value.func)
        elif isinstance(value, weakref.ref):
            self.read(value())
        elif isinstance(value, types.CellType):
            self._cell(value)
        else:
            self._other(value)

    def _entry(self, name: str, value: object) -> None:
        self._write(name)
        if name == "cls_ref" and isinstance(value, str):  # of pydantic: a name and an address
            self._write(value.rpartition(":")[0] or value)
        elif name not in HASHES:
            self._path.append(name)
            self.read(value)
            self._path.pop()

    def _items(self, values: Any) -> None:
        self._write(str(len(values)))
        for value in values:
            self.read(value)

    def _set(self, values: Any) -> None:
        """The items in the order of their digests: that of a set is another in every process."""
        found = []
        for value in values:
            reader = self._beside()
            reader.read(value)
            found.append(reader.found())
            self._by_name |= reader._by_name
        self._items(tuple(sorted(one.digest for one in found)))
        self._unread += sorted(place for one in found for place in one.unread)

    def _beside(self) -> _Reader:
        """A reader of an item, which finds modules and names for this one."""
        reader = _Reader(dict(self._places))
        reader._modules, reader._attributes = self._modules, self._attributes
        return reader

    def _container(self, values: Any) -> None:
        self.read(type(values))
        if isinstance(values, deque):
            self.read(values.maxlen)
        if isinstance(values, defaultdict):
            self.read(values.default_factory)
        if isinstance(values, Mapping):
            try:
                items = list(values.items())
            except Exception:  # a user's own mapping may raise anything
                self._opaque(values)
                return
            self._write(str(len(items)))
            for key, value in items:
                self.read(key)
                self._entry(str(key) if type(key) in SCALARS else "", value)
        else:
            self._items(values)
        for name, value in _attributes(values):
            self._entry(name, value)

    def _array(self, value: Tensor | np.ndarray) -> None:
        """The numbers, and the attributes that Python code has added."""
        self._numbers(value)
        if not installed(type(value)):
            self.read(type(value))
        for name, held in _attributes(value):
            self._entry(name, held)

    def _numbers(self, value: Tensor | np.ndarray) -> None:
        """The type, the shape and every bit."""
        self._write(f"{value.dtype} {tuple(value.shape)}")
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                self._items(value.reshape(-1).tolist())
            else:
                self._write(value.tobytes())
            return
        try:
            plain = value.detach() if value.layout is torch.strided else value.detach().to_dense()
            flat = plain.cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
            self._write(flat.view(torch.uint8).numpy().data)
        except (RuntimeError, NotImplementedError):  # it has no numbers, or none to be seen
            self._opaque(value)

    def _module(self, module: nn.Module) -> None:
        self.read(type(module))
        for name, value in vars(module).items():
            if name.endswith(HOOKS) and isinstance(value, Mapping):
                self._entry(name, tuple(value.values()))
            elif not (isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")):
                self._entry(name, value)

    def _class(self, kind: type) -> None:
        """By its name; the user's own also by everything that it defines."""
        self._write(_name(kind))
        if type(kind) is not type:
            self.read(type(kind))
        if installed(kind):
            self._write(_source(kind))
            return
        self._items(kind.__bases__)
        for name, value in vars(kind).items():
            if name not in OF_PYTHON:
                self._entry(name, value)

    def _function(self, function: types.FunctionType) -> None:
        """By name, closure and defaults; the user's own also by code and the globals it names."""
        self._write(f"{function.__globals__.get('__name__')}.{function.__qualname__}")
        names = function.__code__.co_freevars
        cells = zip(names, function.__closure__ or (), strict=True)
        self._items([cell for name, cell in cells if name not in CACHES])
        self.read(function.__defaults__)
        self.read(function.__kwdefaults__)
        if installed(function):
            self._write(_source(function))
            return
        self.read(vars(function))
        self._code(function.__code__)
        named = Named.by(function.__code__)
        self._attributes |= named.attributes
        self._unnamed(named.variables - function.__globals__.keys())
        for name in sorted(named.variables & function.__globals__.keys()):
            self._entry(name, function.__globals__[name])
        for module in imported(function):
            self._entry(module.__name__, module)

    def _unnamed(self, builtins: frozenset[str]) -> None:
        """Functions of Python by which code reaches what it does not name."""
        self._by_name |= bool(builtins & BY_NAME)
        self._unread += [f"'{name}()' (builtin function)" for name in sorted(builtins & BLIND)]

    def _code(self, code: types.CodeType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(code.co_code)
        self._write(code.co_exceptiontable)
        self._write(repr((names, counts)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.read(constant)

    def _cell(self, cell: types.CellType) -> None:
        try:
            self.read(cell.cell_contents)
        except ValueError:  # the cell is empty
            self._write("empty")

    def _other(self, value: Any) -> None:
        """By its attributes and as it would be pickled."""
        self.read(type(value))
        parts = _pickled(value)
        named = parts is not None and isinstance(parts[0], str)  # as the variable of a module
        other = installed(type(value)) and not (named and not installed(value))
        attributes = [] if other else list(_attributes(value))
        for name, held in attributes:
            self._entry(name, held)
        if parts is not None:
            self._items(parts)
        elif not attributes:
            self._hidden(value)

    def _hidden(self, value: Any) -> None:
        """An object that cannot be pickled, by its attributes."""
        attributes = list(_attributes(value))
        for name, held in attributes:
            self._entry(name, held)
        if not attributes:
            self._opaque(value)

    def _opaque(self, value: object) -> None:
        self._unread.append(f"'{'.'.join(filter(None, self._path))}' ({type(value).__name__})")

    def _write(self, fact: str | bytes | memoryview) -> None:
        """Add a fact and its length, which tells where it ends."""
        data = fact.encode("utf-8", "surrogatepass") if isinstance(fact, str) else fact
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source(thing: Any) -> str:
    """The digest of the file that defines a class or a function of an installed package."""
    file = getattr(sys.modules.get(module_of(thing)), "__file__", None)
    return "" if of_library(thing) or file is None else _digest_of(file)


@functools.cache
def _digest_of(file: str) -> str:
    """Of Python files: others are compiled for one kind of machine."""
    path = Path(file)
    readable = path.suffix == ".py" and path.is_file()
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if readable else ""


def _of_numpy(function: np.ufunc) -> bool:
    """Whether it is a function of NumPy or SciPy, and not made of one in Python."""
    places = (sys.modules.get(name) for name in ("numpy", "scipy.special"))
    return any(getattr(place, function.__name__, None) is function for place in places)


def _qualname(value: object) -> str:
    return str(getattr(value, "__qualname__", getattr(value, "__name__", "")))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """What an object holds by name."""
    yield from dict(getattr(value, "__dict__", {})).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                yield slot, getattr(value, slot, None)


def _pickled(value: Any) -> tuple[object, ...] | None:
    """What pickle would store of an object; None if it cannot be pickled."""
    try:
        known = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(2) if known is None else known(value)
        if isinstance(reduced, str):
            return (reduced,)
        whole = [*reduced, None, None, None][:5]
        return (*whole[:3], *(tuple(items) for items in whole[3:] if items is not None))
    except Exception:  # an object may raise anything
        return None
