"""ε(δ) and δ(ε) of events, by dp-accounting's privacy loss distributions.

Every conversion is pessimistic: what is printed is an upper bound on the true ε.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy import events

INTERVAL = 1e-3  # losses are rounded up to multiples of it (connect-the-dots keeps that tight)
POINTS = 30_000  # about so many of them at most: large losses are rounded more coarsely
LEAST_RATIO = 0.02  # of noise to sensitivity: below it a single release costs an ε of over 1000


def epsilon(event: events.Round | events.Composed, delta: float) -> float:
    """The least ε with the event (ε, δ)-DP, bounded from above; ∞ when there is none."""
    check_delta(delta)
    loss = _loss(event)
    return math.inf if loss is None else float(loss.get_epsilon_for_delta(delta))


def delta(event: events.Round | events.Composed, epsilon: float) -> float:
    """The least δ with the event (ε, δ)-DP, bounded from above."""
    loss = _loss(event)
    return 1.0 if loss is None else float(loss.get_delta_for_epsilon(epsilon))


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


def _loss(event: events.Round | events.Composed) -> Any | None:
    """The privacy loss distribution, or None for a release without a guarantee."""
    if isinstance(event, events.NonPrivate) or _ratio(event) < LEAST_RATIO:
        return None
    if isinstance(event, events.Composed):
        return _composed(event)
    return _one_round(event)


def _ratio(event: events.Round | events.Composed) -> float:
    """Noise over sensitivity of a Gaussian release, sampled or not; ∞ for others."""
    if isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement):
        return _ratio(event.event)
    return event.ratio if isinstance(event, events.GaussianRelease) else math.inf


def _composed(event: events.Composed) -> Any | None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    inner = event.event
    if event.count == 0:
        return pld.identity(value_discretization_interval=INTERVAL)
    if isinstance(inner, events.GaussianRelease):  # composes in closed form
        return _loss(events.GaussianRelease(inner.ratio / math.sqrt(event.count)))
    loss = _loss(inner)
    return None if loss is None else loss.self_compose(event.count)


@functools.lru_cache(maxsize=64)
def _one_round(event: events.Round) -> Any:
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    match event:
        case events.GaussianRelease(ratio):
            return pld.from_gaussian_mechanism(
                ratio, value_discretization_interval=_interval(ratio)
            )
        case events.PoissonSampled(rate, events.GaussianRelease(ratio)):
            return pld.from_gaussian_mechanism(
                ratio, sampling_prob=rate, value_discretization_interval=_interval(ratio)
            )
        case events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)):
            return _gaussian_without_replacement(ratio, cohort / population)
        case events.ApproximateRelease(epsilon, delta):
            return pld.from_privacy_parameters(
                common.DifferentialPrivacyParameters(epsilon, delta),
                value_discretization_interval=max(INTERVAL, epsilon / POINTS),
            )
        case events.PoissonSampled(rate, events.ApproximateRelease() as inner):
            return _one_round(_subsampled(inner, rate))
        case events.SampledWithoutReplacement(
            cohort, population, events.ApproximateRelease() as inner
        ):
            return _one_round(_subsampled(inner, cohort / population))
        case _:
            raise TypeError(f"no accounting for {event!r}")


def _interval(ratio: float) -> float:
    """A Gaussian's losses have mean 1/(2ρ²) and deviation 1/ρ; twelve deviations are covered."""
    return max(INTERVAL, (0.5 / ratio**2 + 12 / ratio) / POINTS)


def _subsampled(event: events.ApproximateRelease, rate: float) -> events.ApproximateRelease:
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
    both = [
        privacy_loss_mechanism.GaussianPrivacyLoss(ratio, sampling_prob=rate, adjacency_type=kind)
        for kind in (kinds.ADD, kinds.REMOVE)
    ]
    bounds = [loss.connect_dots_bounds() for loss in both]
    interval = _interval(ratio)
    low = math.floor(min(bound.epsilon_lower for bound in bounds) / interval)
    high = math.ceil(max(bound.epsilon_upper for bound in bounds) / interval)
    steps = np.arange(low, high + 1)
    curves = [np.asarray(loss.get_delta_for_epsilon(steps * interval)) for loss in both]
    # Rounding may break monotonicity by an ulp; running maxima from above stay an upper bound.
    curve = np.maximum.accumulate(np.maximum(*curves)[::-1])[::-1]
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, curve)
    return pld.PrivacyLossDistribution(pmf)
