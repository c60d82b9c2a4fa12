"""ε(δ) and δ(ε) of events, by dp-accounting's privacy loss distributions and Rényi conversions.

Every conversion is pessimistic: what is printed is an upper bound on the true ε.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy import events
from fedveil.privacy.losses import Aside, Best, GaussianMixture, Loss, Renyi, Rounded, Weighted

INTERVAL = 1e-3  # losses are rounded up to multiples of it (connect-the-dots keeps that tight)
POINTS = 30_000  # about so many of them at most: large losses are rounded more coarsely
MOST_POINTS = 200_000  # where a round's loss is so small that a finer grid is needed
LEAST_RATIO = 0.02  # of noise to sensitivity: below it a single release costs an ε of over 1000
QUICK = (2, 3, 4, 5, 6, 8, 11, 15, 20, 32, 64, 128)  # whole Rényi orders are quick to compute
ROUNDING = 2e-16  # of δ for each round in a composition, four times what has been seen
NEGLIGIBLE = 1e-16  # chances of numbers of rounds that are not told apart


def epsilon(event: events.Round | events.Spent, delta: float) -> float:
    """The least ε with the event (ε, δ)-DP, bounded from above; ∞ when there is none."""
    check_delta(delta)
    loss = _loss(event)
    return math.inf if loss is None else float(loss.get_epsilon_for_delta(delta))


def delta(event: events.Round | events.Spent, epsilon: float) -> float:
    """The least δ with the event (ε, δ)-DP, bounded from above."""
    loss = _loss(event)
    return 1.0 if loss is None else float(loss.get_delta_for_epsilon(epsilon))


def quick_epsilon(event: events.Spent, delta: float) -> float | None:
    """A rough ε in a millisecond or two, for the rounds that have one; else None.

    From above, but for sampling without replacement, which is taken for Poisson sampling.
    """
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    match event:
        case events.Composed(events.PoissonSampled(rate, events.GaussianRelease(ratio)), count):
            sampled = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(ratio))
            return float(RdpAccountant(QUICK).compose(sampled, count).get_epsilon(delta))
        case events.Composed(
            events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)),
            count,
        ):
            alike = events.PoissonSampled(cohort / population, events.GaussianRelease(ratio))
            return quick_epsilon(events.Composed(alike, count), delta)
        case events.Composed(events.Dominated(by), count):
            return quick_epsilon(events.Composed(by, count), delta)
        case events.Composed(events.Proven(ways), count):
            found = [quick_epsilon(events.Composed(way, count), delta) for way in ways]
            return min((one for one in found if one is not None), default=None)
        case events.Composed(events.RenyiRelease() | events.GaussianRelease()):
            return epsilon(event, delta)
    return None


def check_delta(delta: float) -> None:
    """1e-12 ≤ δ < 1: smaller ones are lost in the rounding of the accountant."""
    if not 1e-12 <= delta < 1:
        raise UserError(
            f"delta is {delta!r}; it must lie from 1e-12 to below 1, well under 1/population."
        )


def check_epsilon(epsilon: float) -> None:
    """0 < ε ≤ 200: beyond it nothing is protected."""
    if not 0 < epsilon <= 200:
        raise UserError(
            f"epsilon is {epsilon!r}; it must be a number above 0 and at most 200, such as 2.0."
        )


def _loss(event: events.Round | events.Spent) -> Loss | None:
    """The privacy loss of a run or a round; None for a release without a guarantee."""
    match event:
        case events.Either(ways):
            return _best([_loss(way) for way in ways])
        case events.Attended():
            return _attended(event)
        case events.Composed(release, count):
            return _composed(release, count)
        case _:
            return _composed(event, 1)


def _best(losses: list[Loss | None]) -> Loss | None:
    found = [loss for loss in losses if loss is not None]
    return Best(tuple(found)) if found else None


def _composed(event: events.Round, count: int) -> Loss | None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    if count == 0:
        return pld.identity(value_discretization_interval=INTERVAL)  # type: ignore[no-any-return]
    match event:
        case events.NonPrivate():
            return None
        case events.Proven(ways):
            return _best([_composed(way, count) for way in ways])
        case events.RenyiRelease(divergences, escape, distance):
            return Renyi(count * np.array(divergences), count * escape, count * distance)
        case events.Dominated(by, escape, distance):
            loss = _composed(by, count)
            return None if loss is None else Aside(loss, count * escape, count * distance)
        case events.GaussianRelease(ratio):  # composes in closed form
            hopeless = ratio < LEAST_RATIO * math.sqrt(count)
            return None if hopeless else GaussianMixture(ratio, np.array([count]), np.ones(1))
    if _hopeless(event):
        return None
    once = _one_round(event)
    return once if count == 1 else Rounded(once.self_compose(count), count * ROUNDING)


def _hopeless(event: events.Round) -> bool:
    """Whether a release, sampled or not, is too poor for the library's numbers."""
    if isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement):
        return _hopeless(event.event)
    if isinstance(event, events.GaussianRelease):
        return event.ratio < LEAST_RATIO
    return isinstance(event, events.ApproximateRelease) and event.delta > 0.5


def _attended(event: events.Attended) -> Loss | None:
    """Σ_j P(J = j)·δ_j(ε) with J = min(Bin(rounds, rate), most): the coins are seen."""
    exact = isinstance(event.event, events.RenyiRelease)
    times, chances = _attendance(event.rate, event.rounds, event.most, 0.0 if exact else NEGLIGIBLE)
    match event.event:
        case events.NonPrivate():
            return None
        case events.Proven(ways):
            return _best([_attended(replace(event, event=way)) for way in ways])
        case events.RenyiRelease(divergences, escape, distance):
            mean = float(times @ chances)
            mixed = Renyi.mixed(np.array(divergences), times, chances)
            return Renyi(mixed, mean * escape, mean * distance)
        case events.Dominated(by, escape, distance):
            mean, loss = float(times @ chances), _attended(replace(event, event=by))
            return None if loss is None else Aside(loss, mean * escape, mean * distance)
        case events.GaussianRelease(ratio):
            return None if ratio < LEAST_RATIO else GaussianMixture(ratio, times, chances)
        case release:
            losses = [loss for j in times if (loss := _composed(release, int(j))) is not None]
            return Weighted(chances, tuple(losses)) if len(losses) == len(times) else None


def _attendance(rate: float, rounds: int, most: int, rare: float) -> tuple[np.ndarray, np.ndarray]:
    """How often one takes part, and with what chance; rare counts are put in the worst place."""
    from scipy.stats import binom

    counts = np.arange(rounds + 1)
    chances = binom.pmf(counts, rounds, rate)
    likely = chances > rare / (rounds + 1)
    times, chances = np.minimum(counts[likely], most), chances[likely]
    return (np.append(times, most), np.append(chances, rare)) if rare else (times, chances)


@functools.lru_cache(maxsize=64)
def _one_round(event: events.Round) -> Any:
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    match event:
        case events.PoissonSampled(rate, events.GaussianRelease(ratio)):
            return pld.from_gaussian_mechanism(
                ratio, sampling_prob=rate, value_discretization_interval=_interval(ratio, rate)
            )
        case events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)):
            return _gaussian_without_replacement(ratio, cohort / population)
        case events.ApproximateRelease(epsilon, delta):
            return pld.from_privacy_parameters(
                common.DifferentialPrivacyParameters(epsilon, delta),
                value_discretization_interval=max(INTERVAL, epsilon / POINTS),
            )
        case events.PoissonSampled(rate, events.ApproximateRelease() as inner):
            return _one_round(subsampled(inner, rate))
        case events.SampledWithoutReplacement(
            cohort, population, events.ApproximateRelease() as inner
        ):
            return _one_round(subsampled(inner, cohort / population))
        case _:
            raise TypeError(f"no accounting for {event!r}")


def _interval(ratio: float, rate: float = 1.0) -> float:
    """A tenth of the deviation of one round's loss, within reason.

    A Gaussian's losses have mean 1/(2ρ²) and deviation 1/ρ, of which twelve are covered. Sampled,
    their deviation is about q·√(e^{1/ρ²} − 1); a grid h adds h²/6 to its square in every round.
    """
    widest = 0.5 / ratio**2 + 12 / ratio
    deviation = rate * math.sqrt(math.expm1(min(ratio**-2, 50.0)))
    return max(min(INTERVAL, deviation / 10), widest / MOST_POINTS, _coarse(widest))


def _coarse(widest: float) -> float:
    """Losses so large that a grid of INTERVAL would be out of proportion."""
    return widest / POINTS if widest / POINTS > INTERVAL else 0.0


def subsampled(event: events.ApproximateRelease, rate: float) -> events.ApproximateRelease:
    """(log(1 + q(e^ε − 1)), qδ).  Balle et al. 2018, Thm. 8 and 9."""
    amplified = math.log1p(rate * math.expm1(min(event.epsilon, 700.0)))
    return events.ApproximateRelease(min(amplified, event.epsilon), rate * event.delta)


def _gaussian_without_replacement(ratio: float, rate: float) -> Any:
    """The symmetric loss that dominates both directions of a replaced unit.

    Its hockey-stick curve is the larger of the two of ((1−q)Q + qP, Q) and (P, (1−q)P + qQ):
    Zhu et al. 2022, Thm. 11 (subset sampling). It is handed to the library's connect-the-dots.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
    from dp_accounting.pld import privacy_loss_distribution as pld

    kinds = privacy_loss_mechanism.AdjacencyType
    bounds = [
        privacy_loss_mechanism.GaussianPrivacyLoss(
            ratio, sampling_prob=rate, adjacency_type=kind
        ).connect_dots_bounds()
        for kind in (kinds.ADD, kinds.REMOVE)
    ]
    interval = _interval(ratio, rate)
    low = math.floor(min(bound.epsilon_lower for bound in bounds) / interval)
    high = math.ceil(max(bound.epsilon_upper for bound in bounds) / interval)
    curve = without_replacement_curve(ratio, rate, np.arange(low, high + 1) * interval)
    # Rounding may break monotonicity by an ulp; running maxima from above stay an upper bound.
    curve = np.maximum.accumulate(curve[::-1])[::-1]
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, curve)
    return pld.PrivacyLossDistribution(pmf)


def without_replacement_curve(ratio: float, rate: float, epsilons: np.ndarray) -> np.ndarray:
    """δ of one round at each ε, of either sign.

    q·H_{1+(e^ε−1)/q}(P‖Q) for ε ≥ 0, and e^ε·δ(−ε) + 1 − e^ε below.

    >>> float(without_replacement_curve(1.0, 0.1, np.zeros(1))[0].round(6))  # q·(2Φ(½) − 1)
    0.038292
    """
    from scipy.special import log_ndtr, ndtr

    size, mu = np.abs(epsilons), 1 / ratio
    small = np.minimum(size, 1.0)
    large = size - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(size, 1.0)))
    inner = np.where(size <= 1, np.log1p(np.expm1(small) / rate), large)
    lost = np.exp(inner + log_ndtr(-mu / 2 - inner / mu))
    above = rate * np.maximum(ndtr(mu / 2 - inner / mu) - lost, 0.0)
    below = np.exp(-size) * above - np.expm1(-size)
    return np.asarray(np.where(epsilons >= 0, above, below))
