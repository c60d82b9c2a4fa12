"""Parts and recipes as plain values and back: printable as TOML, never code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedveil.errors import UserError, unknown
from fedveil.parts import bound, cohort, local, memory, noise, quantize, report, schedule, server
from fedveil.recipe import Recipe

MODULES = (cohort, local, report, memory, bound, quantize, noise, server, schedule)
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


def _built(kind: type, plain: Mapping[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    for name in plain:
        if name not in known:
            raise unknown(f"field in [{where}] named", name, known)
    values = {name: _value(value, f"{where}.{name}") for name, value in plain.items()}
    try:
        return kind(**values)
    except TypeError as problem:
        raise UserError(f"[{where}] does not make a {kind.__name__}: {problem}.") from problem


def _value(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return part_from_plain(value, where)
    return tuple(value) if isinstance(value, list) else value
