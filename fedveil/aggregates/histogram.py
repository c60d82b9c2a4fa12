"""Noisy histograms of the units' values, and the ranges and quantiles that follow from them.

Each unit spreads a total weight of at most 1 over the bins: its share of values in each. Whatever
is computed from the noisy bins is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedveil.aggregates.desk import GRID, Contributions, Desk, deviation

SMALLEST, OCTAVES = -7, 40  # coarse bins: [2^k, 2^(k+1)) for k = -7 … 32, and the same below 0
COARSE = np.concatenate(
    [-(2.0 ** np.arange(SMALLEST + OCTAVES, SMALLEST - 1, -1)),
     2.0 ** np.arange(SMALLEST, SMALLEST + OCTAVES + 1)]
)  # fmt: skip
FINE = 16  # bins within the range that the coarse bins show
WIDE = 3  # octaves from which fine bins are equal in the logarithm
FLOOR = 1.5  # standard deviations that a bin must have to extend a range
SHOWN = 2.0  # standard deviations from which a bin's weight counts for quantiles
SURE = 3.5  # standard deviations from which a bin belongs to the range in any case


@dataclass(frozen=True, eq=False)
class NoisyHistogram:
    """Noisy weights of bins between `edges`; the first and last bin are open.  σ per bin."""

    edges: np.ndarray  # [bins + 1], increasing
    weights: np.ndarray  # [bins]
    sigma: float

    def quantile(self, q: float) -> float:
        """The value below which a share q of the weight lies, linear within a bin.

        Bins whose weight may be noise alone count as empty. Their noise would add up in the tails.
        """
        total = np.cumsum(np.where(self.weights > SHOWN * self.sigma, self.weights, 0.0))
        if total[-1] <= 0:
            return float((self.edges[0] + self.edges[-1]) / 2)
        places = np.concatenate([[0.0], total / total[-1]]) + 1e-12 * np.arange(len(self.edges))
        return float(np.interp(q, places, self.edges))

    def rank_error(self) -> float:
        """Two standard deviations of the share of weight below an edge, at worst."""
        total = max(float(self.weights.sum()), self.sigma)
        return 2 * self.sigma * math.sqrt(len(self.weights)) / 2 / total

    def range(self) -> tuple[int, int] | None:
        """First and last bin of the heaviest run of bins and of all SURE ones; None if none.

        In the run, each weight is reduced by FLOOR·σ. Empty bins are then negative, so that noise
        hardly ever extends the run.
        """
        best, run, start = 0.0, 0.0, 0
        found = set(np.flatnonzero(self.weights > SURE * self.sigma).tolist())
        for place, weight in enumerate(self.weights - FLOOR * self.sigma):
            if run <= 0:
                run, start = 0.0, place
            run += weight
            if run > best:
                best, heaviest = run, {start, place}
        found |= heaviest if best > SURE * self.sigma else set()
        return (min(found), max(found)) if found else None


def histogram(
    desk: Desk, units: np.ndarray, values: np.ndarray, edges: np.ndarray, precision: float
) -> NoisyHistogram:
    """Shares of each unit's values per bin, summed with noise.  (1/√precision)-Gaussian.

    Values beyond the edges count for the first and the last bin.
    """
    bins = binned(values, edges)
    noisy = desk.sums(shares(units, bins, len(edges) - 1), len(edges) - 1, precision)
    return NoisyHistogram(edges, noisy / GRID, deviation(precision))


def binned(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The bin of each value, int64."""
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def shares(units: np.ndarray, cells: np.ndarray, count: int) -> Contributions:
    """Each unit's share of its rows per cell: they sum to 1, so their ℓ2 norm is at most 1."""
    if not len(units):
        return Contributions(units.astype(np.int64), cells.astype(np.int64), np.zeros(0))
    pairs, times = np.unique(units.astype(np.int64) * count + cells, return_counts=True)
    unit, cell = pairs // count, pairs % count
    rows = np.bincount(units)
    return Contributions(unit, cell, times / rows[unit])


def refined(coarse: NoisyHistogram) -> np.ndarray | None:
    """Edges of FINE bins over the range of a coarse histogram; None if it shows none.

    They are equal, or equal in the logarithm for a range of more than WIDE octaves on one side.
    """
    found = coarse.range()
    if found is None:
        return None
    low, high = float(coarse.edges[found[0]]), float(coarse.edges[found[1] + 1])
    if low * high > 0 and max(high / low, low / high) > 2**WIDE:
        return np.asarray(np.geomspace(low, high, FINE + 1))
    return np.linspace(low, high, FINE + 1)
