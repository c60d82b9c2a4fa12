"""noise: what is added to the sum of messages, by the server or by the clients, and its event.

`multiplier` counts in units of what one message can be at most, so that noise follows the bound.
Noise meets the sum: client-side noise is drawn here as the sum of what the clients would add.
How much there is never depends on who came (docs/privacy.md, "Client-side noise").
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.checks import check, count, positive
from fedveil.privacy import events
from fedveil.privacy.norms import Norms

Place = Literal["server", "client"]
Amount = TypeVar("Amount", int, float)
HALF = 2**62  # discrete noise is drawn from whole numbers of twice 62 bits


class Noise(Protocol):
    """Noise for a sum of messages, and what one such release amounts to."""

    @property
    def at(self) -> Place:
        """Who adds it: then the server sees clean messages, or noisy ones."""

    @property
    def needs_grid(self) -> bool:
        """Whether messages must be multiples of a grid."""

    @property
    def settled(self) -> bool:
        """Whether its amount is fixed, or waits for a budget."""

    def scaled(self, level: float, message: Norms, sensitivity: Norms, delta: float) -> Noise:
        """This noise with its amount settled: more for a larger level."""

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """All the noise in a round's sum, float64 [dim]."""

    def event(self, message: Norms, sensitivity: Norms, summands: float) -> events.Round:
        """The release of a sum that holds the noise of `summands` clients (1: a single message)."""


@dataclass(frozen=True)
class Silent:
    """z = 0.  Nothing is hidden: the event is non-private."""

    needs_grid = False
    settled = True

    @property
    def at(self) -> Place:
        """The server, who adds nothing."""
        return "server"

    def scaled(self, level: float, message: Norms, sensitivity: Norms, delta: float) -> Noise:
        """There is nothing to scale."""
        raise UserError("Silent: this recipe adds no noise, so it cannot meet a privacy budget.")

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Zeros."""
        return torch.zeros(message.dim, dtype=torch.float64)

    def event(self, message: Norms, sensitivity: Norms, summands: float) -> events.Round:
        """ε = ∞."""
        return events.NonPrivate("no noise is added")


@dataclass(frozen=True)
class Gaussian:
    """z ~ N(0, (multiplier·C)²·I) on the sum; `None` waits for a budget.

    At the clients each of `expected` adds its share, variance (multiplier·C)²/expected, and the
    server adds the share of those who stayed away.
    """

    multiplier: float | None = None
    at: Place = "server"
    needs_grid = False

    def __post_init__(self) -> None:
        if self.multiplier is not None:
            positive(self, "multiplier", self.multiplier)
        _check_place(self, self.at)

    @property
    def settled(self) -> bool:
        """Whether the multiplier is known."""
        return self.multiplier is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, delta: float) -> Gaussian:
        """multiplier = level."""
        return replace(self, multiplier=level)

    def deviation(self, message: Norms) -> float:
        """Standard deviation on the sum: multiplier·C."""
        return _settled(self, self.multiplier) * message.l2

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """One Gaussian vector; shares of arrived clients and of the top-up add up to it."""
        shares = max(arrived / expected, 1.0) if self.at == "client" else 1.0
        unit = torch.from_numpy(rng.standard_normal(message.dim))
        return unit.mul_(self.deviation(message) * math.sqrt(shares))

    def event(self, message: Norms, sensitivity: Norms, summands: float) -> events.Round:
        """A Gaussian release with σ/Δ₂; a single message holds one share of the variance."""
        ratio = self.deviation(message) / sensitivity.l2
        return events.GaussianRelease(ratio / math.sqrt(summands))


@dataclass(frozen=True)
class TruncatedDiscreteLaplace:
    """P(y) ∝ exp(−α|y|) on {−m..m}, in grid steps, on each message.  Das et al. 2021, eq. 3.

    With Δ in grid steps a message is (αΔ₁, δ)-DP, where δ is the chance that any coordinate
    leaves the support; it is not 2^−dim, as the paper has it (docs/privacy.md, "TDL").
    """

    alpha: float | None = None
    support: int | None = None
    at: Place = "client"
    needs_grid = True

    def __post_init__(self) -> None:
        if (self.alpha is None) != (self.support is None):
            raise UserError("TruncatedDiscreteLaplace: give both alpha and support, or neither.")
        if self.alpha is not None and self.support is not None:
            positive(self, "alpha", self.alpha)
            count(self, "support", self.support)
        _check_place(self, self.at)

    @property
    def settled(self) -> bool:
        """Whether alpha and support are known."""
        return self.alpha is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, delta: float) -> Noise:
        """α = 1/(level·Δ₁), and the least support whose escape probability is at most delta."""
        reach, total = _reach(sensitivity)
        alpha = 1.0 / (level * total)
        support = _least_support(alpha, reach, total, delta)
        return replace(self, alpha=alpha, support=support)

    def masses(self) -> np.ndarray:
        """P(y) for y = −m..m."""
        support = _settled(self, self.support)
        weights = np.exp(-_settled(self, self.alpha) * np.abs(np.arange(-support, support + 1)))
        return np.asarray(weights / weights.sum())

    def variance(self) -> float:
        """E[y²] in grid steps squared.  Das et al. 2021, Lemma 1."""
        m, alpha = _settled(self, self.support), _settled(self, self.alpha)
        e, tail = math.exp(-alpha), math.exp(-m * alpha)
        top = 2 * e * (1 + e - tail * (m * (1 - e) + 1) ** 2 - tail * e)
        return top / ((1 - e) ** 2 * ((1 - e) + 2 * e * (1 - tail)))

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """The sum of one draw for each message; a lone draw when the server adds it."""
        draws = arrived if self.at == "client" else 1
        edges = _edges(_settled(self, self.alpha), _settled(self, self.support))
        steps = _sum_of_draws(edges, message.dim, draws, rng)
        return torch.from_numpy(steps * _grid(message))

    def event(self, message: Norms, sensitivity: Norms, summands: float) -> events.Round:
        """(αΔ₁, δ) of one message: the noise of other clients is not counted."""
        alpha, m = _settled(self, self.alpha), _settled(self, self.support)
        reach, total = _reach(sensitivity)
        delta = _escape(alpha, m, reach, total) + _sampling_error(message.dim, m, alpha * total)
        if delta < 1:
            return events.ApproximateRelease(alpha * total, delta)
        return events.NonPrivate(
            f"noise of {m} steps does not cover messages that can differ by {reach} steps"
        )

    @classmethod
    def das2021(cls, dim: int, levels: int, epsilon: float, mu: float) -> TruncatedDiscreteLaplace:
        """The published α and m, *not private as claimed*.  Das et al. 2021, Thm. 1 with eq. 6."""
        one = 2 * dim + mu * levels * math.sqrt(dim)
        largest = 2 + mu * levels
        alpha = epsilon / one
        return cls(alpha, math.ceil(-math.log1p(-math.expm1(alpha) * largest) / alpha))


@dataclass(frozen=True)
class Binomial:
    """y ~ Bin(N, ½) − N/2, in grid steps, on each message.  cpSGD: Agarwal et al. 2018.

    Its exact accounting is not part of this version: runs with it state no guarantee.
    """

    trials: int | None = None
    at: Place = "client"
    needs_grid = True

    def __post_init__(self) -> None:
        if self.trials is not None:
            even = self.trials >= 2 and self.trials % 2 == 0
            check(self, "trials", self.trials, even, "an even whole number, at least 2")
        _check_place(self, self.at)

    @property
    def settled(self) -> bool:
        """Whether the number of trials is known."""
        return self.trials is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, delta: float) -> Noise:
        """Refused: no event, no calibration."""
        raise UserError(
            "Binomial: its privacy is not accounted, so it cannot meet a budget; "
            "give trials, or use Gaussian or TruncatedDiscreteLaplace noise."
        )

    def variance(self) -> float:
        """N/4 in grid steps squared."""
        return _settled(self, self.trials) / 4

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """A sum of binomials is a binomial: one draw of arrived·N trials."""
        trials = _settled(self, self.trials) * (arrived if self.at == "client" else 1)
        steps = rng.binomial(trials, 0.5, size=message.dim) - trials // 2
        return torch.from_numpy(steps * _grid(message))

    def event(self, message: Norms, sensitivity: Norms, summands: float) -> events.Round:
        """ε = ∞ until it is accounted."""
        return events.NonPrivate("binomial noise is not accounted in this version")


def _check_place(noise: Noise, at: str) -> None:
    if at not in ("server", "client"):
        raise UserError(f"{type(noise).__name__}: at is '{at}'; it must be 'server' or 'client'.")


def _settled(noise: Noise, value: Amount | None) -> Amount:
    if value is None:
        raise UserError(
            f"{type(noise).__name__}: its amount is not settled; give it, or give (ε, δ)."
        )
    return value


def _grid(norms: Norms) -> float:
    if norms.grid is None:
        raise UserError("Discrete noise needs messages on a grid; quantize with StochasticRound.")
    return norms.grid


def _reach(sensitivity: Norms) -> tuple[int, float]:
    """(Δ∞, Δ₁) in grid steps; Δ∞ is whole, for moves are."""
    grid = _grid(sensitivity)
    return math.ceil(sensitivity.linf / grid * (1 - 1e-12)), sensitivity.l1 / grid


def _escape(alpha: float, support: int, reach: int, total: float) -> float:
    """δ: the chance that moves of at most `reach` and `total` steps leave the noise's support.

    A coordinate moved by j escapes with t(j), the mass of the top j values. The moves that waste
    none of the total maximise φ(j)/j, φ = −log(1 − t), so δ ≤ 1 − exp(−total·max_j φ(j)/j).
    """
    if reach > 2 * support:
        return 1.0
    values = np.abs(np.arange(support, -support - 1, -1))
    masses = np.exp(-alpha * values)
    top = np.cumsum(masses[:reach]) / masses.sum()
    steepest = float(np.max(-np.log1p(-top) / np.arange(1, reach + 1)))
    return -math.expm1(-total * steepest)


def _sampling_error(dim: int, support: int, epsilon: float) -> float:
    """(1 + e^ε)·η: the sampler's law lies within η of the stated one in total variation."""
    return (1 + math.exp(min(epsilon, 700.0))) * dim * (2 * support + 2) / (HALF * HALF)


def _least_support(alpha: float, reach: int, total: float, delta: float) -> int:
    """The least m that escapes with at most delta, by doubling and bisection."""
    high = reach
    while _escape(alpha, high, reach, total) > delta:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        enough = _escape(alpha, middle, reach, total) <= delta
        low, high = (low, middle) if enough else (middle, high)
    return high


def _sum_of_draws(
    edges: tuple[np.ndarray, np.ndarray], dim: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Σ of `draws` vectors of independent values −m..m, by inversion of 124-bit integers."""
    total = np.zeros(dim, dtype=np.int64)
    for _ in range(draws):
        total += _inverted(edges, dim, rng)
    return total - draws * (len(edges[0]) // 2)


def _inverted(
    edges: tuple[np.ndarray, np.ndarray], dim: int, rng: np.random.Generator
) -> np.ndarray:
    """How many edges lie at or below a uniform integer; its low half is drawn only for ties."""
    high, low = edges
    first = rng.integers(HALF, size=dim)
    place = np.searchsorted(high, first, side="right")
    for tied in np.flatnonzero(np.searchsorted(high, first, side="left") != place):
        ties = np.flatnonzero(high == first[tied])
        place[tied] = ties[0] + np.searchsorted(low[ties], rng.integers(HALF), side="right")
    return place


@functools.lru_cache(maxsize=8)
def _edges(alpha: float, support: int) -> tuple[np.ndarray, np.ndarray]:
    """P(y ≤ v)·2^124 for v = −m..m−1 as whole numbers, their high and low 62 bits.

    Whole-number arithmetic throughout, so that no tail is lost in the rounding of a float.
    """
    with localcontext() as context:
        context.prec = 100
        factor = int(Decimal(-alpha).exp() * 2**300)
    weights = [2**300]
    for _ in range(support):
        weights.append(weights[-1] * factor >> 300)
    sums = list(itertools.accumulate([*weights[:0:-1], *weights]))
    scaled = [HALF * HALF * partial // sums[-1] for partial in sums[:-1]]
    return np.array([e // HALF for e in scaled]), np.array([e % HALF for e in scaled])
