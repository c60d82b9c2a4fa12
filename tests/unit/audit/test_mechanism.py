"""Black-box tests of noise: the project's own pass, broken ones are caught with an event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.audit.mechanism import audit_noise
from fedveil.errors import UserError
from fedveil.parts import (
    Binomial,
    DiscreteGaussian,
    Gaussian,
    PublishedLaplace,
    RoundedGaussian,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.noise import Noise
from tests.contracts.examples import NOISES

TRIALS = 1000
SURE = 1e-6  # so that a bound above the truth is no matter of seeds


def found(noise: Noise, dim: int = 2, seed: int = 0) -> Any:
    return audit_noise(noise, np.random.default_rng(seed), dim=dim, trials=TRIALS, alpha=SURE)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_no_event_contradicts_the_project_s_own_noises(noise: Noise, dim: int) -> None:
    result = found(noise, dim)
    assert not result.alarm, result.violation
    assert result.audited <= result.claimed


@pytest.mark.parametrize(
    "noise",
    [Gaussian(0.5), RoundedGaussian(0.5), DiscreteGaussian(4.0, 40), Binomial(100)],
    ids=repr,
)
def test_a_good_part_of_epsilon_is_found(noise: Noise) -> None:
    result = audit_noise(noise, np.random.default_rng(0), dim=1, trials=3000, alpha=1e-3)
    assert 1.5 < result.audited < result.claimed


INSIDE = "fedveil.parts.noise"  # mistakes of our own: from outside no claim would be believed


class Narrow(DiscreteGaussian):
    """A table of a quarter of the width."""

    __module__ = INSIDE

    def table(self, message: Norms) -> Any:
        return DiscreteGaussian(5.0, 50).table(message)


class ShortTail(TruncatedDiscreteLaplace):
    """The right shape, cut where the claim is not."""

    __module__ = INSIDE

    def table(self, message: Norms) -> Any:
        return TruncatedDiscreteLaplace(self.alpha, 20).table(message)


class FewTrials(Binomial):
    __module__ = INSIDE

    def table(self, message: Norms) -> Any:
        return Binomial(80).table(message)


class Quartered(RoundedGaussian):
    __module__ = INSIDE

    def draw(self, *arguments: Any) -> Any:
        return super().draw(*arguments) // 4


class Sold(PublishedLaplace):
    def event(self, message: Norms, *rest: Any) -> events.Release:
        return events.ApproximateRelease(self.epsilon, 2.0**-message.dim)


class LastForgotten(Gaussian):
    """One coordinate without noise."""

    __module__ = INSIDE

    def draw(self, *arguments: Any) -> Any:
        noise = super().draw(*arguments)
        noise[-1] = 0
        return noise


@pytest.mark.parametrize(
    "noise",
    [
        Narrow(20.0, 200),
        ShortTail(0.05, 400),
        FewTrials(800),
        Quartered(2.0),
        Sold(epsilon=0.5),
        LastForgotten(2.0),
    ],
    ids=lambda noise: type(noise).__name__,
)
def test_a_broken_noise_is_caught_with_an_event(noise: Noise) -> None:
    result = found(noise)
    assert result.alarm
    assert "δ(" in result.violation
    assert "apart" in result.violation


def test_noise_without_an_amount_is_refused() -> None:
    with pytest.raises(UserError, match="Calibrate it first"):
        found(DiscreteGaussian())
