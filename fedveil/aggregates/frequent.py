"""Frequent values: those that enough units have, without a list of candidates.

Each unit spreads a vector of length 1 over its values; a noisy sum must exceed a threshold that a
value of one unit passes with probability at most δ (Gopi et al. 2020, weighted Gaussian).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedveil.aggregates.desk import GRID, Contributions, Desk, deviation

MOST_VALUES = 16  # of one unit; of more, its most frequent ones count


@dataclass(frozen=True)
class FrequentValue:
    """A value that passed the threshold, and its noisy weight."""

    value: str
    weight: float  # a unit with k values adds 1/√k to each


def threshold(precision: float, escape: float, most: int = MOST_VALUES) -> float:
    """T = max_t 1/√t + σ·Φ⁻¹((1 − δ)^{1/t}), t = 1 … most.

    P(any of t values with weight 1/√t passes T) ≤ δ for every t: no unit's own values pass it with
    a larger probability.

    >>> threshold(0.01, 1e-6) > 1 + 10 * 4.7
    True
    """
    from scipy.stats import norm

    counts = np.arange(1, most + 1)
    each = -np.expm1(math.log1p(-escape) / counts)  # of one value, of t independent ones
    return float((1 / np.sqrt(counts) + deviation(precision) * norm.isf(each)).max())


def frequent_values(
    desk: Desk,
    units: np.ndarray,
    values: np.ndarray,
    precision: float,
    escape: float,
    most: int = MOST_VALUES,
) -> tuple[FrequentValue, ...]:
    """The values of many units, heaviest first.  (1/√precision)-Gaussian, up to `escape`.

    `values` are text, one per row, and `units` codes of the rows' units.
    """
    desk.set_aside(escape)
    names, codes = np.unique(values, return_inverse=True)
    given = spread(units, codes, most)
    found = desk.sums(given, len(names), precision)
    least = math.ceil(threshold(precision, escape, most) * GRID) + 1  # noise is rounded
    kept = np.flatnonzero(found >= least)
    kept = kept[np.argsort(-found[kept], kind="stable")]
    return tuple(FrequentValue(str(names[k]), float(found[k] / GRID)) for k in kept)


def spread(units: np.ndarray, codes: np.ndarray, most: int) -> Contributions:
    """1/√k for each of a unit's k distinct values, of which its `most` most frequent are kept."""
    if not len(units):
        return Contributions(units.astype(np.int64), codes.astype(np.int64), np.zeros(0))
    pairs, times = np.unique(np.stack([units, codes]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -times, pairs[0]))
    unit, code = pairs[0][order], pairs[1][order]
    first = np.searchsorted(unit, unit, side="left")
    kept = np.arange(len(unit)) - first < most
    unit, code = unit[kept], code[kept]
    sizes = np.bincount(unit)
    return Contributions(unit.astype(np.int64), code.astype(np.int64), 1 / np.sqrt(sizes[unit]))
