"""The best of a random number of runs: what releasing it alone costs.

K is drawn from a law that knows no data, K runs are drawn and played with independent noise, and
only the best one is released. The cost hardly grows with K if the law is spread out enough.
Papernot and Steinke 2022; the proof of what is counted is in docs/privacy.md, "Choosing the best".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy import events
from fedveil.privacy.events import ORDERS
from fedveil.privacy.together import Charged, curve, fitting

MOST = 10_000  # runs: nobody waits for more, and a law that draws more is refused
TAIL = 1e-12  # of a law's mass that may lie beyond MOST


class Law(Protocol):
    """How many runs are played: the law of K."""

    @property
    def mean(self) -> float:
        """E[K]."""

    def chances(self) -> np.ndarray:
        """P(K = k), k = 0, 1, …, up to MOST."""

    def selected(self, divergences: np.ndarray) -> np.ndarray:
        """D_λ of the best of K, at ORDERS, from D_λ of a single run at ORDERS."""


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """P(K = k) ∝ (1 − γ)^k·Π_{l<k} (l + η)/(l + 1), k ≥ 1.  η = 1 is geometric, 0 logarithmic.

    D'_λ = D_λ + (1 + η)·min_μ((1 − 1/μ)·D_μ + log(1/γ)/μ) + log E[K]/(λ − 1).
    Papernot et al. 2022, Thm. 2, for every η > −1.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not (self.eta > -1 and math.isfinite(self.eta)):
            raise UserError(f"eta is {self.eta}; it must be a number above -1, such as 0 or 1.")
        if not 0 < self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}; it must lie between 0 and 1.")

    @classmethod
    def of_mean(cls, eta: float, mean: float) -> TruncatedNegativeBinomial:
        """The law with this η and E[K], by bisection; γ is never above what is sought.

        >>> round(TruncatedNegativeBinomial.of_mean(1.0, 8.0).gamma, 6)
        0.125
        """
        if not mean > 1:
            raise UserError(f"The expected number of runs is {mean:g}; it must be above 1.")
        low, high = -700.0, math.log1p(-1e-12)  # of log γ
        while high - low > 1e-12:
            middle = (low + high) / 2
            more = cls(eta, math.exp(middle)).mean >= mean
            low, high = (middle, high) if more else (low, middle)
        return cls(eta, math.exp(low))

    @property
    def mean(self) -> float:
        """E[K] = η·(1/γ − 1)/(1 − γ^η), and (1/γ − 1)/log(1/γ) for η = 0."""
        log = -math.log(self.gamma)
        if abs(self.eta * log) < 1e-9:
            return math.expm1(log) / log
        return self.eta * math.expm1(log) / -math.expm1(-self.eta * log)

    def chances(self) -> np.ndarray:
        """From P(K = 1) on by P(K = k + 1)/P(K = k) = (1 − γ)·(k + η)/(k + 1)."""
        k = np.arange(1, MOST)
        ratios = np.log1p(-self.gamma) + np.log(k + self.eta) - np.log(k + 1)
        weights = np.exp(np.concatenate([[0.0], np.cumsum(ratios)]))
        # f'(0)/f'(1) = γ^(η + 1) gives the first chance without summing the others.
        first = math.exp(math.log(self.mean) + (self.eta + 1) * math.log(self.gamma))
        return np.concatenate([[0.0], first * weights])

    def selected(self, divergences: np.ndarray) -> np.ndarray:
        """The theorem at every order; D_1, which no order has, is at most the lowest order's."""
        orders, log = np.array(ORDERS), -math.log(self.gamma)
        spread = min(log, float(np.min((1 - 1 / orders) * divergences + log / orders)))
        found = divergences + (1 + self.eta) * spread + math.log(self.mean) / (orders - 1)
        return _monotone(found)


@dataclass(frozen=True)
class PoissonRuns:
    """K ~ Poisson(mean); with chance e^−mean there is no run, and nothing to release.

    D'_λ = log(e^−m + m·e^{(λ−1)(D_λ + m·δ)})/(λ − 1), δ that of one run at ε = log(λ/(λ − 1)).
    Papernot et al. 2022, Thm. 6, with the chance of no run counted by itself.
    """

    mean: float

    def __post_init__(self) -> None:
        if not 0 < self.mean <= MOST / 2:
            raise UserError(
                f"The expected number of runs is {self.mean:g}; it must be above 0 and at most "
                f"{MOST // 2:,}."
            )

    def chances(self) -> np.ndarray:
        """e^−m·m^k/k!."""
        from scipy.stats import poisson

        return np.asarray(poisson.pmf(np.arange(MOST + 1), self.mean))

    def selected(self, divergences: np.ndarray) -> np.ndarray:
        """The theorem at every order, with δ by the library's conversion."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        below, m = np.array(ORDERS) - 1, self.mean
        deltas = [compute_delta(ORDERS, divergences, math.log1p(1 / b))[0] for b in below]
        with np.errstate(over="ignore"):
            runs = math.log(m) + below * (divergences + m * np.array(deltas))
        return _monotone(np.logaddexp(-m, runs) / below)


LAWS = ("geometric", "logarithmic", "poisson")


def law_of(name: str, mean: float, eta: float | None = None) -> Law:
    """A law by its name, or by η, with an expected number of runs."""
    if eta is None and name == "poisson":
        law: Law = PoissonRuns(mean)
    else:
        shape = {"geometric": 1.0, "logarithmic": 0.0}.get(name, 1.0) if eta is None else eta
        law = TruncatedNegativeBinomial.of_mean(shape, mean)
    if 1 - law.chances().sum() > TAIL:
        raise UserError(
            f"An expected number of {mean:g} runs would often come to more than {MOST:,}; "
            "expect fewer."
        )
    return law


def drawn(law: Law, rng: np.random.Generator) -> int:
    """K, by inversion of its distribution."""
    return int(np.searchsorted(np.cumsum(law.chances()), rng.random(), side="right"))


def selection(members: Sequence[Charged], law: Law) -> events.RenyiRelease:
    """The event of releasing the best of K runs, each of a member drawn at random.

    A run tells which member it is, and the draw knows no data: e^{(λ−1)D_λ} of one run is the mean
    over members. What a run sets aside counts E[K] times, and K is drawn up to TAIL.
    """
    if not fitting(members):
        raise UserError(
            "These members do not all hold for the same neighbours, so there is no one guarantee "
            "for the best of them; select among cohorts of one kind."
        )
    curves = [curve(member) for member in members]
    single = _mixed(np.array([c.orders for c in curves]))
    aside = law.mean / len(curves)
    return events.RenyiRelease(
        tuple(float(d) for d in law.selected(single)),
        aside * sum(c.escape for c in curves),
        aside * sum(c.distance for c in curves) + TAIL,
    )


def _mixed(curves: np.ndarray) -> np.ndarray:
    """(1/(λ − 1))·log of the mean of e^{(λ−1)D_λ}."""
    from scipy.special import logsumexp

    below = np.array(ORDERS) - 1
    mixed = logsumexp(below * curves, axis=0, b=1 / len(curves)) / below
    return np.asarray(np.where(np.isinf(curves).any(axis=0), np.inf, np.maximum(mixed, 0.0)))


def _monotone(found: np.ndarray) -> np.ndarray:
    """D_λ does not fall as λ grows, so a bound at a larger order holds at a smaller one."""
    return np.minimum.accumulate(np.maximum(found, 0.0)[::-1])[::-1]


def described(law: Law) -> dict[str, Any]:
    """The law as plain values; K itself is not among them."""
    if isinstance(law, PoissonRuns):
        return {"law": "poisson", "expected": law.mean}
    assert isinstance(law, TruncatedNegativeBinomial)
    name = "truncated negative binomial"
    return {"law": name, "eta": law.eta, "gamma": law.gamma, "expected": law.mean}
