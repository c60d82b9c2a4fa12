"""Linked parameters: `clip = "=25*steps*learning_rate"` follows the others over a grid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedveil.errors import UserError
from fedveil.training.settings import Settings

MARK = "="
FACTOR = re.compile(r"\s*([*/]?)\s*([\w.+-]+?)\s*(?=[*/]|$)")


def linked(settings: Settings) -> Settings:
    """The settings with every parameter that begins with `=` computed from the others.

    A link is a product and quotient of numbers and parameters, those given or the algorithm's
    defaults: DP-LSGD, §4 sets c = 25·K·η. Nothing else is evaluated.
    """
    plain = settings.parameters
    links = {name: value for name, value in plain.items() if is_link(value)}
    if not links:
        return settings
    known = {**_defaults(settings.algorithm), **plain}
    values = {name: computed(name, text, known) for name, text in links.items()}
    return settings.model_copy(update={"parameters": {**plain, **values}})


def is_link(value: Any) -> bool:
    """Whether a value is computed from other parameters."""
    return isinstance(value, str) and value.startswith(MARK)


def computed(name: str, text: str, known: Mapping[str, Any]) -> float:
    """The value of a link.

    >>> computed("clip", "=25*steps*learning_rate", {"steps": 10, "learning_rate": 0.02})
    5.0
    >>> computed("server_rate", "=1/clip", {"clip": 4})
    0.25
    """
    rest, value = text.removeprefix(MARK), 1.0
    while rest:
        found = FACTOR.match(rest)
        if found is None:
            raise UserError(
                f"{name} is '{text}', which is not a product of numbers and parameters. Write it "
                "as in =25*steps*learning_rate."
            )
        sign, factor = found.groups()
        number = _number(name, text, factor, known)
        value = value / number if sign == "/" else value * number
        rest = rest[found.end() :]
    return float(f"{value:.12g}")


def _number(name: str, text: str, factor: str, known: Mapping[str, Any]) -> float:
    value = known.get(factor, factor)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if number == 0 or is_link(value):
        raise UserError(
            f"{name} is '{text}', but '{factor}' is neither a number nor a parameter "
            "with a numeric value, or it is 0. Correct it."
        )
    return number


def _defaults(algorithm: str) -> dict[str, Any]:
    from fedveil.algorithms.calling import method_named, parameters_of

    return {name: p.default for name, p in parameters_of(method_named(algorithm)).items()}
