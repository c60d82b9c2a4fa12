"""The decorator of published algorithms: shared parameters, expanded into a full signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, Unpack, get_args, get_origin, get_type_hints

from fedveil.parts.checks import FieldError
from fedveil.recipe import Recipe
from fedveil.serialization.arguments import checked

P = ParamSpec("P")
SECTION = "\n\nArgs:\n"


@dataclass(frozen=True)
class Default:
    """The default of a shared parameter, beside its meaning: Annotated[int, Default(3), "…"]."""

    value: Any


def published(**defaults: Any) -> Callable[[Callable[P, Recipe]], Callable[P, Recipe]]:
    """Expand `**options: Unpack[Group]` into one keyword parameter for each key of the group.

    A group is a TypedDict whose keys are annotated with default and meaning; an algorithm that
    differs in a default names it here. Signature and docstring list every parameter, and the
    algorithm receives every option.
    """

    def complete(method: Callable[P, Recipe]) -> Callable[P, Recipe]:
        hints = _hints(method)
        signature = _signature(method, hints, defaults)
        plain = {name: one.annotation for name, one in signature.parameters.items()}

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Recipe:
            bound = checked(method.__name__, signature, plain, *args, **kwargs)
            given = dict(bound.arguments)
            bound.apply_defaults()
            try:
                return method(*bound.args, **bound.kwargs)
            except FieldError as problem:
                raise problem.of_parameter(method.__name__, given) from None

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = hints
        call.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}{SECTION}{_listed(call)}\n"
        return call

    return complete


def meanings(method: Callable[..., object]) -> dict[str, str]:
    """What each annotated parameter means, from Annotated[type, "meaning"]."""
    try:
        hints = get_type_hints(method, include_extras=True)
    except Exception:  # an annotation of a user's own is any expression
        return {}
    texts = {name: _extra(hint, str) for name, hint in hints.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _hints(method: Callable[..., object]) -> dict[str, Any]:
    """Annotations of all parameters: those of the function, then those of its group."""
    hints = get_type_hints(method, include_extras=True)
    returned = hints.pop("return")
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        group = get_args(hint)[0] if get_origin(hint) is Unpack else None
        found |= {name: hint} if group is None else get_type_hints(group, include_extras=True)
    return {**found, "return": returned}


def _signature(
    method: Callable[..., object], hints: Mapping[str, Any], defaults: Mapping[str, Any]
) -> inspect.Signature:
    own = inspect.signature(method).parameters
    parameters = []
    for name, hint in hints.items():
        if name == "return":
            continue
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if name in own:
            parameters.append(own[name].replace(annotation=plain))
            continue
        default = defaults.get(name, getattr(_extra(hint, Default), "value", None))
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=plain))
    assert defaults.keys() <= hints.keys()
    return inspect.Signature(parameters, return_annotation=hints["return"])


def _extra(hint: Any, kind: type) -> Any:
    """The first annotation of a kind in Annotated[type, …]."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, kind)), None)


def _listed(method: Callable[..., object]) -> str:
    def lines() -> Iterator[str]:
        said = meanings(method)
        for name, parameter in inspect.signature(method).parameters.items():
            stated = parameter.default not in (parameter.empty, None)
            default = f" [default: {parameter.default!r}]" if stated else ""
            yield f"    {name}: {said.get(name, '')}{default}"

    return "\n".join(lines())
