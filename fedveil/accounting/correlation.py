"""Correlated Gaussian noise: columns, sensitivity, prefix errors, optimized buffers.

Release t carries x_t of x = C⁻¹z, C lower triangular and Toeplitz with the column c_0 = 1, c_1, ….
Columns are positive and do not increase, which every formula here uses (docs/privacy.md,
"Correlated noise").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedveil.errors import UserError


@dataclass(frozen=True)
class Column:
    """c_j = coefficients[j], or c_0 = 1 and c_j = Σ_i weights[i]·decays[i]^(j−1) with buffers.

    The second form is a buffered linear Toeplitz matrix (BLT).
    """

    coefficients: tuple[float, ...] = (1.0,)
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        fine = all(0 < x < 1 for x in self.decays) and all(0 < x < math.inf for x in self.weights)
        if not fine or len(self.weights) != len(self.decays):
            raise UserError(
                "Buffers need as many positive weights as decays, and decays between 0 and 1."
            )
        first = self.first(max(len(self.coefficients), 3))
        if first[0] != 1 or not (np.diff(first) <= 0).all() or not (first >= 0).all():
            raise UserError(
                "A column of correlated noise must begin with 1, and must neither increase nor be "
                "negative. Use square_root(bands), or positive weights with a sum of at most 1."
            )

    @property
    def bands(self) -> int | None:
        """The number of coefficients that may be nonzero; None if there is no last one."""
        return None if self.weights else len(self.coefficients)

    def first(self, rows: int) -> np.ndarray:
        """c_0 … c_{rows−1}."""
        column = np.zeros(rows)
        if not self.weights:
            known = self.coefficients[:rows]
            column[: len(known)] = known
            return column
        column[:1] = 1.0
        powers = np.power.outer(np.array(self.decays), np.arange(max(rows - 1, 0)))
        column[1:] = np.array(self.weights) @ powers
        return column

    def inverse(self, rows: int) -> np.ndarray:
        """The column of C⁻¹: x_0, x_1, … for z = (1, 0, 0, …)."""
        from scipy.signal import lfilter

        return np.asarray(lfilter(*self._filter(), np.eye(1, rows)[0]))

    def _filter(self) -> tuple[np.ndarray, np.ndarray]:
        """C⁻¹ as a rational filter, numerator and denominator."""
        if not self.weights:
            return np.ones(1), np.array(self.coefficients)
        decays = np.array(self.decays)
        below = np.poly(decays)  # Π (1 − θ_i·s)
        above = below.copy()
        for place, weight in enumerate(self.weights):
            above[1:] += weight * np.poly(np.delete(decays, place))
        return below, above


def square_root(bands: int) -> Column:
    """c_j = c_{j−1}·(2j − 1)/(2j), cut after `bands`: the square root of the prefix sum's matrix.

    >>> square_root(3).coefficients
    (1.0, 0.5, 0.375)
    """
    ratios = [(2 * j - 1) / (2 * j) for j in range(1, bands)]
    return Column(tuple(float(c) for c in np.cumprod([1.0, *ratios])))


def prefix_errors(column: Column, rows: int) -> tuple[float, float]:
    """Root mean square over all prefix sums of the noise, and that of the last, for unit z."""
    squares = np.cumsum(np.cumsum(column.inverse(rows)) ** 2)
    return math.sqrt(squares.mean()), math.sqrt(squares[-1])


@functools.lru_cache(maxsize=4096)
def energy(column: Column, rows: int, separation: int, most: int | None, first: int = 0) -> float:
    """max ‖rows first … rows−1 of Σ_{t ∈ π} C[:, t]‖² over the patterns π of one unit.

    A pattern has at most `most` rounds, any two of them at least `separation` apart. From row 0 the
    worst pattern is 0, b, 2b, …  Kalinin and Lampert 2024, Thm. 2.

    >>> energy(square_root(2), 4, separation=2, most=None)
    2.5
    """
    c = column.first(rows)
    limit = -(-rows // separation) if most is None else min(most, -(-rows // separation))
    return max(_energy(c, pattern, first) for pattern in _worst(rows, separation, limit, first))


def _worst(rows: int, separation: int, limit: int, first: int) -> Iterator[Sequence[int]]:
    """The patterns among which the worst is: to the left, or around the first row that counts."""
    if first == 0:
        yield range(0, rows, separation)[:limit]
        return
    for offset in range(separation):
        for before in range(limit + 1):
            steps = range(-before, limit - before)
            pattern = [first + offset + step * separation for step in steps]
            yield [t for t in pattern if 0 <= t < rows]


def _energy(c: np.ndarray, pattern: Sequence[int], first: int) -> float:
    total = np.zeros(len(c))
    for t in pattern:
        total[t:] += c[: len(c) - t]
    return float(total[first:] @ total[first:])


def largest_row(column: Column, rows: int, separation: int, most: int | None) -> float:
    """max_t Σ_{s ∈ π} C[t, s] = c_0 + c_b + c_2b + …: how far one release can move."""
    return float(column.first(rows)[::separation][:most].sum())


@functools.lru_cache(maxsize=64)
def optimized(buffers: int, rounds: int, separation: int, most: int | None) -> Column:
    """The column of `buffers` buffers with the least sensitivity × prefix error.

    Found by Nelder and Mead's method from several starts. Nothing rests on its being the best: the
    sensitivity of what was found is computed like any other.
    """
    from scipy.optimize import minimize

    def loss(free: np.ndarray) -> float:
        column = _of_free(free)
        size = energy.__wrapped__(column, rounds, separation, most)
        return math.log(size) + 2 * math.log(prefix_errors(column, rounds)[0])

    starts = (_start(buffers, reach) for reach in (separation, rounds))
    options = {"maxiter": 400 * buffers, "xatol": 1e-4, "fatol": 1e-6}
    found = [minimize(loss, start, method="Nelder-Mead", options=options) for start in starts]
    return _of_free(min(found, key=lambda one: float(one.fun)).x)


def _start(buffers: int, reach: float) -> np.ndarray:
    """Decays that forget over 1 … `reach` rounds, and equal weights with a sum of a half."""
    times = np.geomspace(1.5, max(reach, 3.0), buffers)
    return np.concatenate([np.log(times - 1), np.full(buffers, -math.log(buffers))])


def _of_free(free: np.ndarray) -> Column:
    """Decays e^a/(1 + e^a) and weights e^b/(1 + Σ e^b), rounded to nine digits."""
    ours, theirs = np.split(np.clip(free, -20, 16), 2)
    share = np.exp(theirs)
    decays = 1 / (1 + np.exp(-ours))
    weights = share / (1 + share.sum())
    order = np.argsort(decays)
    return Column(
        weights=tuple(float(f"{w:.9g}") for w in weights[order]),
        decays=tuple(float(f"{d:.9g}") for d in decays[order]),
    )
