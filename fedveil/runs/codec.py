"""Parts and recipes as plain values and back: printable as TOML, never code."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedveil.errors import UserError, unknown
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

    >>> to_plain(cohort.Poisson(0.2))
    {'kind': 'Poisson', 'rate': 0.2}
    """
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    kept = {name: _plain(value) for name, value in fields.items() if value is not None}
    return kept if isinstance(part, Recipe) else {"kind": type(part).__name__, **kept}


def recipe_from_plain(plain: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_plain` wrote down."""
    recipe: Recipe = _built(Recipe, plain, "recipe")
    return recipe


def part_from_plain(plain: Mapping[str, Any], where: str) -> Any:
    """The part that `to_plain` wrote down; `where` is the TOML table it stands in."""
    kind = plain.get("kind")
    if not isinstance(kind, str):
        raise UserError(f'[{where}] needs a kind, such as kind = "Poisson".')
    if kind not in PARTS:
        raise unknown(f"part in [{where}] of kind", kind, PARTS)
    return _built(PARTS[kind], {k: v for k, v in plain.items() if k != "kind"}, where)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    return list(value) if isinstance(value, tuple) else value


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
    hints = get_type_hints(kind)
    for name in plain:
        if name not in known:
            raise unknown(f"field in [{where}] named", name, known)
    values = {name: _value(value, f"{where}.{name}") for name, value in plain.items()}
    for name, value in values.items():
        check_value(value, hints[name], f"{where}.{name}")
    try:
        return kind(**values)
    except TypeError as problem:
        raise UserError(f"[{where}] does not make a {kind.__name__}: {problem}.") from problem


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_is(value, kind) for kind in _kinds(hint))


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if getattr(kind, "_is_protocol", False):
        return type(value) in _parts_of(kind)
    return isinstance(value, kind)


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
        return f"a part of kind {', '.join(sorted(part.__name__ for part in _parts_of(kind)))}"
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _value(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return part_from_plain(value, where)
    return tuple(value) if isinstance(value, list) else value
