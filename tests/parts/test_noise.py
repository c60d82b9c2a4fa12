"""Noise: the samplers follow their laws, the events follow from enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.noise import (
    HALF,
    Binomial,
    Gaussian,
    Silent,
    TruncatedDiscreteLaplace,
    _edges,
    _inverted,
)
from fedveil.parts.quantize import StochasticRound
from fedveil.privacy import events
from fedveil.privacy.norms import Norms


def on_grid(dim: int, levels: int = 1) -> Norms:
    """Messages in grid steps of 1: unit vectors times `levels`, rounded."""
    return StochasticRound(levels).norms(within(float(levels), dim))


def chi_square(values: np.ndarray, masses: np.ndarray) -> float:
    """The p-value of values −m..m against masses; cells under 10 expected are merged."""
    half = len(masses) // 2
    observed = np.bincount(values.astype(int) + half, minlength=len(masses)).astype(float)
    expected = masses * len(values)
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float(stats.chisquare(observed[kept], expected[kept]).pvalue)


def binomial_masses(trials: int) -> np.ndarray:
    return stats.binom.pmf(np.arange(trials + 1), trials, 0.5)


LAWS = [
    (TruncatedDiscreteLaplace(0.3, 12), lambda: TruncatedDiscreteLaplace(0.2, 12).masses()),
    (TruncatedDiscreteLaplace(1e-4, 9), lambda: TruncatedDiscreteLaplace(0.05, 9).masses()),
    (Binomial(40), lambda: np.pad(binomial_masses(26), 7)),
]


@pytest.mark.parametrize(("noise", "wrong"), LAWS, ids=["tdl", "tdl-flat", "binomial"])
def test_a_sampler_matches_its_masses_and_no_other(noise, wrong) -> None:
    drawn = noise.draw(on_grid(200_000), 1, 1.0, np.random.default_rng(1)).numpy()
    law = noise.masses() if hasattr(noise, "masses") else binomial_masses(noise.trials)
    assert chi_square(drawn, law) > 1e-3
    assert chi_square(drawn, wrong()) < 1e-6


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 3 / 2])
def test_gaussian_noise_has_the_stated_deviation_not_two_thirds_or_three_halves(factor) -> None:
    drawn = Gaussian(2.0).draw(within(5.0, 100_000), 7, 10.0, np.random.default_rng(0)).numpy()
    p = stats.kstest(drawn, stats.norm(scale=10.0 * factor).cdf).pvalue
    assert p > 1e-3 if factor == 1.0 else p < 1e-6


@pytest.mark.parametrize(("alpha", "support"), [(0.3, 12), (1.0, 3), (0.01, 50), (2.0, 1)])
def test_lemma_1_s_variance_is_the_enumerated_one(alpha: float, support: int) -> None:
    noise = TruncatedDiscreteLaplace(alpha, support)
    values = np.arange(-support, support + 1)
    assert noise.masses().sum() == pytest.approx(1.0)
    assert noise.variance() == pytest.approx(float((noise.masses() * values**2).sum()))


def test_client_noise_adds_up_over_the_clients_that_came() -> None:
    noise = TruncatedDiscreteLaplace(0.3, 12)
    drawn = noise.draw(on_grid(50_000), 6, 6.0, np.random.default_rng(1)).numpy()
    assert drawn.var() == pytest.approx(6 * noise.variance(), rel=0.03)


@pytest.mark.parametrize(("arrived", "shares"), [(0, 1.0), (30, 1.0), (100, 1.0), (150, 1.5)])
def test_gaussian_client_noise_never_falls_below_what_is_accounted(arrived, shares) -> None:
    noise = Gaussian(2.0, at="client")
    drawn = noise.draw(within(1.0, 50_000), arrived, 100.0, np.random.default_rng(2)).numpy()
    assert drawn.std() == pytest.approx(2.0 * math.sqrt(shares), rel=0.02)


def hockey_stick(masses: np.ndarray, move: tuple[int, ...], epsilon: float) -> float:
    """δ(ε) between noise and noise moved by `move`, by enumeration of all outputs."""
    m = len(masses) // 2
    reach = m + max(map(abs, move))
    mass = {value: masses[value + m] for value in range(-m, m + 1)}
    total = 0.0
    for output in itertools.product(range(-reach, reach + 1), repeat=len(move)):
        p = math.prod(mass.get(value, 0.0) for value in output)
        q = math.prod(mass.get(v - step, 0.0) for v, step in zip(output, move, strict=True))
        total += max(p - math.exp(epsilon) * q, 0.0)
    return total


@pytest.mark.parametrize(("alpha", "support"), [(0.3, 5), (0.05, 4), (1.0, 6)])
@pytest.mark.parametrize("move", [(1,), (2, 0), (1, 1), (2, 2), (2, 1, 1), (0, 2, 0)])
def test_tdl_s_epsilon_and_delta_cover_every_enumerated_neighbour(alpha, support, move) -> None:
    change = Norms(len(move), l1=sum(move), l2=math.hypot(*move), linf=max(move), grid=1.0)
    event = TruncatedDiscreteLaplace(alpha, support).event(change, change, 1.0)
    assert isinstance(event, events.ApproximateRelease)
    enumerated = hockey_stick(
        TruncatedDiscreteLaplace(alpha, support).masses(), move, event.epsilon
    )
    assert enumerated <= event.delta * (1 + 1e-9)


def test_tdl_s_delta_is_tight_for_one_full_move() -> None:
    change = Norms(1, l1=3, l2=3, linf=3, grid=1.0)
    noise = TruncatedDiscreteLaplace(0.3, 5)
    event = noise.event(change, change, 1.0)
    assert hockey_stick(noise.masses(), (3,), event.epsilon) == pytest.approx(event.delta)


def test_moves_beyond_the_centre_are_covered_too() -> None:
    """There t is not convex: several moves of m can be worse than fewer of 2m."""
    noise = TruncatedDiscreteLaplace(0.8, 2)
    change = Norms(2, l1=4, l2=4, linf=4, grid=1.0)
    event = noise.event(change, change, 1.0)
    for move in [(4, 0), (2, 2), (3, 1)]:
        assert hockey_stick(noise.masses(), move, event.epsilon) <= event.delta * (1 + 1e-9)


def test_the_published_parameters_of_das_2021_are_not_private_as_claimed() -> None:
    """PAPERS: at s = 2^6 one coordinate moved by one level already gives δ = 0.053."""
    published = TruncatedDiscreteLaplace.das2021(dim=328_810, levels=64, epsilon=10, mu=0.1)
    assert published.support == 9
    one_step = Norms(328_810, l1=1, l2=1, linf=1, grid=1.0)
    event = published.event(one_step, one_step, 1.0)
    assert event.delta == pytest.approx(0.053, abs=0.001)
    assert event.delta > 2.0**-328_810
    message = StochasticRound(64).norms(within(1.0, 328_810))
    whole = published.event(message, message.sensitivity("replace-one"), 1.0)
    assert isinstance(whole, events.NonPrivate)


@pytest.mark.parametrize(
    ("dim", "levels", "bits"),
    [(328_810, 2**6, 8), (328_810, 2**12, 14), (2_210_410, 2**9, 11), (2_210_410, 2**20, 22)],
)
def test_published_message_sizes(dim: int, levels: int, bits: int) -> None:
    support = TruncatedDiscreteLaplace.das2021(dim, levels, epsilon=10, mu=0.1).support
    assert math.ceil(math.log2(2 * (levels + support) + 1)) == bits


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
def test_scaled_tdl_keeps_delta_with_the_least_support(delta: float) -> None:
    message = on_grid(3, levels=2)
    change = message.sensitivity("replace-one")
    noise = TruncatedDiscreteLaplace().scaled(0.5, message, change, delta)
    event = noise.event(message, change, 1.0)
    assert event.epsilon == pytest.approx(2.0)
    assert event.delta <= delta
    smaller = TruncatedDiscreteLaplace(noise.alpha, noise.support - 1)
    assert smaller.event(message, change, 1.0).delta > delta


def test_a_silent_recipe_and_unaccounted_noise_say_that_they_are_not_private() -> None:
    norms = on_grid(3)
    assert isinstance(Silent().event(norms, norms, 1.0), events.NonPrivate)
    assert isinstance(Binomial(10).event(norms, norms, 1.0), events.NonPrivate)
    with pytest.raises(UserError, match="not accounted"):
        Binomial().scaled(1.0, norms, norms, 1e-5)


def test_wrong_amounts_are_refused() -> None:
    for make in (
        lambda: Gaussian(-1.0),
        lambda: Gaussian(math.nan),
        lambda: Gaussian(1.0, at="nowhere"),
        lambda: TruncatedDiscreteLaplace(0.1),
        lambda: TruncatedDiscreteLaplace(-0.1, 3),
        lambda: TruncatedDiscreteLaplace(0.1, 0),
        lambda: Binomial(3),
        lambda: Gaussian().deviation(within(1.0, 2)),
    ):
        with pytest.raises(UserError):
            make()


def test_discrete_noise_needs_a_grid() -> None:
    with pytest.raises(UserError, match="grid"):
        Binomial(4).draw(within(1.0, 3), 1, 1.0, np.random.default_rng(0))


def test_the_sampler_s_whole_numbers_are_the_stated_law_down_to_the_tails() -> None:
    """Float sums would lose masses under 1e-16; the edges keep 37 digits, on both sides alike."""
    alpha, support = 1.0, 60
    high, low = (part.tolist() for part in _edges(alpha, support))
    edges = [h * HALF + entry for h, entry in zip(high, low, strict=True)]
    counts = np.diff([0, *edges, HALF * HALF])
    law = [math.exp(-alpha * abs(y)) for y in range(-support, support + 1)]
    for count, mass in zip(counts, law, strict=True):
        assert count / (HALF * HALF) == pytest.approx(mass / math.fsum(law), rel=1e-9)
    assert counts[0] > 0
    assert abs(int(counts[0]) - int(counts[-1])) <= 1


class Scripted:
    """A generator whose integers are given."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def integers(self, limit: int, size: int | None = None) -> object:
        return self.answers.pop(0)


def test_ties_of_the_high_half_are_settled_by_the_low_half() -> None:
    high, low = np.array([5, 5, 9]), np.array([10, 20, 0])
    for first, second, place in [
        (4, 0, 0),
        (5, 9, 0),
        (5, 10, 1),
        (5, 19, 1),
        (5, 20, 2),
        (7, 0, 2),
    ]:
        rng = Scripted(np.array([first]), second)
        assert _inverted((high, low), 1, rng).tolist() == [place]


def test_the_event_counts_what_the_sampler_may_be_off() -> None:
    change = Norms(1000, l1=1, l2=1, linf=1, grid=1.0)
    event = TruncatedDiscreteLaplace(1.0, 200).event(change, change, 1.0)
    assert event.delta >= 1000 * 400 / 2.0**124
