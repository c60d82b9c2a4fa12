"""What identifies the code of a user-defined class: its file, and what it captured."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.errors import UserError, told
from fedveil.parts.values import has_fields, is_plain


def code_of(kind: type) -> str:
    """A digest of the file that defines a class, or of its methods if there is no file.

    A class that is defined in a function can use variables of that function. Their values are in
    the digest, because one file can define many such classes.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    try:
        code = Path(file or "").read_bytes()
    except OSError:
        code = repr([_compiled(f) for _, f in _functions(kind)]).encode()
    captured = list(_captured(kind))
    known = code + repr(captured).encode() if captured else code
    return hashlib.blake2b(known, digest_size=16).hexdigest()


def _compiled(function: types.FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_names, code.co_consts


def _functions(kind: type) -> Iterator[tuple[type, types.FunctionType]]:
    """The methods of a class and its bases, with the class that defines each."""
    for base in kind.__mro__:
        for value in vars(base).values():
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, cached_property):
                value = value.func
            value = getattr(value, "__func__", value)
            if isinstance(value, types.FunctionType):
                yield base, value


def _captured(kind: type) -> Iterator[str]:
    """The values that a class took from the function that defines it, as texts."""
    for base in kind.__mro__:
        if "<locals>" not in base.__qualname__:
            continue
        for name, value in vars(base).items():
            if not (name.startswith("_") or callable(value) or hasattr(value, "__get__")):
                yield from _written(base, name, value)
    for base, function in _functions(kind):
        own = function.__globals__.get("__name__") == base.__module__  # not of dataclasses
        if own and "<locals>" in base.__qualname__:
            yield from _values_of(base, function, ())


def _values_of(
    kind: type, function: types.FunctionType, callers: tuple[types.FunctionType, ...]
) -> Iterator[str]:
    """The variables and defaults of a function, and of the functions among them."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = [(name, cell.cell_contents) for name, cell in cells]
    values += [(function.__name__, value) for value in function.__defaults__ or ()]
    values += (function.__kwdefaults__ or {}).items()
    for name, value in values:
        if isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__:
            if value not in callers:
                yield from _values_of(kind, value, (*callers, function, value))
        elif not name.startswith("_"):
            yield from _written(kind, name, value)


def _written(kind: type, name: str, value: Any) -> Iterator[str]:
    """A value as text; nothing for what is the same in every class of a file."""
    if isinstance(value, tuple):
        for item in value:
            yield from _written(kind, name, item)
    elif has_fields(value):
        for field in fields(value):
            yield from _written(kind, f"{name}.{field.name}", getattr(value, field.name))
    elif is_plain(value) or value is None:
        yield f"{kind.__qualname__} {name}={value!r}"
    elif (
        not isinstance(value, type | types.ModuleType | types.FunctionType) and value is not MISSING
    ):
        raise UserError(
            f"{kind.__name__} uses {name}, {told(value)}, of the function that defines it, which "
            "does not identify its noise. Make it a field of the part, as plain values."
        )
