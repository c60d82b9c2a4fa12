"""Checks of a part's numbers: one sentence that names the part, the field and what would do."""

from __future__ import annotations

import math

from fedveil.errors import UserError


def check(part: object, field: str, value: float, holds: bool, wanted: str) -> None:
    """Refuse `value` unless `holds`; NaN never holds.

    >>> check("Clip", "norm", -1.0, -1.0 > 0, "a number above 0")
    Traceback (most recent call last):
    fedveil.errors.UserError: Clip: norm is -1.0; it must be a number above 0.
    """
    name = part if isinstance(part, str) else type(part).__name__
    if not holds:
        raise UserError(f"{name}: {field} is {value!r}; it must be {wanted}.")


def positive(part: object, field: str, value: float) -> None:
    """0 < value < ∞."""
    check(part, field, value, 0 < value < math.inf, "a number above 0")


def not_negative(part: object, field: str, value: float) -> None:
    """0 ≤ value < ∞."""
    check(part, field, value, 0 <= value < math.inf, "0 or a number above it")


def fraction(part: object, field: str, value: float) -> None:
    """0 ≤ value < 1."""
    check(part, field, value, 0 <= value < 1, "at least 0 and below 1")


def count(part: object, field: str, value: int) -> None:
    """A whole number, at least 1."""
    whole = not isinstance(value, bool) and value == int(value) and value >= 1
    check(part, field, value, whole, "a whole number, at least 1")
