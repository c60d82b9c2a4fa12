"""Convert parts and recipes to plain values and back: TOML, never code.

A user-defined part is written with the name of its class, kind = "module:Class". Reading it imports
that class from the Python path (fedveil/serialization/imports.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from fedveil.errors import HUGE, UserError, told, unknown, with_article
from fedveil.parts import (
    bound,
    cohort,
    controls,
    correlated,
    discrete,
    local,
    memory,
    noise,
    quantize,
    records,
    report,
    schedule,
    server,
    spaced,
    statistics,
)
from fedveil.parts.part import Part
from fedveil.parts.values import frozen, has_fields, is_plain
from fedveil.recipe import Recipe
from fedveil.serialization.code import code_of
from fedveil.serialization.imports import imported

MODULES = (
    cohort, spaced, local, records, report, memory, controls, bound, quantize, noise, correlated,
    discrete, server, schedule, statistics,
)  # fmt: skip
PARTS: dict[str, type] = {
    kind.__name__: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Part | schedule.Schedule)
    if dataclasses.is_dataclass(kind)
    if not kind.__name__.startswith("_") and not inspect.isabstract(kind)
    if kind.__module__ == module.__name__
}

WORDS: dict[Any, str] = {
    float: "a number", int: "a whole number", bool: "true or false", str: "a text",
    Path: "a path", Mapping: "a dictionary", Sequence: "a list", Iterable: "a list",
    Callable: "a function",
}  # fmt: skip
OLD_KINDS = {"Silent": "NoNoise", "Exact": "NoQuantization", "GradientScale": "PseudoGradient"}
AnyPart = TypeVar("AnyPart", bound=Part)


def to_plain(part: Any) -> dict[str, Any]:
    """A part as its kind and its fields, without fields that are None (TOML has no null).

    The result is always plain values. Anything else is refused.

    >>> to_plain(cohort.Poisson(0.2))
    {'kind': 'Poisson', 'rate': 0.2}
    """
    names = [field.name for field in dataclasses.fields(part)] if has_fields(part) else []
    fields = {name: getattr(part, name) for name in names}
    kept = {name: _plain(value) for name, value in fields.items() if value is not None}
    kind = {} if isinstance(part, Recipe) else {"kind": kind_of(part)}
    return kind | kept | kind  # `kind` comes first, and a field of that name does not replace it


def kind_of(part: Any) -> str:
    """The name of a part's class, with its module if the part is not from fedveil."""
    own = type(part)
    if PARTS.get(own.__name__) is own:
        return own.__name__
    return f"{own.__module__}:{own.__qualname__}"


def identified(recipe: Recipe) -> str:
    """A text that identifies a recipe and the code of its user-defined parts.

    It is part of the key of the noise, because two different releases must not share noise. For
    recipes of fedveil's own parts it has no code, so that runs of earlier versions can be resumed.
    """
    own = sorted({code_of(kind) for kind in _own_kinds(recipe)})
    known = _spelled(recipe)
    for old, new in OLD_KINDS.items():  # keys still use the names of version 0.1
        known = known.replace(f"={new}(", f"={old}(")
    if recipe.statistics is not None:
        known += str(recipe.statistics)
    if recipe.evaluation is not None:
        known += f" evaluated by {recipe.evaluation}"
    return f"{known}{json.dumps(to_plain(recipe))}{own}" if own else known


def _spelled(recipe: Recipe) -> str:
    """All fields of a recipe, as dataclasses write them: keys of saved runs depend on it."""
    shown = (field.name for field in dataclasses.fields(recipe) if field.repr)
    values = ", ".join(f"{name}={getattr(recipe, name)!r}" for name in shown)
    return f"{type(recipe).__qualname__}({values})"


def _own_kinds(value: Any) -> Iterator[type]:
    """The user-defined classes of a part, of the parts in its fields, and of those in tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _own_kinds(item)
    if not has_fields(value):
        return
    for field in dataclasses.fields(value):
        yield from _own_kinds(getattr(value, field.name))
    if not isinstance(value, Recipe) and ":" in kind_of(value):
        yield type(value)


def readable(recipe: Recipe) -> Recipe:
    """Refuse, before a run starts, a recipe that could not be read back from recipe.toml.

    A class of a script or a function cannot be imported. Its run is trained, but not read again.
    """
    if all(map(_importable, _own_kinds(recipe))):
        refuse_unreadable(recipe)
    return recipe


def refuse_unreadable(recipe: Recipe) -> None:
    """Refuse a recipe that changes when it is written and read back."""
    if recipe_from_plain(to_plain(recipe)) != recipe:
        raise UserError(
            f"The recipe {recipe.name} changes when it is written to recipe.toml and read back. "
            "Give a field whose default is not None a value, and compare parts by their fields."
        )


def _importable(kind: type) -> bool:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__":  # another program's, when the run is read
        return False
    try:
        return imported(name, "part", "class", "soft:SoftClip") is kind
    except UserError:
        return False


def recipe_from_plain(plain: Mapping[str, Any]) -> Recipe:
    """Read a recipe from the output of `to_plain`."""
    recipe: Recipe = _built(Recipe, plain, "recipe")
    return recipe


def part_from_plain(plain: Mapping[str, Any], where: str, hint: Any = Any) -> Any:
    """Read a part from the output of `to_plain`; `where` is the name of its TOML table.

    A user-defined class is called only if `hint` allows it.
    """
    kind = plain.get("kind")
    if not isinstance(kind, str):
        raise UserError(f'[{where}] has no kind. Add one, such as kind = "Poisson".')
    kind = OLD_KINDS.get(kind, kind)
    if kind not in PARTS and ":" not in kind:
        raise unknown(f"part in [{where}] of kind", kind, [*PARTS, "module:Class"])
    found = PARTS[kind] if kind in PARTS else _own_part(kind, where, hint)
    return _built(found, {k: v for k, v in plain.items() if k != "kind"}, where)


def class_of(plain: Mapping[str, Any], default: type[AnyPart]) -> type[AnyPart]:
    """The class of a part in plain values; its base class for a user-defined part.

    No user module is imported: the base class answers with safe defaults.
    """
    kind = plain.get("kind")
    kind = OLD_KINDS.get(str(kind), kind)
    base = cast(type[AnyPart], next(each for each in default.__mro__ if Part in each.__bases__))
    return default if kind is None else cast(type[AnyPart], PARTS.get(str(kind), base))


def _own_part(kind: str, where: str, hint: Any) -> type:
    """The class that `kind` names, if it is a part that `hint` allows."""
    path, _, name = kind.partition(":")
    if path == "__main__" or "." in name:
        raise UserError(
            f"[{where}] has kind '{kind[:80]}', which is defined in a script, a function or "
            "another class, so it cannot be imported. Move it to the top level of a module, and "
            f'write kind = "module:{name.rpartition(".")[2][:80]}".'
        )
    found = imported(kind, f"part in [{where}]", "class", "soft:SoftClip")
    if not (isinstance(found, type) and found.__module__ == path and frozen(found)):
        raise UserError(
            f"[{where}] has kind '{kind}', which is not a frozen dataclass defined in '{path}'. "
            "Put @dataclasses.dataclass(frozen=True) above the class."
        )
    if not any(_allows(wanted, found) for wanted in _kinds(hint)):
        wanted = " or ".join(_wanted(one) for one in _kinds(hint) if one is not types.NoneType)
        raise UserError(f"[{where}] has kind '{kind}'; it must be {wanted}.")
    return found


def _plain(value: Any) -> Any:
    if has_fields(value):
        return to_plain(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_plain(value):
        return value.item() if isinstance(value, np.generic) else value
    raise UserError(
        f"{told(value)} cannot be written to recipe.toml. Use numbers, texts, tuples of these, and "
        "frozen dataclasses as fields."
    )


def check_value(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that its annotation does not allow.

    >>> check_value("a lot", float | None, "clip")
    Traceback (most recent call last):
    fedveil.errors.UserError: clip is 'a lot'; it must be a number.
    """
    if not _fits(value, hint):
        wanted = " or ".join(_wanted(kind) for kind in _kinds(hint) if kind is not types.NoneType)
        raise UserError(f"{where} is {told(value)}; it must be {wanted}.")


def as_tuple(value: Any, hint: Any) -> Any:
    """A list as the tuple that an annotation allows; any other value as it is.

    >>> as_tuple([0.1, 0.2], float | tuple[float, ...]), as_tuple([1], list[int])
    ((0.1, 0.2), [1])
    """
    listed = isinstance(value, list) and not _fits(value, hint) and _fits(tuple(value), hint)
    return tuple(value) if listed else value


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
    except Exception as problem:  # a user-defined class may raise anything
        raise UserError(
            f"Building a {kind.__name__} from [{where}] failed: {problem}. Correct its fields."
        ) from problem


def hints_of(annotated: Any) -> dict[str, Any]:
    """The annotations of a class or function, without those that cannot be evaluated."""
    try:
        return get_type_hints(annotated)
    except Exception:  # a user's annotation may be any expression
        annotated = inspect.unwrap(annotated)
        written = getattr(annotated, "__annotations__", {})
        module = sys.modules.get(getattr(annotated, "__module__", ""))
        space = getattr(annotated, "__globals__", vars(module) if module else {})
        return {name: hint for name in written for hint in _hint(name, written[name], space)}


def _hint(name: str, written: Any, space: dict[str, Any]) -> list[Any]:
    alone = types.SimpleNamespace(__annotations__={name: written})
    try:
        return [*get_type_hints(alone, space).values()]
    except Exception:  # such as a name that only a type checker imports
        return []


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_is(value, kind) for kind in _kinds(hint))


def _is(value: Any, kind: Any) -> bool:
    if not _checkable(kind):
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and _fits_each(value, get_args(kind))
    if get_origin(kind) is Sequence and isinstance(value, Sequence):
        return all(_fits(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if isinstance(value, int) and abs(value) > HUGE:
        return False
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, get_origin(kind) or kind)


def _fits_each(items: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    """Whether items fit the arguments of `tuple[...]`."""
    if hints[-1:] == (Ellipsis,):
        return all(_fits(item, hints[0]) for item in items)
    return len(items) == len(hints) and all(map(_fits, items, hints))


def _checkable(kind: Any) -> bool:
    """Whether an annotation says which values it allows. A user's annotation may be anything."""
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return False
    return get_origin(kind) is not None or (isinstance(kind, type) and kind is not Any)


def _allows(kind: Any, part: type) -> bool:
    """Whether an annotation allows parts of a class."""
    if not _checkable(kind):
        return True
    return isinstance(kind, type) and issubclass(part, kind)


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"'{choice}'" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        each, *others = get_args(kind) or (Any,)
        alike = others == [Ellipsis] and _checkable(each)
        return f"a list, each {_wanted(each)}" if alike else "a tuple"
    if known := [name for name, part in sorted(PARTS.items()) if _allows(kind, part)]:
        return (
            f"a part of kind {', '.join(known)}, or your own class that inherits from "
            f"fedveil.parts.{kind.__name__}"
        )
    if get_origin(kind) is Sequence and get_args(kind)[0] in WORDS:
        return f"a list, each {WORDS[get_args(kind)[0]]}"
    plain = get_origin(kind) or kind
    return WORDS.get(plain, with_article(getattr(plain, "__name__", str(plain))))


def _value(value: Any, where: str, hint: Any) -> Any:
    if isinstance(value, Mapping):
        return part_from_plain(value, where, hint)
    if isinstance(value, list):
        return tuple(_value(item, where, _item_hint(hint, i)) for i, item in enumerate(value))
    return value


def _item_hint(hint: Any, position: int) -> Any:
    """The annotation of an item of a list, from that of the list."""
    for kind in _kinds(hint):
        each = get_args(kind)
        if get_origin(kind) is Sequence or each[1:] == (Ellipsis,):
            return each[0]
        if get_origin(kind) is tuple and position < len(each):
            return each[position]
    return Any if tuple in _kinds(hint) else hint
