"""Check the arguments of Python functions, and speak of arguments where messages name flags."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np

from fedveil.errors import FLAGS, UserError

Function = TypeVar("Function", bound=Callable[..., Any])
EXPLAINED = {("train", "recipe"), ("train", "data")}  # refused with advice by the function itself
FLAG = re.compile(r"(?<![\w-])--(?:(?:data|set) )?([a-z][a-z-]*)")
RENAMED = {"train": {"out": "save"}}  # flags whose argument has another name
RESUME = re.compile(r"`fedveil train --resume ([^`]*)`")
COMMAND = re.compile(r"(`fedveil [^`]*`)")


def for_python(function: Function) -> Function:
    """The function with its arguments checked against their annotations.

    A wrong argument is a `UserError` in one sentence that names it. Errors that name flags of the
    command line name arguments instead.
    """
    hints, signature = None, inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from fedveil.serialization.codec import hints_of  # imports torch

        nonlocal hints
        hints = hints_of(function) if hints is None else hints
        bound = checked(function.__name__, signature, hints, *args, **kwargs)
        try:
            return function(*bound.args, **bound.kwargs)
        except UserError as problem:
            if FLAGS.get():
                raise
            told = in_python(str(problem.args[0]), RENAMED.get(function.__name__, {}))
            problem.args = (told, *problem.args[1:])
            raise

    return cast(Function, call)


def checked(
    name: str, signature: inspect.Signature, hints: Mapping[str, Any], /, *args: Any, **kwargs: Any
) -> inspect.BoundArguments:
    """The arguments of a function by name; unknown ones and wrong values are refused."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as problem:
        known = ", ".join(n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD)
        raise UserError(f"{name}: {problem}. Its arguments are {known}.") from None
    from fedveil.serialization.codec import as_tuple  # imports torch

    for argument, value in bound.arguments.items():
        bound.arguments[argument] = as_tuple(_plain(value), hints.get(argument, Any))
        _check(name, argument, bound.arguments[argument], hints.get(argument, Any), signature)
    return bound


def check_fields(made: Any) -> None:
    """Refuse fields of a dataclass that its annotations do not allow."""
    from fedveil.serialization.codec import check_value

    kind: type = type(made)
    hints = _fields(kind)
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        check_value(value, hints.get(field.name, Any), f"{type(made).__name__}: {field.name}")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    from fedveil.serialization.codec import hints_of

    return hints_of(kind)


def in_python(message: str, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """A message with the names of arguments in place of flags. Whole commands stay commands.

    >>> in_python("Give --stats-epsilon, or --data classes=no,yes.")
    'Give stats_epsilon, or classes=no,yes.'
    """
    parts = COMMAND.split(RESUME.sub(r"fedveil.resume('\1')", message))

    def argument(flag: re.Match[str]) -> str:
        return renamed.get(flag[1], flag[1].replace("-", "_"))

    return "".join(part if COMMAND.match(part) else FLAG.sub(argument, part) for part in parts)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item() if isinstance(value, np.integer | np.floating | np.bool_) else value


def _check(function: str, name: str, value: Any, hint: Any, signature: inspect.Signature) -> None:
    from fedveil.serialization.codec import check_value

    parameter = signature.parameters[name]
    if (function, name) in EXPLAINED:
        return
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return
    if value is None and parameter.default is None:
        return
    if isinstance(value, type) and hint is not Any:
        raise UserError(
            f"{function}: {name} is the class {value.__name__}. Give an instance: "
            f"{value.__name__}(…)."
        )
    check_value(value, hint, f"{function}: {name}")
