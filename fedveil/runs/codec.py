"""Parts and recipes as plain values and back: printable as TOML, never code.

A part of the user's own is written by the name of its class, kind = "module:Class", and imported
from the Python path when it is read (fedveil/imports.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedveil.errors import UserError, unknown
from fedveil.imports import imported
from fedveil.parts import (
    bound,
    cohort,
    discrete,
    local,
    memory,
    noise,
    quantize,
    report,
    schedule,
    server,
)
from fedveil.recipe import Recipe

MODULES = (cohort, local, report, memory, bound, quantize, noise, discrete, server, schedule)
PARTS: dict[str, type] = {
    kind.__name__: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not local.Plan
    if kind.__module__ == module.__name__
}


def to_plain(part: Any) -> dict[str, Any]:
    """A part as its kind and its fields; what is None is left out, as TOML has no null.

    Always plain values: of a part that cannot be read back, reading says why.

    >>> to_plain(cohort.Poisson(0.2))
    {'kind': 'Poisson', 'rate': 0.2}
    """
    names = [field.name for field in dataclasses.fields(part)] if _has_fields(part) else []
    fields = {name: getattr(part, name) for name in names}
    kept = {name: _plain(value) for name, value in fields.items() if value is not None}
    kind = {} if isinstance(part, Recipe) else {"kind": kind_of(part)}
    return kind | kept | kind  # first, and not a field of that name


def kind_of(part: Any) -> str:
    """The name of a part's class, with its module if it is not one of fedveil's."""
    own = type(part)
    if PARTS.get(own.__name__) is own:
        return own.__name__
    return f"{own.__module__}:{own.__qualname__}"


def identified(recipe: Recipe) -> str:
    """A recipe as a text that no other recipe has, nor the same one with other code in its parts.

    Noise is keyed by it, and two different releases must not share theirs. A recipe of fedveil's
    parts is told by these alone, so that runs of earlier versions go on.
    """
    own = sorted({code_of(kind) for kind in _own_kinds(recipe)})
    return f"{recipe}{json.dumps(to_plain(recipe))}{own}" if own else str(recipe)


def code_of(kind: type) -> str:
    """A digest of the file that defines a class, or of its methods where there is no file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    try:
        code = Path(file or "").read_bytes()
    except OSError:
        functions = [f for base in kind.__mro__ for f in vars(base).values()]
        codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
        code = repr([(c.co_code, c.co_names, c.co_consts) for c in codes]).encode()
    return hashlib.blake2b(code, digest_size=16).hexdigest()


def _own_kinds(part: Any) -> Iterator[type]:
    """The classes of a part and of the parts in its fields that are not fedveil's."""
    fields = dataclasses.fields(part) if _has_fields(part) else ()
    for field in fields:
        value = getattr(part, field.name)
        if _has_fields(value) or isinstance(part, Recipe):
            yield from _own_kinds(value)
    if not isinstance(part, Recipe | str) and ":" in kind_of(part):
        yield type(part)


def recipe_from_plain(plain: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_plain` wrote down."""
    recipe: Recipe = _built(Recipe, plain, "recipe")
    return recipe


def part_from_plain(plain: Mapping[str, Any], where: str, hint: Any = Any) -> Any:
    """The part that `to_plain` wrote down; `where` is the TOML table it stands in.

    A class of the user's own is not called before it is one that `hint` allows.
    """
    kind = plain.get("kind")
    if not isinstance(kind, str):
        raise UserError(f'[{where}] needs a kind, such as kind = "Poisson".')
    if kind not in PARTS and ":" not in kind:
        raise unknown(f"part in [{where}] of kind", kind, [*PARTS, "module:Class"])
    found = PARTS[kind] if kind in PARTS else _own_part(kind, where, hint)
    return _built(found, {k: v for k, v in plain.items() if k != "kind"}, where)


def _own_part(kind: str, where: str, hint: Any) -> type:
    """The class that `kind` names, if it is a part and may stand here."""
    path, _, name = kind.partition(":")
    if path == "__main__" or "." in name:
        raise UserError(
            f"[{where}] is of kind '{kind[:80]}', a class of a script, a function or another "
            "class, which cannot be found again; put it into a module of its own, and write "
            f'kind = "module:{name.rpartition(".")[2][:80]}" there.'
        )
    found = imported(kind, f"part of kind in [{where}]", "class", "soft:SoftClip")
    if not (isinstance(found, type) and found.__module__ == path and _frozen(found)):
        raise UserError(
            f"[{where}] is of kind '{kind}', which is not a frozen dataclass that '{path}' "
            "defines; write @dataclasses.dataclass(frozen=True) above the class."
        )
    if not any(_allows(wanted, found) for wanted in _kinds(hint)):
        wanted = " or ".join(_wanted(one) for one in _kinds(hint) if one is not types.NoneType)
        raise UserError(f"[{where}] is of kind '{kind}'; it must be {wanted}.")
    return found


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _frozen(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    if _has_fields(value):
        return to_plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float) else repr(value)


def check_value(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that its annotation does not allow.

    >>> check_value("a lot", float | None, "clip")
    Traceback (most recent call last):
    fedveil.errors.UserError: clip is 'a lot'; it must be a number.
    """
    if not _fits(value, hint):
        wanted = " or ".join(_wanted(kind) for kind in _kinds(hint) if kind is not types.NoneType)
        raise UserError(f"{where} is {value!r}; it must be {wanted}.")


def _built(kind: type, plain: Mapping[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    hints = hints_of(kind)
    for name in plain:
        if name not in known:
            raise unknown(f"field in [{where}] named", name, known)
    values = {
        name: _value(value, f"{where}.{name}", hints.get(name, Any))
        for name, value in plain.items()
    }
    for name, value in values.items():
        check_value(value, hints.get(name, Any), f"{where}.{name}")
    try:
        return kind(**values)
    except UserError:
        raise
    except Exception as problem:  # a user's own class may raise anything
        raise UserError(f"[{where}] does not make a {kind.__name__}: {problem}.") from problem


def hints_of(annotated: Any) -> dict[str, Any]:
    """Annotations of a class or function; none where they name what is not there when it runs."""
    try:
        return get_type_hints(annotated)
    except Exception:  # an annotation of a user's own is any expression
        return {}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_is(value, kind) for kind in _kinds(hint))


def _is(value: Any, kind: Any) -> bool:
    if not _checkable(kind):
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if getattr(kind, "_is_protocol", False):
        return _allows(kind, type(value))
    return isinstance(value, get_origin(kind) or kind)


def _checkable(kind: Any) -> bool:
    """Whether it says which values it allows; a user's own annotation may be anything."""
    return get_origin(kind) is not None or (isinstance(kind, type) and kind is not Any)


def _allows(kind: Any, part: type) -> bool:
    """Whether a class of parts can stand where this kind is asked for."""
    if not _checkable(kind):
        return True
    if not getattr(kind, "_is_protocol", False):
        return isinstance(kind, type) and issubclass(part, kind)
    if part in PARTS.values():
        return part in _parts_of(kind)
    asked = {name for name in vars(kind) if name == "__call__" or not name.startswith("_")}
    had = {name for base in part.__mro__ for name in vars(base)}
    return _frozen(part) and asked <= had | {field.name for field in dataclasses.fields(part)}


def _parts_of(protocol: type) -> list[type]:
    """The parts that can stand where this kind of part is asked for."""
    asked = [name for name in vars(protocol) if not name.startswith("_")]
    return [
        part
        for part in PARTS.values()
        if all(hasattr(part, name) for name in asked)
        if asked or part.__module__ == protocol.__module__
    ]


def _wanted(kind: Any) -> str:
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    if get_origin(kind) is Literal:
        return " or ".join(f"'{choice}'" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {_wanted(get_args(kind)[0])}"
    if getattr(kind, "_is_protocol", False):
        known = ", ".join(sorted(part.__name__ for part in _parts_of(kind)))
        return f"a part of kind {known}, or a class of your own with the methods of {kind.__name__}"
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _value(value: Any, where: str, hint: Any) -> Any:
    if isinstance(value, Mapping):
        return part_from_plain(value, where, hint)
    return tuple(value) if isinstance(value, list) else value
