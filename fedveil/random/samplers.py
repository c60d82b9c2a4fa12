"""Exact samplers of whole numbers: tables of 124-bit thresholds, and the rounded Gaussian.

Float rounding truncates no tail, and no float of the noise is ever released (docs/privacy.md,
"Samplers").
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

import numpy as np

from fedveil.errors import UserError
from fedveil.threads import in_order

BITS = 124  # a uniform whole number below 2^124 decides each draw from a table
HALF_BITS = 62  # thresholds are stored as two halves, each an int64
GUIDE_BITS = 16  # the leading bits, which decide most draws on their own
PRECISION = 320  # fractional bits of a weight, so that errors of sums are far below 2^-124
DIGITS = 150  # of the exponential, more than 320 bits
MARGIN = 2.0**-46  # |−ndtri(u) − v| ≤ MARGIN·(1 + v), with slack: see `_doubtful`
FEW_LEADING = 2**46  # below it 63 bits of u have too few digits for the margin
NARROWEST, WIDEST = 0.01, 2.0**40  # range of σ for which the margin is proven
PIECE = 2**16  # entries of a long vector per core
BLOCK = 2**14  # draws at a time, so that their arrays fit in the cache
Size = int | tuple[int, ...]


@dataclass(frozen=True)
class SamplingTable:
    """y = low + #{thresholds ≤ U}, U uniform below 2^124: a distribution on low..high.

    Draws are within `error` of the ideal distribution in total variation; their own distribution is
    exactly `counts()`/2^124.

    >>> coin = SamplingTable(0, (2**123,), 0.0)
    >>> coin.high, coin.counts() == (2**123, 2**123)
    (1, True)
    """

    low: int
    thresholds: tuple[int, ...] = field(repr=False)
    error: float

    def __post_init__(self) -> None:
        ends = (0, *self.thresholds, 2**BITS)
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise UserError(
                "SamplingTable: thresholds must be ascending from 0 to 2^124. Sort them."
            )

    @property
    def high(self) -> int:
        """The largest value."""
        return self.low + len(self.thresholds)

    def counts(self) -> tuple[int, ...]:
        """2^124·P(y) for y = low..high."""
        ends = (0, *self.thresholds, 2**BITS)
        return tuple(b - a for a, b in itertools.pairwise(ends))

    def draw(self, size: Size, rng: np.random.Generator) -> np.ndarray:
        """Independent draws, int64 of shape `size`."""
        places = self._places(math.prod(size) if isinstance(size, tuple) else size, rng)
        return (places.astype(np.int64) + self.low).reshape(size)

    def draw_sum(self, dim: int, draws: int, rng: np.random.Generator) -> np.ndarray:
        """Σ of `draws` independent vectors of draws, int64 [dim]; in chunks that fit the cache."""
        total = np.full(dim, draws * self.low, dtype=np.int64)
        rows = max(1, 2**15 // max(dim, 1))
        for start in range(0, draws, rows):
            part = min(rows, draws - start)
            total += self._places(part * dim, rng).reshape(part, dim).sum(axis=0, dtype=np.int64)
        return total

    @functools.cached_property
    def _halves(self) -> tuple[np.ndarray, np.ndarray]:
        """The thresholds' upper and lower 62 bits."""
        mask = 2**HALF_BITS - 1
        upper = np.array([edge >> HALF_BITS for edge in self.thresholds], dtype=np.int64)
        return upper, np.array([edge & mask for edge in self.thresholds], dtype=np.int64)

    @functools.cached_property
    def _guide(self) -> np.ndarray:
        """The draw decided by each value of the leading 16 bits, or −1 if a threshold is there.

        A threshold inside a cell, or on its first number, leaves the cell undecided.
        """
        starts = np.arange(2**GUIDE_BITS + 1, dtype=np.int64) << (HALF_BITS - GUIDE_BITS)
        below = np.searchsorted(self._halves[0], starts, side="left")
        return np.where(below[1:] == below[:-1], below[1:], -1).astype(np.int32)

    def _places(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """The number of thresholds at or below each U; reads more than 16 bits only if needed."""
        leading = _words(-(-size // 4), rng).astype("<u8", copy=False).view("<u2")[:size]
        places: np.ndarray = self._guide[leading]
        open_ = np.flatnonzero(places < 0)
        places[open_] = self._searched(leading[open_], rng)
        return places

    def _searched(self, leading: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The same from 46 more bits, and the last 62 where they equal a threshold's upper half."""
        upper, lower = self._halves
        rest = HALF_BITS - GUIDE_BITS
        fresh = (_words(len(leading), rng) >> np.uint64(64 - rest)).astype(np.int64)
        first = leading.astype(np.int64) << rest | fresh
        places = np.searchsorted(upper, first, side="right")
        for tied in np.flatnonzero(np.searchsorted(upper, first, side="left") != places):
            ties = np.flatnonzero(upper == first[tied])
            last = int(_words(1, rng)[0]) >> (64 - HALF_BITS)
            places[tied] = ties[0] + np.searchsorted(lower[ties], last, side="right")
        return places


@functools.lru_cache(maxsize=8)
def laplace_table(alpha: float, support: int) -> SamplingTable:
    """P(y) ∝ exp(−α|y|) on −m..m, exactly symmetric.  error = (2m+1)·2^-124.

    >>> laplace_table(0.5, 2).draw((2, 3), np.random.default_rng(0)).shape
    (2, 3)
    """
    _check("laplace_table", "alpha", alpha, 0 < alpha < math.inf, "a number above 0")
    _check("laplace_table", "support", support, support >= 1, "a whole number, at least 1")
    factor = _exp_minus(Decimal(alpha))
    weights = [2**PRECISION]
    for _ in range(support):
        weights.append(weights[-1] * factor >> PRECISION)
    return _symmetric(weights)


@functools.lru_cache(maxsize=8)
def gaussian_table(sigma: float, support: int) -> SamplingTable:
    """P(y) ∝ exp(−y²/(2σ²)) on −m..m, exactly symmetric.  error = (2m+1)·2^-124.

    >>> gaussian_table(2.0, 9).low, gaussian_table(2.0, 9).high
    (-9, 9)
    """
    _check("gaussian_table", "sigma", sigma, 0 < sigma < math.inf, "a number above 0")
    _check("gaussian_table", "support", support, support >= 1, "a whole number, at least 1")
    with localcontext() as context:
        context.prec = DIGITS
        rate = 1 / (2 * Decimal(sigma) ** 2)
        factor, ratio = _exp_minus(rate), _exp_minus(2 * rate)
    weights = [2**PRECISION]
    for _ in range(support):
        weights.append(weights[-1] * factor >> PRECISION)
        factor = factor * ratio >> PRECISION
    return _symmetric(weights)


@functools.lru_cache(maxsize=8)
def binomial_table(trials: int) -> SamplingTable:
    """Bin(N, ½) − N/2 for even N, exactly symmetric.  The truncated mass is below 2^-125.

    By Hoeffding P(|y| > s) ≤ 2·exp(−2s²/N), and s² ≥ 44·N makes that less than 2^-125.

    >>> binomial_table(2).counts() == (2**122, 2**123, 2**122)
    True
    """
    even = trials >= 2 and trials % 2 == 0
    _check("binomial_table", "trials", trials, even, "an even whole number, at least 2")
    half = trials // 2
    support = min(half, math.isqrt(44 * trials) + 1)
    weights = [2**PRECISION]
    for y in range(support):
        weights.append(weights[-1] * (half - y) // (half + y + 1))
    return _symmetric(weights, outside=2.0**-125 if support < half else 0.0)


def normals(count: int, rng: np.random.Generator) -> np.ndarray:
    """Independent N(0, 1), float64 [count].

    A long vector is drawn in blocks, each from its own part of the generator's sequence, so that
    all cores draw and the numbers do not depend on the number of cores. The generator continues
    behind the last part. One that has no parts, such as ChaCha20, draws in one piece.
    """
    own: Any = rng.bit_generator
    if count <= PIECE or not hasattr(own, "jumped"):
        return rng.standard_normal(count)
    drawn, blocks = np.empty(count), -(-count // PIECE)

    def fill(block: int) -> None:
        part = drawn[block * PIECE : (block + 1) * PIECE]
        np.random.Generator(own.jumped(block)).standard_normal(out=part)

    for _ in in_order(fill, range(blocks)):
        pass
    own.state = own.jumped(blocks).state
    return drawn


def rounded_gaussian(sigma: float, size: Size, rng: np.random.Generator) -> np.ndarray:
    """round(X) for X ~ N(0, σ²), int64; 0.01 ≤ σ ≤ 2^40.  The law is that of the real number X.

    |X| = σ·v with v = −Φ⁻¹(u), u uniform on (0, ½), whose bits are drawn as needed: 63 at once, and
    more if the float64 value of σ·v lies too near a half-integer, or u too near 0, to decide
    (`_doubtful`). |X| is a half-integer with probability 0, and u = 0 cannot remain.

    >>> int(np.abs(rounded_gaussian(0.05, 1000, np.random.default_rng(0))).max())
    0
    """
    _check(
        "rounded_gaussian",
        "sigma",
        sigma,
        NARROWEST <= sigma <= WIDEST,
        "a number from 0.01 to 2^40",
    )
    drawn = np.empty(size, dtype=np.int64)
    flat = drawn.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        part[:] = _rounded_block(sigma, part.size, rng)
    return drawn


def _rounded_block(sigma: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """`rounded_gaussian` for a block that fits the cache."""
    from scipy.special import ndtri

    words = _words(size, rng)
    leading = words >> np.uint64(1)
    scaled = sigma * -ndtri((leading.astype(np.float64) + 0.5) * 2.0**-64)
    whole = np.floor(scaled + 0.5).astype(np.int64)
    for place in np.flatnonzero(_doubtful(leading, scaled, sigma)):
        whole[place] = _resolved(int(leading[place]), 64, sigma, rng)
    negative = (words & np.uint64(1)).view(np.int64)
    return np.asarray(whole * (1 - 2 * negative))


def _doubtful(leading: np.ndarray, scaled: np.ndarray, sigma: float) -> np.ndarray:
    """Where |σ·v − (k + ½)| ≤ MARGIN·σ·(1 + v), or u < 2^-18: float64 may not decide there.

    Elsewhere it does. The computed v has these errors: ndtri, 7.2e-16·v by its author's tests and
    6.0e-16·v by ours; u rounded to 53 bits twice, 2^-52·u/φ(v) ≤ 2^-52·1.26; the bits of u not yet
    drawn, 2^-65/φ(v) ≤ 2^-49 for u ≥ 2^-18, v ≤ 4.5; σ·v rounded, 2^-53·v. Their sum is below
    2^-49·(1 + v), an eighth of the margin.
    """
    near = np.abs(scaled - np.floor(scaled) - 0.5) <= MARGIN * (sigma + scaled)
    return np.asarray(near | (leading < FEW_LEADING))


def _resolved(leading: int, bits: int, sigma: float, rng: np.random.Generator) -> int:
    """round(σ·v) from u ∈ [n, n+1)/2^bits, n = leading: compares u with P(X > k + ½) in 60 digits.

    Draws more bits of u until its interval lies on one side, so that no rounding decides.
    """
    from scipy.special import ndtri

    while leading < FEW_LEADING:  # too few digits for an initial guess within ½
        leading, bits = _longer(leading, bits, rng)
    floor = math.floor(sigma * -float(ndtri(leading / 2**bits)))
    slack = 2.0**-64  # in units of u's last place; 200 bits need far less
    while True:
        edge = _tail(floor, sigma, bits)
        if leading + 1 <= edge - slack:
            return floor + 1
        if leading >= edge + slack:
            return floor
        leading, bits = _longer(leading, bits, rng)


def _longer(leading: int, bits: int, rng: np.random.Generator) -> tuple[int, int]:
    """u with 64 more bits."""
    return leading << 64 | int(_words(1, rng)[0]), bits + 64


def _tail(floor: int, sigma: float, bits: int) -> Any:
    """2^bits·P(X > floor + ½), with 136 bits after the point."""
    exact = _arithmetic(bits + 136)
    reach = (exact.mpf(floor) + 0.5) / (exact.mpf(sigma) * exact.sqrt(2))
    return exact.ldexp(exact.erfc(reach), bits - 1)


@functools.lru_cache(maxsize=8)
def _arithmetic(precision: int) -> Any:
    """mpmath at this precision, separate from its shared context, which others may change."""
    import mpmath

    context = mpmath.MPContext()
    context.prec = precision
    return context


def _check(where: str, name: str, value: float, holds: bool, wanted: str) -> None:
    """A copy of parts.checks: parts import this module."""
    if not holds:
        raise UserError(f"{where}: {name} is {value!r}. Give {wanted}.")


def _words(size: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform 64-bit numbers: the generator's raw output, one word each."""
    return rng.integers(2**64, size=size, dtype=np.uint64)


def _exp_minus(rate: Decimal) -> int:
    """⌊exp(−rate)·2^320⌋, or one off, from 150 digits."""
    with localcontext() as context:
        context.prec = DIGITS
        return int((-rate).exp() * 2**PRECISION)


def _symmetric(weights: list[int], outside: float = 0.0) -> SamplingTable:
    """The table of a distribution on −m..m ∝ weights[|y|]; the right half mirrors the left.

    A threshold errs by less than 1 + 2^-100 units of 2^-124, a mass by the difference of two.
    """
    total = 2 * sum(weights) - weights[0]
    left = [(part << BITS) // total for part in itertools.accumulate(weights[:0:-1])]
    right = [2**BITS - edge for edge in reversed(left)]
    error = (len(left) + len(right) + 1) * 2.0**-BITS + outside
    return SamplingTable(1 - len(weights), (*left, *right), error)
