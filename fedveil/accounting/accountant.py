"""ε(δ) and δ(ε) of events, computed with dp-accounting.

Uses its privacy loss distributions and Rényi conversions. Every conversion is pessimistic: the
result is an upper bound on the true ε.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from fedveil.accounting import events
from fedveil.accounting.losses import (
    LARGEST,
    AfterGaussian,
    Aside,
    Best,
    GaussianMixture,
    InfiniteLoss,
    PrivacyLoss,
    Renyi,
    Rounded,
    Weighted,
    Worst,
)
from fedveil.errors import UserError

INTERVAL = 1e-3  # losses are rounded up to its multiples (connect-the-dots keeps that tight)
POINTS = 30_000  # grid points at most, approximately: large losses get a coarser grid
FINEST = 1e-12  # interval: losses that are far smaller are rounded up to it
MOST_POINTS = 200_000  # the limit where a round's loss is so small that it needs a finer grid
LEAST_RATIO = 0.02  # of noise to sensitivity: below it one release has an ε above 1000
MOST_PURE = 700.0  # ε of one release, whose exponential is a float64
QUICK = (2, 3, 4, 5, 6, 8, 11, 15, 20, 32, 64, 128)  # integer Rényi orders are fast to compute
LONGEST = 10**10  # rounds of a convolution, whose memory grows with their root
FAR = 1e100  # ε: products with a larger one may overflow
NEGLIGIBLE = 1e-16  # total probability of participation counts that are merged


def epsilon(event: events.Round | events.Spent, delta: float) -> float:
    """An upper bound on the least ε for which the event is (ε, δ)-DP; ∞ if there is none."""
    check_delta(delta)
    try:
        hash(event)
    except TypeError:  # an event of a user's noise may hold lists or arrays
        return _computed(event, delta)
    return _epsilon(event, delta)


def _computed(event: events.Round | events.Spent, delta: float) -> float:
    found = float(_loss(event).get_epsilon_for_delta(delta))
    return math.inf if math.isnan(found) else found


# Statement, ledger, plan and diagnosis ask for the same ε again.
_epsilon = functools.lru_cache(maxsize=4096)(_computed)


def delta(event: events.Round | events.Spent, epsilon: float) -> float:
    """An upper bound on the least δ for which the event is (ε, δ)-DP, from 0 to 1.

    For ε > 1e100 that of 1e100, which is no smaller.
    """
    if not (isinstance(epsilon, int | float) and epsilon >= 0):
        raise UserError(f"epsilon is {epsilon!r}. Give a number of at least 0.")
    found = float(_loss(event).get_delta_for_epsilon(min(float(epsilon), FAR)))
    return 1.0 if math.isnan(found) else min(max(found, 0.0), 1.0)


def quick_epsilon(event: events.Spent, delta: float) -> float | None:
    """A rough ε within a millisecond or two, for events that have one; otherwise None.

    An upper bound, except for sampling without replacement, which is approximated by Poisson
    sampling.
    """
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    match event:
        case events.Composed(
            events.PoissonSampled(rate, events.GaussianRelease(ratio)), count, first
        ):
            accountant = RdpAccountant(QUICK)
            accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(ratio)), count)
            if first is not None and isinstance(first.by, events.GaussianRelease):
                accountant.compose(dp.GaussianDpEvent(first.by.ratio))
            return float(accountant.get_epsilon(delta))
        case events.Composed(
            events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)),
            count,
            first,
        ):
            alike = events.PoissonSampled(cohort / population, events.GaussianRelease(ratio))
            return quick_epsilon(events.Composed(alike, count, first), delta)
        case events.Composed(events.Dominated(by), count, first):
            return quick_epsilon(events.Composed(by, count, first), delta)
        case events.Composed(events.Proven(ways), count, first):
            found = [quick_epsilon(events.Composed(way, count, first), delta) for way in ways]
            return min((one for one in found if one is not None), default=None)
        case events.Composed(events.CyclicSampled() as sampled, count):
            return quick_epsilon(sampled.whole(count), delta)
        case events.Composed(events.InSilos(silos, times), count, first):
            each = [quick_epsilon(events.Composed(s, count * times, first), delta) for s in silos]
            return None if None in each else max(one for one in each if one is not None)
        case events.Composed(
            events.RenyiRelease() | events.GaussianRelease() | events.Correlated()
        ):
            return epsilon(event, delta)
    return None


def sensible_delta(population: int) -> float:
    """1e-5, or a tenth of 1/population where that is smaller.

    >>> sensible_delta(3000), sensible_delta(60_000)
    (1e-05, 1.6666666666666667e-06)
    """
    return min(1e-5, 0.1 / population)


def check_delta(delta: float) -> None:
    """1e-12 ≤ δ < 1: the accountant's rounding hides smaller values."""
    if not (isinstance(delta, int | float) and 1e-12 <= delta < 1):
        raise UserError(
            f"delta is {delta!r}. Give a number from 1e-12 to below 1, well under 1/population."
        )


def check_epsilon(epsilon: float) -> None:
    """0 < ε ≤ 200: a larger ε protects nothing."""
    if not (isinstance(epsilon, int | float) and 0 < epsilon <= 200):
        raise UserError(
            f"epsilon is {epsilon!r}. Give a number above 0 and at most 200, such as 2.0."
        )


def _loss(event: events.Round | events.Spent) -> PrivacyLoss:
    """The privacy loss of a run or a round."""
    match event:
        case events.Either(ways):
            return Best(tuple(_loss(way) for way in ways))
        case events.ParticipationMixture():
            return _attended(event)
        case events.Composed(release, count, None):
            return _composed(release, count)
        case events.Composed(release, count, events.Dominated(by, escape, distance)):
            assert isinstance(by, events.GaussianRelease)
            return Aside(_composed(release, count, by.ratio), escape, distance)
        case events.Composed():
            raise TypeError(f"no accounting for {event!r}")
        case _:
            return _composed(event, 1)


def _composed(event: events.Round, count: int, first: float = math.inf) -> PrivacyLoss:
    """The loss of `count` releases after a Gaussian one with the ratio `first`, if finite."""
    if count == 0 or _never(event):
        return _alone(first)
    match event:
        case events.NonPrivate():
            return InfiniteLoss()
        case events.Proven(ways):
            return Best(tuple(_composed(way, count, first) for way in ways))
        case events.RenyiRelease(divergences, escape, distance):
            curve = count * np.array(divergences) + np.array(events.ORDERS) / (2 * first**2)
            return Renyi(curve, count * escape, count * distance)
        case events.Dominated(by, escape, distance):
            return Aside(_composed(by, count, first), count * escape, count * distance)
        case events.Correlated():  # all rounds together are one release
            return _composed(event.whole(count), 1, first)
        case events.CyclicSampled():
            turns = event.whole(count)
            return _composed(turns.event, turns.count, first)
        case events.InSilos(silos, times):
            each = dict.fromkeys(silos)
            return Worst(tuple(_composed(silo, count * times, first) for silo in each))
        case events.GaussianRelease(ratio):  # composes in closed form
            if ratio < LEAST_RATIO * math.sqrt(count):
                return InfiniteLoss()
            return _alone(1 / math.hypot(math.sqrt(count) / ratio, 1 / first))
    return _convolved(event, count, first)


def _convolved(event: events.Round, count: int, first: float) -> PrivacyLoss:
    """The same for rounds without a closed form, on a grid of losses."""
    from fedveil.accounting.lower_bound import lower_bound
    from fedveil.accounting.tilted import ROUNDING

    event = _amplified(event)
    if _hopeless(event) or first < LEAST_RATIO or lower_bound(event, count) > LARGEST:
        return InfiniteLoss()
    once = _one_round(event)
    if count == 1 and math.isinf(first):
        return once  # type: ignore[no-any-return]
    if count > LONGEST:
        return _by_moments((once._pmf_remove, once._pmf_add), count, first)
    other = functools.partial(_tilted, once, count, first)
    whole = once.self_compose(count)
    if not math.isinf(first):
        whole = AfterGaussian(first, (whole._pmf_remove, whole._pmf_add))
    return Rounded(whole, (count + 1) * ROUNDING, other)


def _tilted(once: Any, count: int, first: float) -> PrivacyLoss:
    """The same loss at a δ that the rounding of a convolution would hide."""
    from fedveil.accounting.tilted import Tilted

    pmfs = once._pmf_remove, once._pmf_add  # there are no public attributes
    return Tilted(pmfs, count, first, _by_moments(pmfs, count, first))


def _by_moments(pmfs: tuple[Any, ...], count: int, first: float) -> Renyi:
    """The Rényi divergences of the same loss: looser, but no convolution rounds them."""
    orders = np.array(events.ORDERS)
    largest = np.maximum(*(pmf.divergences(orders) for pmf in pmfs))
    infinite = max(float(pmf._infinity_mass) for pmf in pmfs)
    return Renyi(count * largest + orders / (2 * first**2), count * infinite, 0.0)


def _alone(first: float) -> PrivacyLoss:
    """The loss of one Gaussian release with the ratio `first`, or of nothing."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    if math.isinf(first):
        return pld.identity(value_discretization_interval=INTERVAL)  # type: ignore[no-any-return]
    return InfiniteLoss() if first < LEAST_RATIO else GaussianMixture.once(first)


def _never(event: events.Round) -> bool:
    """Whether no unit is ever sampled."""
    return isinstance(event, events.PoissonSampled) and event.rate == 0


def _hopeless(event: events.Round) -> bool:
    """Whether a release, sampled or not, is too weak for float64."""
    if isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement):
        return _hopeless(event.event)
    if isinstance(event, events.GaussianRelease):
        return event.ratio < LEAST_RATIO
    if isinstance(event, events.ApproximateRelease):
        return event.delta == 1 or event.epsilon > MOST_PURE
    return False


def _attended(event: events.ParticipationMixture) -> PrivacyLoss:
    """Σ_j P(J = j)·δ_j(ε) with J = min(Bin(rounds, rate), most): the coins are observed.

    A count j that has no guarantee has δ_j = 1.
    """
    exact = isinstance(event.event, events.RenyiRelease)
    times, chances = _attendance(event.rate, event.rounds, event.most, 0.0 if exact else NEGLIGIBLE)
    match event.event:
        case events.NonPrivate():
            return InfiniteLoss()
        case events.Proven(ways):
            return Best(tuple(_attended(replace(event, event=way)) for way in ways))
        case events.RenyiRelease(divergences, escape, distance):
            mean = float(times @ chances)
            mixed = Renyi.mixed(np.array(divergences), times, chances)
            return Renyi(mixed, mean * escape, mean * distance)
        case events.Dominated(by, escape, distance):
            mean, loss = float(times @ chances), _attended(replace(event, event=by))
            return Aside(loss, mean * escape, mean * distance)
        case events.GaussianRelease(ratio) if ratio >= LEAST_RATIO:
            return GaussianMixture(ratio, times, chances)
        case release:
            return Weighted(chances, tuple(_composed(release, int(j)) for j in times))


def _attendance(rate: float, rounds: int, most: int, rare: float) -> tuple[np.ndarray, np.ndarray]:
    """Participation counts and their probabilities; rare counts are moved to the worst case."""
    from scipy.stats import binom

    counts = np.arange(rounds + 1)
    chances = binom.pmf(counts, rounds, rate)
    likely = chances > rare / (rounds + 1)
    times, chances = np.minimum(counts[likely], most), chances[likely]
    return (np.append(times, most), np.append(chances, rare)) if rare else (times, chances)


@functools.lru_cache(maxsize=64)
def _one_round(event: events.Round) -> Any:
    """The loss of one round on a grid."""
    from fedveil.accounting import sampled

    match event:
        case events.PoissonSampled(rate, events.GaussianRelease(ratio)):
            return sampled.poisson(ratio, rate, _interval(ratio, rate))
        case events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)):
            rate = cohort / population
            return sampled.without_replacement(ratio, rate, _interval(ratio, rate))
        case events.ApproximateRelease(epsilon, delta):
            return sampled.approximate(epsilon, delta)
        case _:
            raise TypeError(f"no accounting for {event!r}")


def _interval(ratio: float, rate: float) -> float:
    """A tenth of the standard deviation of one round's loss, within limits.

    The deviation is about q·√(e^{1/ρ²} − 1), and a grid h adds h²/6 to its square per round. The
    limits follow from the width of the losses, which sampling narrows.
    """
    from fedveil.accounting import sampled

    low, high = sampled.losses(ratio, rate)
    deviation = rate * math.sqrt(math.expm1(min(ratio**-2, 50.0)))
    finest = max((high - low) / MOST_POINTS, _coarse(high - low), FINEST)
    return max(min(INTERVAL, deviation / 10), finest)


def _coarse(width: float) -> float:
    """A coarser interval for losses too large for a grid of INTERVAL."""
    return width / POINTS if width / POINTS > INTERVAL else 0.0


def _amplified(event: events.Round) -> events.Round:
    """A sampled (ε, δ) release as the release that it is; other events as they are."""
    match event:
        case events.PoissonSampled(rate, events.ApproximateRelease() as inner):
            return subsampled(inner, rate)
        case events.SampledWithoutReplacement(
            cohort, population, events.ApproximateRelease() as inner
        ):
            return subsampled(inner, cohort / population)
    return event


def subsampled(event: events.ApproximateRelease, rate: float) -> events.ApproximateRelease:
    """(log(1 + q(e^ε − 1)), qδ).  Balle et al. 2018, Thm. 8 and 9."""
    amplified = event.epsilon
    if amplified <= MOST_PURE:
        amplified = min(amplified, math.log1p(rate * math.expm1(amplified)))
    return events.ApproximateRelease(amplified, rate * event.delta)
