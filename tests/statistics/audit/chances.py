"""Margins of statistical tests, so that a correct program passes under nearly every seed.

Streams change whenever code does. Each assertion about chance is one that a correct program breaks
with a chance of at most RARE, and tests/*/audit hold fewer than 60 of them; alarms, of which there
are about 60 audits with four p-values each, have report.ALARM. So under new seeds the whole folder
fails with a chance below 60·1e-5 + 240·1e-6 < 0.1%.
"""

from __future__ import annotations

import math

from scipy.stats import binom, norm

from fedveil.audit import bounds

RARE = 1e-5
DEVIATIONS = float(norm.isf(RARE / 2))  # about 4.4, on either side


def at_most(chance: float, trials: int) -> int:
    """How often what has this chance happens at most, but for RARE."""
    return int(binom.isf(RARE, trials, chance))


def at_least(chance: float, trials: int) -> int:
    """How often it happens at least, but for RARE."""
    return int(binom.ppf(RARE, trials, chance))


def gaussian_range(
    mu: float, canaries: int, rounds: int, delta: float, alpha: float = 0.05
) -> tuple[float, float]:
    """Where the bound lies that all of these canaries in each of these rounds give, but for RARE.

    μ̂ of one round has the deviation 1/√(canaries·rounds), a bit more in few dimensions; a bound
    lies z_α of it below, an estimate (α = ½) does not.
    """
    spread = 1.1 / math.sqrt(canaries * rounds)
    middle = mu - float(norm.isf(alpha)) * spread
    ends = (max(middle - DEVIATIONS * spread, 0.0), middle + DEVIATIONS * spread)
    low, high = (bounds.gaussian_epsilon(one * math.sqrt(rounds), delta) for one in ends)
    return low, high
