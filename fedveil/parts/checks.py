"""Checks of a part's fields. An error names the part, the field, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import HUGE, UserError, told


class FieldError(UserError):
    """A field of a part that has a value which is not allowed."""

    def __init__(self, of: str, field: str, value: object, wanted: str) -> None:
        super().__init__(f"{of}: {field} is {told(value)}; it must be {wanted}.")
        self.field, self.value, self.wanted = field, value, wanted

    def of_parameter(self, function: str, given: Mapping[str, object]) -> FieldError:
        """The error of a function that made the part, with the parameter that has the value.

        The error itself if no parameter has it, or several do that are named otherwise.
        """
        equal = [n for n, v in given.items() if _same(v, self.value)]
        alike = [n for n in equal if n == self.field] or [n for n in equal if self.field in n]
        if not alike and len(equal) != 1:
            return self
        name = (alike or equal)[0]
        return FieldError(function, name, given[name], self.wanted)


def _same(one: object, other: object) -> bool:
    """Whether two plain values are equal, or both NaN."""
    plain = type(one) in (int, float, str) and type(other) in (int, float, str)
    return plain and (one == other or (one != one and other != other))


def check(part: object, field: str, value: object, holds: bool, wanted: str) -> None:
    """Refuse `value` unless `holds`, which is false for NaN.

    >>> check("Clip", "norm", -1.0, -1.0 > 0, "a number above 0")
    Traceback (most recent call last):
    fedveil.parts.checks.FieldError: Clip: norm is -1.0; it must be a number above 0.
    """
    if not holds:
        raise FieldError(
            part if isinstance(part, str) else type(part).__name__, field, value, wanted
        )


def number(value: object) -> bool:
    """Whether a value is a number, of Python or NumPy; true and false are none."""
    if isinstance(value, bool | np.complexfloating) or (
        isinstance(value, int) and abs(value) > HUGE
    ):
        return False
    return isinstance(value, int | float | np.number)


def numbers(part: object, field: str, values: object) -> None:
    """A tuple of numbers."""
    listed = isinstance(values, tuple) and all(map(number, values))
    check(part, field, values, listed, "a tuple of numbers, such as (0.1, 0.2)")


def one_of(part: object, field: str, value: object, *choices: str) -> None:
    """One of a few words."""
    known = isinstance(value, str) and value in choices
    check(part, field, value, known, " or ".join(map(repr, choices)))


def positive(part: object, field: str, value: float) -> None:
    """0 < value < ∞."""
    check(part, field, value, number(value) and 0 < value < math.inf, "a number above 0")


def not_negative(part: object, field: str, value: float) -> None:
    """0 ≤ value < ∞."""
    check(part, field, value, number(value) and 0 <= value < math.inf, "0 or a number above it")


def fraction(part: object, field: str, value: float) -> None:
    """0 ≤ value < 1."""
    check(part, field, value, number(value) and 0 <= value < 1, "at least 0 and below 1")


def share(part: object, field: str, value: float) -> None:
    """0 < value ≤ 1."""
    check(part, field, value, number(value) and 0 < value <= 1, "above 0 and at most 1")


def count(part: object, field: str, value: object) -> None:
    """A whole number, at least 1; a float or a NumPy number is none, since files hold ints.

    >>> count("TopK", "k", 2.0)
    Traceback (most recent call last):
    fedveil.parts.checks.FieldError: TopK: k is 2.0; it must be a whole number (int), at least 1.
    """
    whole = isinstance(value, int) and number(value) and value >= 1
    check(part, field, value, whole, "a whole number (int), at least 1")


def repeatable(draw: Callable[[np.random.Generator], object], streams: int = 8) -> bool:
    """Whether two draws from equal streams are equal, so that all randomness is the stream's.

    >>> repeatable(lambda rng: rng.normal()), repeatable(lambda rng: np.random.normal())
    (True, False)
    """

    def once(seed: int) -> object:
        return _content(draw(np.random.default_rng(seed)))

    return all(once(seed) == once(seed) for seed in range(streams))


def varied(draw: Callable[[np.random.Generator], object], streams: int = 64) -> bool:
    """Whether some of a few streams give different draws.

    >>> varied(lambda rng: rng.random() < 0.5), varied(lambda rng: np.arange(3))
    (True, False)
    """
    first = _content(draw(np.random.default_rng(0)))
    return any(_content(draw(np.random.default_rng(n))) != first for n in range(1, streams))


def _content(drawn: object) -> object:
    """The numbers of a draw, to be compared bit by bit; NaN equals itself."""
    if isinstance(drawn, Tensor):
        numbers = drawn.detach().cpu().flatten().view(torch.uint8)
        return str(drawn.dtype), tuple(drawn.shape), numbers.numpy().tobytes()
    if isinstance(drawn, np.ndarray | np.generic):
        return str(drawn.dtype), drawn.shape, drawn.tobytes()
    if isinstance(drawn, Mapping):
        return tuple((key, _content(value)) for key, value in drawn.items())
    if is_dataclass(drawn) and not isinstance(drawn, type):
        return tuple(_content(getattr(drawn, field.name)) for field in fields(drawn))
    if isinstance(drawn, list | tuple):
        return tuple(map(_content, drawn))
    return repr(drawn) if isinstance(drawn, int | float | str | None) else None
