"""Numbers as people read them, never better than they are."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def rounded_up(number: float, digits: int = 3) -> str:
    """A number in a few digits, never smaller than it is.

    >>> rounded_up(4.9912), rounded_up(2.00096), rounded_up(1e-5)
    ('5', '2.01', '1e-5')
    """
    if not math.isfinite(number):
        return "∞"
    exact = Decimal(str(number))
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return short(float(exact.quantize(step, ROUND_CEILING)), digits)


def short(number: float, digits: int = 6) -> str:
    """A number in a few digits; with an exponent below 0.001 and above a million.

    >>> short(1e-4), short(0.00125), short(0.25), short(6114.2, 3), short(1.5e20)
    ('1e-4', '0.00125', '0.25', '6,110', '1.5e20')
    """
    told = f"{number:.{digits}g}"
    if "e" in told and 1 <= abs(number) < 1e6:
        return f"{float(told):,.0f}"
    if 0 < abs(float(told)) < 1e-3 and "e" not in told:
        told = f"{number:.{digits - 1}e}"
    mantissa, e, exponent = told.partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}" if e else mantissa
