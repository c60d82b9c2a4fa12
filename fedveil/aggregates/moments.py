"""Noisy counts, sums and means, of contributions that are bounded per unit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedveil.aggregates.desk import GRID, Contributions, Desk, deviation

LONGEST_MEAN = math.sqrt(1.25)  # of ½ and 1 in two cells
CONFIDENT = 1.96  # standard deviations of an error bar: 95 % of draws are within


class NoisyEstimate(NamedTuple):
    """A noisy number, and the half width of its 95 % interval, for noise only."""

    value: float
    error: float


def row_count(desk: Desk, units: np.ndarray, most: int, precision: float) -> NoisyEstimate:
    """Σ min(rows, most).  A unit counts for at most `most` rows."""
    rows = np.bincount(units)
    given = Contributions(np.arange(len(rows)), np.zeros_like(rows), np.minimum(rows, most) / most)
    found = desk.sums(given, 1, precision)[0] / GRID
    return NoisyEstimate(most * float(found), CONFIDENT * most * deviation(precision))


def total(
    desk: Desk, units: np.ndarray, values: np.ndarray, limit: float, precision: float
) -> NoisyEstimate:
    """Σ over units of their sums, each clipped to ±limit."""
    sums = np.clip(np.bincount(units, values), -limit, limit) / limit
    given = Contributions(np.arange(len(sums)), np.zeros(len(sums), np.int64), sums)
    found = desk.sums(given, 1, precision)[0] / GRID
    return NoisyEstimate(limit * float(found), CONFIDENT * limit * deviation(precision))


def mean(
    desk: Desk,
    units: np.ndarray,
    values: np.ndarray,
    limits: tuple[float, float],
    precision: float,
) -> NoisyEstimate:
    """The mean over units of their own means, each clipped to the limits.

    A unit contributes (m − center)/width, which is −½ … ½, and 1 in two cells: at most √(1¼) long.
    """
    low, high = limits
    rows = np.bincount(units)
    there = np.flatnonzero(rows)
    means = np.clip(np.bincount(units, values)[there] / rows[there], low, high)
    moved = np.clip((means - (low + high) / 2) / (high - low), -0.5, 0.5)  # rounding may exceed it
    weights = np.concatenate([moved, np.ones(len(there))])
    cells = np.repeat(np.arange(2), len(there))
    given = Contributions(np.tile(there, 2), cells, weights / LONGEST_MEAN)
    sum_moved, count = LONGEST_MEAN * desk.sums(given, 2, precision) / GRID
    sigma, clients = LONGEST_MEAN * deviation(precision), max(float(count), 1.0)
    found = min(max((low + high) / 2 + (high - low) * float(sum_moved) / clients, low), high)
    spread = math.hypot(high - low, abs(found - (low + high) / 2))
    return NoisyEstimate(found, CONFIDENT * spread * sigma / clients)
