"""Algorithms by name, `module:function` for the user's own, called with plain parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedveil.algorithms import ALGORITHMS
from fedveil.errors import UserError, unknown
from fedveil.imports import imported
from fedveil.recipe import Recipe
from fedveil.runs.codec import (
    check_value,
    hints_of,
    part_from_plain,
    recipe_from_plain,
    to_plain,
)

Method = Callable[..., Recipe]


def method_named(name: str) -> Method:
    """The function of an algorithm; `package.module:function` is imported as a model is.

    A file may name it, so none is called that does not say itself that it makes recipes.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise unknown("algorithm", name, [*ALGORITHMS, "package.module:function"])
    method: Method = imported(name, "algorithm", "function", "soft:dp_soft_fedavg")
    if hints_of(method).get("return") is not Recipe:
        raise UserError(
            f"The algorithm '{name}' does not say that it returns a Recipe; name a function that "
            "is annotated with -> Recipe (from fedveil.recipe)."
        )
    return method


def parameters_of(method: Method) -> dict[str, inspect.Parameter]:
    """Those with a name; `**options` is told by `takes_others`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _signature(method).items() if p.kind in named}


def takes_others(method: Method) -> bool:
    """Whether it hands on parameters that it does not name itself."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _signature(method).values())


def call(name: str, plain: Mapping[str, Any]) -> Recipe:
    """The recipe that an algorithm makes of parameters as TOML has them; misfits are refused."""
    method = method_named(name)
    known, hints = parameters_of(method), hints_of(method)
    for given in plain:
        if given not in known and not takes_others(method):
            raise unknown(f"parameter of {name} named", given, known)
    for needed, parameter in known.items():
        if parameter.default is parameter.empty and needed not in plain:
            raise UserError(f"{name} needs {needed}; give it with --set {needed}=….")
    values = {given: _value(given, v, hints.get(given, Any)) for given, v in plain.items()}
    for given, value in values.items():
        check_value(value, hints.get(given, Any), f"{name}: {given}")
    if name in ALGORITHMS:
        return _recipe(name, method, values)
    return _readable(name, _own_recipe(name, method, values))


def _value(name: str, plain: Any, hint: Any) -> Any:
    return part_from_plain(plain, f"parameters.{name}", hint) if isinstance(plain, dict) else plain


def _recipe(name: str, method: Method, values: Mapping[str, Any]) -> Recipe:
    try:
        return method(**values)
    except TypeError as problem:
        raise UserError(
            f"{name} does not take these parameters: {problem}; see `fedveil algorithms {name}`."
        ) from problem


def _own_recipe(name: str, method: Method, values: Mapping[str, Any]) -> Recipe:
    try:
        recipe = method(**values)
    except UserError:
        raise
    except Exception as problem:  # it is the user's own code
        why = str(problem).partition("\n")[0]
        raise UserError(
            f"The algorithm '{name}' failed with {type(problem).__name__}: {why}; correct it, or "
            "its parameters."
        ) from problem
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"The algorithm '{name}' gave a {type(recipe).__name__}, not a fedveil.Recipe; name a "
            "function that returns one."
        )
    return recipe


def _readable(name: str, recipe: Recipe) -> Recipe:
    """A run is read again from its recipe.toml; what could not be is refused before it starts."""
    if recipe_from_plain(to_plain(recipe)) != recipe:
        raise UserError(
            f"The recipe of '{name}' does not come back from recipe.toml as it was; let the "
            "fields of its parts be numbers, texts, tuples of these, or parts."
        )
    return recipe


def _signature(method: Method) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):  # of a function that is not Python's
        return {}
