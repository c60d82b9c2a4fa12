"""Private selection: the privacy cost of releasing only the best of a random number of runs.

K is drawn from a data-independent distribution, K runs are drawn and trained with independent
noise, and only the best run is released. The cost grows slowly with E[K] if the distribution is
spread out enough. Papernot and Steinke 2022. The proof is in docs/privacy.md, "Choosing the best of
several runs".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedveil.accounting import events
from fedveil.accounting.events import ORDERS
from fedveil.errors import UserError
from fedveil.privacy.composition import Charged, common, curve

MOST = 10_000  # runs; a distribution that draws more is refused
TAIL = 1e-12  # the probability mass that may be beyond MOST


class Law(Protocol):
    """The distribution of K, the number of runs."""

    @property
    def mean(self) -> float:
        """E[K]."""

    def chances(self) -> np.ndarray:
        """P(K = k) for k = 0, 1, …, MOST."""

    def selected(self, divergences: np.ndarray) -> np.ndarray:
        """D_λ of the best of K runs at ORDERS, from D_λ of a single run at ORDERS."""


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
            raise UserError(f"eta is {self.eta}. Give a number above -1, such as 0 or 1.")
        if not 0 < self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}. Give a number between 0 and 1.")

    @classmethod
    def of_mean(cls, eta: float, mean: float) -> TruncatedNegativeBinomial:
        """The distribution with this η and E[K], by bisection. γ is never too large.

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
        """From P(K = 1) by P(K = k + 1)/P(K = k) = (1 − γ)·(k + η)/(k + 1)."""
        k = np.arange(1, MOST)
        ratios = np.log1p(-self.gamma) + np.log(k + self.eta) - np.log(k + 1)
        weights = np.exp(np.concatenate([[0.0], np.cumsum(ratios)]))
        # f'(0)/f'(1) = γ^(η + 1) gives the first probability without summing the others.
        first = math.exp(math.log(self.mean) + (self.eta + 1) * math.log(self.gamma))
        return np.concatenate([[0.0], first * weights])

    def selected(self, divergences: np.ndarray) -> np.ndarray:
        """The theorem at every order. D_1, which is not in ORDERS, is at most D of the lowest."""
        orders, log = np.array(ORDERS), -math.log(self.gamma)
        spread = min(log, float(np.min((1 - 1 / orders) * divergences + log / orders)))
        found = divergences + (1 + self.eta) * spread + math.log(self.mean) / (orders - 1)
        return _monotone(found)


@dataclass(frozen=True)
class PoissonRuns:
    """K ~ Poisson(mean). With probability e^−mean there is no run, and nothing is released.

    D'_λ = log(e^−m + m·e^{(λ−1)(D_λ + m·δ)})/(λ − 1), with δ of one run at ε = log(λ/(λ − 1)).
    Papernot et al. 2022, Thm. 6, with a separate term for the probability of no run.
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
        """The theorem at every order, with δ from the library's conversion."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        below, m = np.array(ORDERS) - 1, self.mean
        deltas = [compute_delta(ORDERS, divergences, math.log1p(1 / b))[0] for b in below]
        with np.errstate(over="ignore"):
            runs = math.log(m) + below * (divergences + m * np.array(deltas))
        return _monotone(np.logaddexp(-m, runs) / below)


LAWS = ("geometric", "logarithmic", "poisson")


def law_of(name: str, mean: float, eta: float | None = None) -> Law:
    """A distribution by its name, or by η, with an expected number of runs."""
    if eta is None and name == "poisson":
        law: Law = PoissonRuns(mean)
    else:
        shape = {"geometric": 1.0, "logarithmic": 0.0}.get(name, 1.0) if eta is None else eta
        law = TruncatedNegativeBinomial.of_mean(shape, mean)
    if 1 - law.chances().sum() > TAIL:
        raise UserError(
            f"With an expected number of {mean:g} runs, more than {MOST:,} can be drawn. Give a "
            "smaller expected number."
        )
    return law


def drawn(law: Law, rng: np.random.Generator) -> int:
    """Draw K by inversion."""
    return int(np.searchsorted(np.cumsum(law.chances()), rng.random(), side="right"))


def selection(members: Sequence[Charged], law: Law) -> events.RenyiRelease:
    """The event of releasing the best of K runs, each of a random member.

    The member is part of a run's output, and its draw is data-independent, so e^{(λ−1)D_λ} of one
    run is the mean over members. The escape and distance of a run count E[K] times. K is drawn up
    to TAIL, which is added to the distance.
    """
    if not common(members):
        raise UserError(
            "The guarantees of these members do not share an adjacency, so there is no guarantee "
            "for the best of them. Use the same kind of cohort for all members."
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
    """D_λ does not decrease in λ, so a bound at a larger order holds at a smaller one."""
    return np.minimum.accumulate(np.maximum(found, 0.0)[::-1])[::-1]


def described(law: Law) -> dict[str, Any]:
    """The distribution as plain values, without K itself."""
    if isinstance(law, PoissonRuns):
        return {"law": "poisson", "expected": law.mean}
    assert isinstance(law, TruncatedNegativeBinomial)
    name = "truncated negative binomial"
    return {"law": name, "eta": law.eta, "gamma": law.gamma, "expected": law.mean}
