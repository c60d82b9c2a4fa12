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
    """A number in a few digits, its exponent without zeros.

    >>> short(1e-5), short(0.25), short(1.5e20)
    ('1e-5', '0.25', '1.5e20')
    """
    mantissa, e, exponent = f"{number:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa
