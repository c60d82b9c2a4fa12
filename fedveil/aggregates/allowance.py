"""What statistics may cost: the μ of one Gaussian release, and a probability to set aside."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.errors import UserError

SHARE = 0.05  # of ε, which training gives up for statistics by default
# Of δ, for values of a single unit that pass a threshold by chance. Small: several runs on one
# table add these up, and composition leaves an eighth of δ for them.
ASIDE = 0.002
CLOSE = 1 - 1e-6  # of ε, so that the accountant's rounding does not print more
LARGEST = 20.0  # μ: one Gaussian release with more has an ε above 200


@dataclass(frozen=True)
class Allowance:
    """All statistics together: a Gaussian release with 1/ratio² = precision, up to `escape`."""

    precision: float
    escape: float

    def __post_init__(self) -> None:
        if not (0 < self.precision < math.inf and 0 <= self.escape < 1):
            raise UserError(
                f"Statistics with precision {self.precision!r} and escape {self.escape!r} are not "
                "possible. Give epsilon and delta above 0."
            )

    @classmethod
    def alone(cls, epsilon: float, delta: float) -> Allowance:
        """Statistics that are (ε, δ)-DP by themselves.

        >>> round(Allowance.alone(1.0, 1e-5).escape, 12)
        2e-08
        """
        _check(epsilon, delta)
        return cls(largest_mu(CLOSE * epsilon, (1 - ASIDE) * delta) ** 2, ASIDE * delta)

    @classmethod
    def gaussian(cls, epsilon: float, delta: float) -> Allowance:
        """Sums that are (ε, δ)-DP by themselves and reveal no values: nothing is set aside.

        >>> Allowance.gaussian(1.0, 1e-5).precision > Allowance.alone(1.0, 1e-5).precision
        True
        """
        _check(epsilon, delta)
        return cls(largest_mu(CLOSE * epsilon, delta) ** 2, 0.0)

    @classmethod
    def share(cls, epsilon: float, delta: float, share: float = SHARE) -> Allowance:
        """What a Gaussian training of (1 − share)·ε leaves of ε: μ(ε)² − μ((1 − share)·ε)².

        Precisions of Gaussian releases add up, so 5 % of ε buy far more than 5 % of μ.
        """
        _check(epsilon, delta)
        left = (1 - ASIDE) * delta
        whole, training = (largest_mu(part * epsilon, left) for part in (1.0, 1 - share))
        return cls(whole**2 - training**2, ASIDE * delta)


def _check(epsilon: float, delta: float) -> None:
    accounting.check_epsilon(epsilon)
    accounting.check_delta(delta)


@functools.lru_cache(maxsize=64)
def largest_mu(epsilon: float, delta: float) -> float:
    """The largest μ = 1/ratio of one Gaussian release that is (ε, δ)-DP, from below.

    >>> 0.26 < largest_mu(1.0, 1e-5) < 0.28
    True
    """

    def spent(mu: float) -> float:
        return accounting.delta(events.GaussianRelease(1 / mu), epsilon)

    low, high = 1e-9, LARGEST
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) <= delta else (low, middle)
    return low
