"""Integer noise, in grid steps, that each client adds to its own message of finitely many bits.

The distributions are exact: masses are integers (`samplers`), and every claimed (ε, δ) is checked
by enumeration for small dimensions (tests/unit/parts/test_discrete.py).
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events, integers
from fedveil.accounting.norms import Norms
from fedveil.accounting.rounding import short
from fedveil.errors import UserError
from fedveil.parts.checks import check, count, number, positive
from fedveil.parts.noise import Noise, Place, Share, calibrated_amount, grid_of
from fedveil.random.samplers import SamplingTable, binomial_table, gaussian_table, laplace_table

WIDTHS, BEYOND = 10.0, 4e-22  # standard deviations of a binomial, and its mass beyond them
FAR = 24.0  # standard deviations beyond which tails are negligible


class _OnMessages(Noise):
    """Noise in each message. The server adds none."""

    at: Place = "client"
    needs_grid = True
    on_messages = True
    adds_up = True

    @abstractmethod
    def table(self, message: Norms) -> SamplingTable:
        """The distribution of the noise of one coordinate."""

    def max_magnitude(self, message: Norms) -> int:
        """The largest value of the distribution, in grid steps."""
        return self.table(message).high

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Zero, because the noise is in the messages."""
        return torch.zeros(message.dim, dtype=torch.int64)

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        """An independent draw for each coordinate."""
        return self.table(message).draw(message.dim, rng)

    @abstractmethod
    def variance(self, message: Norms) -> float:
        """E[y²] of one coordinate of one message, in grid steps squared."""

    def deviation_of_message(self, message: Norms) -> float:
        """√E[y²]."""
        return math.sqrt(self.variance(message))

    def deviation_of_sum(self, message: Norms, expected: float, surplus: float) -> float:
        """The standard deviation for the expected number of messages."""
        return grid_of(message) * math.sqrt(self.variance(message) * expected)

    def secured(self) -> Noise:
        """Unchanged: it is already integers."""
        return self


@dataclass(frozen=True)
class TruncatedDiscreteLaplace(_OnMessages):
    """P(y) ∝ exp(−α|y|) on {−m..m}, in grid steps, on each message.  Das et al. 2021, eq. 3.

    With Δ in grid steps, a message is (αΔ₁, δ)-DP, where δ is the probability that any coordinate
    leaves the support. It is not 2^−dim, as the paper claims (docs/privacy.md, "TDL").
    """

    alpha: float | None = None
    support: int | None = None
    adds_up = False

    def __post_init__(self) -> None:
        if (self.alpha is None) != (self.support is None):
            raise UserError(
                "TruncatedDiscreteLaplace: only one of alpha and support is given. Give both, or "
                "neither."
            )
        if self.alpha is not None and self.support is not None:
            positive(self, "alpha", self.alpha)
            count(self, "support", self.support)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether alpha and support are given."""
        return self.alpha is not None

    def amount(self, message: Norms) -> tuple[float, int]:
        """(α, m)."""
        return calibrated_amount(self, self.alpha), calibrated_amount(self, self.support)

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """α = 1/(level·Δ₂), and the least support with an escape of at most half of delta."""
        steps = sensitivity.steps
        alpha = 1.0 / (level * steps.l2)
        return replace(self, alpha=alpha, support=_least_support(alpha, steps, share.delta / 2))

    def table(self, message: Norms) -> SamplingTable:
        """The distribution of the noise of one coordinate."""
        return laplace_table(*self.amount(message))

    def masses(self, message: Norms) -> np.ndarray:
        """P(y) for y = −m..m."""
        return _laplace_masses(*self.amount(message))

    def variance(self, message: Norms) -> float:
        """E[y²] in grid steps squared.  Das et al. 2021, Lemma 1."""
        alpha, m = self.amount(message)
        e, tail = math.exp(-alpha), math.exp(-m * alpha)
        top = 2 * e * (1 + e - tail * (m * (1 - e) + 1) ** 2 - tail * e)
        return top / ((1 - e) ** 2 * ((1 - e) + 2 * e * (1 - tail)))

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """(αΔ₁, δ) of one message, or its Rényi divergences. Noise of others is not counted."""
        alpha, m = self.amount(message)
        steps = sensitivity.steps
        escape = _laplace_escape(alpha, m, steps)
        if escape >= 1:
            return events.NonPrivate(
                f"noise of {m} steps does not cover messages that can differ by {steps.linf} steps"
            )
        error = message.dim * _error(m)
        pure = alpha * steps.l1
        normalizer = 1 / float(self.masses(message)[m])
        values = integers.laplace_divergences(alpha, normalizer, steps)
        aside = (1 + math.exp(min(pure, 700.0))) * error
        law = _laplace_steps(alpha, m)
        return events.Proven(
            (
                events.ApproximateRelease(pure, min(escape + aside, 1.0)),
                events.RenyiRelease(integers.conditioned(values, escape), escape, error),
                *_dominated(integers.dominating(law, steps, integers.even_core(law)), error),
            )
        )

    def describe(self) -> str:
        """α and the support."""
        alpha = calibrated_amount(self, self.alpha)
        return f"Truncated discrete Laplace, α = {alpha:.4g}, on ±{self.support} grid steps"


@dataclass(frozen=True)
class PublishedLaplace(TruncatedDiscreteLaplace):
    """TDL with the α and m of Das et al. 2021, Thm. 1 with eq. 6: *not private as claimed*.

    For reproduction only: it claims no guarantee and meets no budget. Its statement gives the true
    δ of a message next to the claimed 2^−dim. `epsilon` is the paper's, per message and round.
    """

    epsilon: float = 10.0
    mu: float = 0.1

    def __post_init__(self) -> None:
        positive(self, "epsilon", self.epsilon)
        positive(self, "mu", self.mu)
        for name in ("alpha", "support"):
            value = getattr(self, name)
            check(self, name, value, value is None, "left out: it follows from epsilon and mu")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Always, because its amount follows from the dimension."""
        return True

    def amount(self, message: Norms) -> tuple[float, int]:
        """The published (α, m) for messages of this dimension and grid."""
        levels, dim = message.steps.linf, message.dim
        alpha = self.epsilon / (2 * dim + self.mu * levels * math.sqrt(dim))
        inside = 1 - math.expm1(alpha) * (2 + self.mu * levels)
        check(self, "epsilon", self.epsilon, inside > 0, f"smaller for a dimension of {dim}")
        return alpha, max(math.ceil(-math.log(inside) / alpha), 1)

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """Refused, because it meets no budget."""
        raise UserError(
            "PublishedLaplace is not private as claimed, so it cannot meet a budget. Use "
            "calibration='exact'."
        )

    def true_delta(self, message: Norms, sensitivity: Norms) -> float:
        """The δ of one message at its own ε = αΔ₁: the probability that a coordinate escapes."""
        return _laplace_escape(*self.amount(message), sensitivity.steps)

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """ε = ∞, with the true δ next to the claimed one."""
        _, m = self.amount(message)
        once = float(self.masses(message)[-1])
        return events.NonPrivate(
            f"QTDL with the published m = {m} is not private as claimed: the true δ of a message "
            f"is {short(self.true_delta(message, sensitivity), 2)} ({short(once, 2)} if a single "
            f"coordinate changes by one level), not 2^-{message.dim} as in Das et al. 2021"
        )

    def describe(self) -> str:
        """The distribution, and that it is not private as claimed."""
        return "Truncated discrete Laplace as published, which is not private as claimed"


@dataclass(frozen=True)
class Binomial(_OnMessages):
    """y ~ Bin(N, ½) − N/2, in grid steps, on each message.  cpSGD: Agarwal et al. 2018, §4."""

    trials: int | None = None

    def __post_init__(self) -> None:
        if self.trials is not None:
            even = number(self.trials) and self.trials >= 2 and self.trials % 2 == 0
            check(self, "trials", self.trials, even, "an even whole number, at least 2")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether the number of trials is given."""
        return self.trials is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """The least even N with √N/2 ≥ level·C/√expected: the sum has deviation level·C."""
        deviation = level * message.steps.l2 / math.sqrt(share.expected)
        return replace(self, trials=max(2 * math.ceil(2 * deviation**2), 2))

    def table(self, message: Norms) -> SamplingTable:
        """The distribution of the noise of one coordinate."""
        return binomial_table(calibrated_amount(self, self.trials))

    def variance(self, message: Norms) -> float:
        """N/4 in grid steps squared."""
        return calibrated_amount(self, self.trials) / 4

    def describe(self) -> str:
        """The number of trials."""
        return f"Binomial with {self.trials} trials"

    def stand_in(self) -> Noise:
        """A discrete Gaussian with the same standard deviation."""
        return DiscreteGaussian()

    def like(self, stand_in: Noise) -> Noise:
        """The least even number of trials with that standard deviation."""
        assert isinstance(stand_in, DiscreteGaussian)
        return Binomial(max(2 * math.ceil(2 * calibrated_amount(self, stand_in.sigma) ** 2), 2))

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """The Gaussian that dominates Bin(h·N, ½) for h noise shares, or its Rényi divergences."""
        trials = calibrated_amount(self, self.trials) * max(int(noise_shares), 1)
        steps = sensitivity.steps
        masses = binomial_masses(trials)
        escape = integers.escape(masses, steps)
        if escape >= 1:
            return events.NonPrivate(
                f"binomial noise of {trials} trials does not cover messages that can differ by "
                f"{steps.linf} steps"
            )
        error = max(int(noise_shares), 1) * message.dim * (_error(binomial_reach(trials)) + BEYOND)
        normal = integers.dominating(_binomial_steps(trials), steps)
        ways = _dominated(normal, error)
        if normal and _as_good_as_gaussian(normal[0], math.sqrt(trials) / 2 / steps.l2):
            return events.Proven(ways)
        values = integers.divergences(masses, steps)
        renyi = events.RenyiRelease(integers.conditioned(values, escape), escape, error)
        return events.Proven((renyi, *ways))


@dataclass(frozen=True)
class DiscreteGaussian(_OnMessages):
    """P(y) ∝ exp(−y²/(2σ²)) on {−m..m}, in grid steps, on each message.

    Without truncation at m, a message is Δ₂²/(2σ²)-concentrated (Canonne et al. 2020, Thm. 4), and
    a sum of h messages is nearly Δ₂²/(2hσ²)-concentrated (Kairouz et al. 2021, Thm. 1). The
    truncated mass is in δ (docs/privacy.md, "Discrete Gaussian").
    """

    sigma: float | None = None
    support: int | None = None

    def __post_init__(self) -> None:
        if (self.sigma is None) != (self.support is None):
            raise UserError(
                "DiscreteGaussian: only one of sigma and support is given. Give both, or neither."
            )
        if self.sigma is not None and self.support is not None:
            positive(self, "sigma", self.sigma)
            count(self, "support", self.support)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether sigma and support are given."""
        return self.sigma is not None

    def scaled(self, level: float, message: Norms, sensitivity: Norms, share: Share) -> Noise:
        """σ = level·C/√expected: the sum has deviation level·C. Truncation takes 1% of delta."""
        sigma = level * message.steps.l2 / math.sqrt(share.expected)
        draws = message.dim * max(share.expected, 1.0)
        distance = share.delta / 100 / (1 + math.exp(share.epsilon)) / draws
        return replace(self, sigma=sigma, support=_least_cut(sigma, distance))

    def table(self, message: Norms) -> SamplingTable:
        """The distribution of the noise of one coordinate."""
        return gaussian_table(
            calibrated_amount(self, self.sigma), calibrated_amount(self, self.support)
        )

    def event(
        self, message: Norms, sensitivity: Norms, noise_shares: float, expected: float
    ) -> events.Release:
        """α·Δ₂²/(2hσ²) for h noise shares, the distance to a discrete Gaussian, and truncation.

        Or the Gaussian that dominates the sum.
        """
        sigma, m = calibrated_amount(self, self.sigma), calibrated_amount(self, self.support)
        holds = max(int(noise_shares), 1)
        orders = integers.ALPHAS[:, 0]
        concentrated = orders * sensitivity.steps.l2**2 / (2 * holds * sigma**2)
        roughness = message.dim * sum_roughness(sigma, holds)
        values = concentrated + (2 * orders - 1) / (orders - 1) * roughness
        distance = holds * message.dim * (_tail(sigma, m) + _error(m))
        renyi = events.RenyiRelease(tuple(float(v) for v in values), 0.0, min(distance, 1.0))
        normal = integers.dominating(_gaussian_steps(sigma, holds), sensitivity.steps)
        return events.Proven((renyi, *_dominated(normal, renyi.distance)))

    def variance(self, message: Norms) -> float:
        """Σ y²·P(y), in grid steps squared."""
        support = calibrated_amount(self, self.support)
        y = np.arange(-support, support + 1, dtype=np.float64)
        weights = np.exp(-0.5 * (y / calibrated_amount(self, self.sigma)) ** 2)
        return float((weights * y**2).sum() / weights.sum())

    def describe(self) -> str:
        """σ and the support."""
        sigma = calibrated_amount(self, self.sigma)
        return f"Discrete Gaussian, σ = {sigma:.4g}, on ±{self.support} grid steps"


def sum_roughness(sigma: float, noise_shares: int) -> float:
    """A bound on |log P(ΣY_i = y)/P(Y = y)|, Y_i ~ N_Z(0, σ²), Y ~ N_Z(0, hσ²), for every y.

    Adding the (k+1)-th compares Σ_x exp(−(x − c)²/(2v)), v = σ²k/(k+1), for two centers c. By
    Poisson summation their ratio is within (1 + 2s)/(1 − 2s), s = Σ_j exp(−2π²vj²).

    >>> sum_roughness(2.0, 600) < 1e-14, sum_roughness(0.5, 1)
    (True, 0.0)
    """
    if noise_shares <= 1:
        return 0.0
    k = np.arange(1, noise_shares)
    first = np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1))
    rest = 2 * first / (1 - first)  # at least twice the theta sum
    if rest.max() >= 1:
        return math.inf
    return float(np.sum(np.log1p(rest) - np.log1p(-rest)))


@functools.lru_cache(maxsize=64)
def binomial_masses(trials: int) -> np.ndarray:
    """P(y) of Bin(N, ½) − N/2 for |y| ≤ 10 standard deviations, or for all y if fewer."""
    reach = binomial_reach(trials)
    y = np.arange(1, reach + 1)
    logs = np.cumsum(np.log((trials / 2 - y + 1) / (trials / 2 + y)))
    weights = np.exp(np.concatenate([logs[::-1], [0.0], logs]))
    return np.asarray(weights / weights.sum())


@functools.lru_cache(maxsize=64)
def _binomial_steps(trials: int) -> integers.NormalSteps | None:
    reach = min(trials // 2, math.ceil(FAR * math.sqrt(trials) / 2))
    y = np.arange(1, min(reach, integers.MOST_VALUES) + 1)
    logs = np.cumsum(np.log((trials / 2 - y + 1) / (trials / 2 + y)))
    return integers.steps_of(np.append(0.0, logs), whole=reach == trials // 2)


@functools.lru_cache(maxsize=64)
def _gaussian_steps(sigma: float, noise_shares: int) -> integers.NormalSteps | None:
    total = sigma * math.sqrt(noise_shares)
    y = np.arange(min(math.ceil(FAR * total) + 1, integers.MOST_VALUES) + 1)
    return integers.steps_of(-(y**2) / (2 * total**2), False, sum_roughness(sigma, noise_shares))


@functools.lru_cache(maxsize=64)
def _laplace_steps(alpha: float, support: int) -> integers.NormalSteps | None:
    y = np.arange(min(support, integers.MOST_VALUES) + 1)
    return integers.steps_of(-alpha * y, whole=True)


def _dominated(
    normal: tuple[integers.Normal, ...], distance: float
) -> tuple[events.Dominated, ...]:
    return tuple(
        events.Dominated(events.GaussianRelease(ratio), escape, distance)
        for ratio, escape in normal
    )


def _as_good_as_gaussian(normal: integers.Normal, ratio: float) -> bool:
    """Whether no Rényi bound can be better: its conversion costs more than 1% of the ratio."""
    return normal.escape <= integers.ESCAPES[0] and normal.ratio >= 0.99 * ratio


def binomial_reach(trials: int) -> int:
    """The range of `binomial_masses`. The mass beyond is below 2·exp(−2·5²), Hoeffding 1963."""
    return min(trials // 2, math.ceil(WIDTHS * math.sqrt(trials) / 2))


@functools.lru_cache(maxsize=64)
def _laplace_masses(alpha: float, support: int) -> np.ndarray:
    weights = np.exp(-alpha * np.abs(np.arange(-support, support + 1)))
    return np.asarray(weights / weights.sum())


def _laplace_escape(alpha: float, support: int, steps: Norms) -> float:
    return integers.escape(_laplace_masses(alpha, support), steps)


def _error(support: int) -> float:
    """The maximum distance of a 124-bit `SamplingTable` from its distribution on −m..m."""
    return (2 * support + 2) * 2.0**-124


def _tail(sigma: float, cut: int) -> float:
    """P(|Y| > m) ≤ erfc(m/(σ√2)): the sum beyond m is below its integral, and Z ≥ σ√(2π)."""
    return math.erfc(cut / (sigma * math.sqrt(2)))


def _least_cut(sigma: float, distance: float) -> int:
    """The least m with P(|Y| > m) ≤ distance."""
    return _least(lambda m: _tail(sigma, m) <= distance, 1)


def _least_support(alpha: float, steps: Norms, delta: float) -> int:
    """The least m with an escape of at most delta."""
    return _least(lambda m: _laplace_escape(alpha, m, steps) <= delta, int(steps.linf))


def _least(enough: Callable[[int], bool], start: int) -> int:
    """The least integer that is enough, by doubling and bisection."""
    high = max(start, 1)
    while not enough(high):
        high *= 2
    low = high // 2 if high > start else 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
