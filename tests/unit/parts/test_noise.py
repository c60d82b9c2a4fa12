"""Noise on the sum: the draws follow their laws, the events follow from enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.noise import Gaussian, Noise, NoNoise, RoundedGaussian, Share
from fedveil.parts.quantize import StochasticRound, TowardZero
from tests.unit.accounting.test_integers import (
    CHANGES,
    Move,
    hockey_stick,
    laws,
    moves_within,
    name,
)

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
ON_THE_SUM: list[Noise] = [NoNoise(), Gaussian(1.5), RoundedGaussian(1.5)]


def rounded_masses(sigma: float, reach: int) -> np.ndarray:
    """P(round(X) = k), X ~ N(0, σ²), for |k| ≤ reach; from the tails, which keep their digits."""
    k = np.arange(1, reach + 1)
    right = stats.norm.sf((k - 0.5) / sigma) - stats.norm.sf((k + 0.5) / sigma)
    return np.concatenate([right[::-1], [1 - 2 * stats.norm.sf(0.5 / sigma)], right])


class Even:
    """In place of a generator: `count` words spread evenly, so that masses err by 1/count."""

    def __init__(self, count: int) -> None:
        places = np.arange(count // 2, dtype=np.uint64) * np.uint64(2**65 // count)
        self._words = np.concatenate([places, places + np.uint64(1)]) + np.uint64(2**64 // count)
        self._more = np.random.default_rng(0)  # for draws that need further bits

    def integers(self, high: int, size: int, dtype: type) -> np.ndarray:
        """The next words."""
        if size == 1:
            return self._more.integers(high, size=size, dtype=dtype)
        taken, self._words = self._words[:size], self._words[size:]
        return taken


def gaussian_delta(distance: float, epsilon: float) -> float:
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ): Balle and Wang 2018, Thm. 8."""
    phi = stats.norm.cdf
    high, low = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
    return float(phi(high) - math.exp(epsilon) * phi(low))


@pytest.mark.parametrize("noise", ON_THE_SUM, ids=str)
def test_noise_on_the_sum_is_in_no_message(noise: Noise) -> None:
    message = StochasticRound(4).norms(within(1.0, 3))
    assert not noise.on_messages
    assert not noise.each(message, np.random.default_rng(0)).any()
    assert noise.max_magnitude(message) == 0
    assert noise.deviation_of_message(message) is None


def test_a_silent_recipe_says_that_it_is_not_private() -> None:
    message = within(1.0, 3)
    assert NoNoise().event(message, message, 5.0, 5.0) == events.NonPrivate("no noise is added")
    drawn = NoNoise().draw(message, 1, 1.0, np.random.default_rng(0))
    assert drawn.dtype == torch.float64
    assert not drawn.any()
    with pytest.raises(UserError, match="no noise"):
        NoNoise().scaled(1.0, message, message, Share(1.0, 1.0, 1e-5))


# ---- Gaussian


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 3 / 2])
def test_gaussian_noise_has_the_stated_deviation_not_two_thirds_or_three_halves(factor) -> None:
    drawn = Gaussian(2.0).draw(within(5.0, 100_000), 7, 10.0, np.random.default_rng(0)).numpy()
    p = stats.kstest(drawn, stats.norm(scale=10.0 * factor).cdf).pvalue
    assert p > 1e-3 if factor == 1.0 else p < 1e-6


@pytest.mark.parametrize(("arrived", "shares"), [(0, 1.0), (30, 1.0), (100, 1.0), (150, 1.5)])
def test_gaussian_client_noise_never_falls_below_what_is_accounted(arrived, shares) -> None:
    noise = Gaussian(2.0, at="client")
    drawn = noise.draw(within(1.0, 50_000), arrived, 100.0, np.random.default_rng(2)).numpy()
    assert drawn.std() == pytest.approx(2.0 * math.sqrt(shares), rel=0.02)


@pytest.mark.parametrize(
    ("noise_shares", "share"), [(1.0, 0.01), (25.0, 0.25), (100.0, 1), (300.0, 1)]
)
def test_fewer_summands_hold_a_smaller_share_of_a_gaussian(noise_shares, share) -> None:
    """σ² = 4C² on the sum of 100: one message holds a hundredth of it; more than all is no more."""
    message = within(0.7, 3)
    change = message.sensitivity("replace-one")
    event = Gaussian(2.0, at="client").event(message, change, noise_shares, 100.0)
    assert isinstance(event, events.GaussianRelease)
    assert event.ratio == pytest.approx(math.sqrt(share) * 2.0 / 2)


def test_scaled_noise_has_its_level_as_multiplier() -> None:
    message = within(0.7, 3)
    assert Gaussian(at="client").scaled(3.0, message, message, Share(9.0, 1.0, 1e-5)) == Gaussian(
        3.0, "client"
    )
    scaled = RoundedGaussian().scaled(3.0, message, message, Share(9.0, 1.0, 1e-5))
    assert scaled == RoundedGaussian(3.0)
    assert scaled.calibrated
    assert not RoundedGaussian().calibrated


# ---- RoundedGaussian


@pytest.mark.parametrize("factor", [0.97, 1.0, 1.03])
def test_a_rounded_draw_has_the_masses_of_the_rounded_gaussian_and_no_other(factor) -> None:
    """Message plus draw: round(x + N) of a whole x is x + round(N)."""
    message = StochasticRound(4).norms(within(2.0, 200_000))  # a grid of ½
    noise = RoundedGaussian(3.0 * message.grid / message.l2)  # three steps
    whole = torch.arange(message.dim) % 7 - 3
    released = whole + noise.draw(message, 5, 9.0, np.random.default_rng(3))
    assert released.dtype == torch.int64
    reach = 12
    masses = rounded_masses(3.0 * factor, reach)
    drawn = np.clip((released - whole).numpy(), -reach, reach)
    masses[[0, -1]] += (1 - masses.sum()) / 2  # what lies beyond is counted at the ends
    counts = np.bincount(drawn + reach, minlength=2 * reach + 1)
    p = stats.chisquare(counts, masses * message.dim, sum_check=False).pvalue
    assert p > 1e-3 if factor == 1.0 else p < 1e-6


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.7])
@pytest.mark.parametrize("change", CHANGES[:5], ids=name)
def test_rounded_noise_hides_every_move_at_least_as_well_as_the_gaussian(sigma, change) -> None:
    """x + z against x′ + z, all outputs, for every whole move within the norms.

    z has the law of the noise's own draws, and the Gaussian is that of the noise's own event.
    """
    noise = RoundedGaussian(sigma / change.l2)  # σ steps
    message = replace(change, dim=2**18)
    steps = noise.draw(message, 1, 1.0, cast(np.random.Generator, Even(message.dim))).numpy()
    masses = np.bincount(steps - steps.min()) / message.dim
    assert steps.min() == -steps.max()
    event = noise.event(change, change, 1.0, 1.0)
    assert isinstance(event, events.GaussianRelease)
    for move in moves_within(change):
        p, q = laws(masses, move)
        distance = math.hypot(*move) / change.l2 / event.ratio
        for epsilon in EPSILONS:
            counting = (1 + math.exp(epsilon)) * len(move) * len(masses) / message.dim
            assert hockey_stick(p, q, epsilon) <= gaussian_delta(distance, epsilon) + counting


@pytest.mark.parametrize("move", [(3,), (2, 1), (1, 1, 1)], ids=str)
def test_and_not_much_better(move: Move) -> None:
    """So accounting σ·1.1 would be noticed by the enumeration."""
    sigma, distance = 2.5, math.hypot(*move)
    masses = rounded_masses(sigma, 12)
    true = hockey_stick(*laws(masses, move), 1.0)
    assert true > gaussian_delta(distance / (1.1 * sigma), 1.0)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_event_of_rounded_noise_is_the_gaussian_s(adjacency) -> None:
    message = TowardZero(2**10).norms(within(0.3, 50))
    change = message.sensitivity(adjacency)
    for noise_shares in (1.0, 40.0):
        event = RoundedGaussian(2.0).event(message, change, noise_shares, 40.0)
        assert event == events.GaussianRelease(2.0 if adjacency == "add-remove" else 1.0)


def test_a_release_of_enumerated_rounded_noise_is_within_its_event() -> None:
    """Multiplier, grid and sensitivity together: a message of at most 3 steps, σ of 3.6 steps."""
    message = Norms(2, l1=0.6, l2=0.3 * math.sqrt(2), linf=0.3, grid=0.1)
    event = RoundedGaussian(1.2).event(message, message, 1.0, 1.0)
    assert isinstance(event, events.GaussianRelease)
    sigma = 1.2 * message.l2 / message.grid
    masses = rounded_masses(sigma, 50)
    for epsilon in EPSILONS:
        true = hockey_stick(*laws(masses, (3, 3)), epsilon)
        bound = gaussian_delta(1 / event.ratio, epsilon)
        assert true <= bound + 1e-12
        assert true >= 0.8 * bound


def test_rounded_noise_needs_a_grid() -> None:
    with pytest.raises(UserError, match="grid"):
        RoundedGaussian(1.0).draw(within(1.0, 3), 1, 1.0, np.random.default_rng(0))


WRONG: list[Callable[[], object]] = [
    lambda: Gaussian(-1.0),
    lambda: Gaussian(math.nan),
    lambda: Gaussian(1.0, at="nowhere"),  # type: ignore[arg-type]
    lambda: Gaussian().deviation(within(1.0, 2)),
    lambda: RoundedGaussian(0.0),
    lambda: RoundedGaussian(math.inf),
    lambda: RoundedGaussian().deviation(within(1.0, 2)),
]


@pytest.mark.parametrize("make", WRONG)
def test_wrong_amounts_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value).endswith(".")
