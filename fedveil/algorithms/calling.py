"""Algorithms by name, `module:function` for the user's own, called with plain parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedveil.algorithms import ALGORITHMS
from fedveil.errors import UserError, unknown
from fedveil.recipe import Recipe
from fedveil.serialization.codec import (
    as_tuple,
    check_value,
    hints_of,
    part_from_plain,
    refuse_unreadable,
)
from fedveil.serialization.imports import imported

Method = Callable[..., Recipe]


def method_named(name: str) -> Method:
    """The function of an algorithm, by name or as `package.module:function`.

    A settings file may name any function, so only those annotated with -> Recipe are called.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        own = "package.module:function"
        listed = f"`fedveil algorithms` lists all. Your own is named {own}."
        raise unknown("algorithm", name, [*ALGORITHMS, own], listed)
    method: Method = imported(name, "algorithm", "function", "soft:dp_soft_fedavg")
    if hints_of(method).get("return") is not Recipe:
        raise UserError(
            f"The algorithm '{name}' is not annotated with -> Recipe (from fedveil.recipe). "
            "Annotate it, or name another function."
        )
    return method


def parameters_of(method: Method) -> dict[str, inspect.Parameter]:
    """The named parameters; `takes_others` covers `**options`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _signature(method).items() if p.kind in named}


def takes_others(method: Method) -> bool:
    """Whether it accepts parameters that its signature does not name."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _signature(method).values())


def call(name: str, plain: Mapping[str, Any]) -> Recipe:
    """The recipe of an algorithm with parameters from TOML; wrong ones are refused."""
    method = method_named(name)
    known, hints = parameters_of(method), hints_of(method)
    for given in plain:
        if given not in known and not takes_others(method):
            raise unknown(f"parameter of {name} named", given, known)
    for needed, parameter in known.items():
        if parameter.default is parameter.empty and needed not in plain:
            raise UserError(f"{name} needs {needed}. Pass it with --set {needed}=….")
    values = {given: _value(given, v, hints.get(given, Any)) for given, v in plain.items()}
    for given, value in values.items():
        check_value(value, hints.get(given, Any), f"{name}: {given}")
    if name in ALGORITHMS:
        return _recipe(name, method, values)
    recipe = _own_recipe(name, method, values)
    refuse_unreadable(recipe)
    return recipe


def _value(name: str, plain: Any, hint: Any) -> Any:
    if isinstance(plain, dict):
        return part_from_plain(plain, f"parameters.{name}", hint)
    return as_tuple(plain, hint)


def _recipe(name: str, method: Method, values: Mapping[str, Any]) -> Recipe:
    try:
        return method(**values)
    except TypeError as problem:
        raise UserError(
            f"{name} does not take these parameters: {problem}. See `fedveil algorithms {name}`."
        ) from problem


def _own_recipe(name: str, method: Method, values: Mapping[str, Any]) -> Recipe:
    try:
        recipe = method(**values)
    except UserError:
        raise
    except Exception as problem:  # it is the user's own code
        why = str(problem).partition("\n")[0]
        raise UserError(
            f"The algorithm '{name}' failed with {type(problem).__name__}: {why}. Correct it, or "
            "its parameters."
        ) from problem
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"The algorithm '{name}' returned a {type(recipe).__name__}, not a fedveil.Recipe. "
            "Name a function that returns one."
        )
    return recipe


def _signature(method: Method) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):  # of a function that is not Python's
        return {}
