"""Whose code a thing is, and what a function's code names: variables, attributes, and imports."""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARIES = frozenset({"torch", "numpy", "fedveil", *sys.stdlib_module_names} - {"__main__"})
PACKAGES = ("site-packages", "dist-packages")  # directories of installed packages
INSTALLED = (
    *(sysconfig.get_path(kind) for kind in ("purelib", "platlib")),
    *(*site.getsitepackages(), site.getusersitepackages()),
)
PYTHON = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")),
    os.path.dirname(os.__file__),
)
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM")  # instructions of Python


@dataclass(frozen=True)
class Import:
    """An import in a function: `from ..package import names`, where dots are levels."""

    level: int
    package: str
    names: tuple[str, ...]

    def modules(self, inside: str) -> Iterator[str]:
        """The modules that it may load from a function of the package `inside`."""
        try:
            base = importlib.util.resolve_name("." * self.level + self.package, inside)
        except ImportError:  # relative, outside a package
            return
        parts = base.split(".")
        yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
        yield from (f"{base}.{name}" for name in self.names)


@dataclass(frozen=True)
class Named:
    """The names in the code of a function and its inner functions."""

    variables: frozenset[str]  # outside the function
    attributes: frozenset[str]
    imports: frozenset[Import]

    @classmethod
    @functools.cache
    def by(cls, code: types.CodeType) -> Named:
        """Found by kind of instruction."""
        seen = [(step.opname, step.argval) for step in _instructions(code)]
        return cls(
            frozenset(name for kind, name in seen if kind in ("LOAD_GLOBAL", "LOAD_NAME")),
            frozenset(name for kind, name in seen if kind in ATTRIBUTES),
            frozenset(
                Import(seen[place - 2][1], name, tuple(seen[place - 1][1] or ()))
                for place, (kind, name) in enumerate(seen)
                if kind == "IMPORT_NAME"  # after the level and the names
            ),
        )


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _instructions(part)


def imported(function: types.FunctionType) -> list[types.ModuleType]:
    """The user's own modules that a function imports when it is called, by name.

    They are imported now if they can be: what they hold must not depend on earlier calls.
    """
    inside = str(function.__globals__.get("__package__") or "")
    imports = Named.by(function.__code__).imports
    names = {name for each in imports for name in each.modules(inside)}
    found = (_loaded(name) for name in sorted(names))
    return [module for module in found if module is not None and not installed(module)]


def _loaded(name: str) -> types.ModuleType | None:
    """A module that is loaded, or the user's own and can be."""
    if name not in sys.modules and _own(name.partition(".")[0]):
        try:
            importlib.import_module(name)
        except Exception:  # such as a name that is no module, or code that fails
            return None
    return sys.modules.get(name)


def _own(package: str) -> bool:
    """Whether a package that may not be loaded is the user's own."""
    if package in sys.modules:
        return not installed(sys.modules[package])
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and not _of_package(spec.origin or "") and not _of_python(spec.origin)


def installed(thing: Any) -> bool:
    """Whether a module, a class or a function is of an installed package, and not a user's own."""
    return of_library(thing) or (_of_package(file_of(thing) or "") and _found(thing))


def of_library(thing: Any) -> bool:
    """Whether it is of torch, NumPy, fedveil or Python."""
    package = module_of(thing).partition(".")[0]
    if package not in LIBRARIES or not _found(thing):
        return False
    return package in ("torch", "numpy", "fedveil") or _of_python(file_of(thing))


def module_of(thing: Any) -> str:
    """The module that defines a thing; a function may wrap one of another module by name."""
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    return str(getattr(thing, "__module__", ""))


def file_of(thing: Any) -> str | None:
    """The file of the module that defines a thing; None if it has none."""
    if isinstance(thing, types.FunctionType):
        found = thing.__globals__.get("__file__")
    else:
        module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(module_of(thing))
        found = getattr(module, "__file__", None)
    return found if isinstance(found, str) else None


def _found(thing: Any) -> bool:
    """Whether a class is found by its name where it says that it was defined; others are.

    A library may make a class of the user's bases, such as one with a parametrization.
    """
    if not isinstance(thing, type) or "<locals>" in thing.__qualname__:
        return True
    place: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is thing or not thing.__flags__ & HEAP


HEAP = 1 << 9  # flag of classes that Python code made, and of some in C


@functools.cache
def _of_package(file: str) -> bool:
    """Whether a file lies where packages are installed."""
    if not file:
        return False
    path = Path(file)
    known = file.startswith(INSTALLED) or not set(PACKAGES).isdisjoint(path.parts)
    return known or any(map(_has_packages, path.parents))


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether packages were installed into this folder, as by pip's --target."""
    return next(folder.glob("*.dist-info"), None) is not None


@functools.cache
def _of_python(file: str | None) -> bool:
    """Whether a file is of Python itself; what has none is built in."""
    if file is None or file in ("built-in", "frozen"):
        return True
    return file.startswith(PYTHON) and not _of_package(file)
