"""Losses with seen coins, and bounds by Rényi: against direct enumeration of coins and outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy import stats

from fedveil.accounting import events
from fedveil.accounting.accountant import delta, epsilon
from fedveil.accounting.events import ORDERS
from fedveil.accounting.losses import Best, GaussianMixture, Renyi, Weighted
from fedveil.parts.discrete import Binomial, DiscreteGaussian, TruncatedDiscreteLaplace
from tests.unit.accounting.test_integers import CHANGES, hockey_stick, laws

EPSILONS = (0.0, 0.2, 1.0, 3.0)
SETTINGS = [(0.3, 6, 6), (0.3, 6, 2), (0.8, 4, 1), (0.05, 5, 5), (1.0, 3, 3)]
STEP = CHANGES[0]


def counts(rate: float, rounds: int, most: int) -> Iterator[tuple[int, float]]:
    """How often one takes part, with what chance: the coins one by one, not a formula."""
    for pattern in range(2**rounds):
        heads = pattern.bit_count()
        yield min(heads, most), rate**heads * (1 - rate) ** (rounds - heads)


def mixed(once: Callable[[int], float], rate: float, rounds: int, most: int) -> float:
    """Σ over all coins of chance · once(participations)."""
    return math.fsum(chance * once(times) for times, chance in counts(rate, rounds, most))


def gaussian_delta(times: int, ratio: float, eps: float) -> float:
    if times == 0:
        return 0.0
    mu, phi = math.sqrt(times) / ratio, stats.norm.cdf
    return float(phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu))


def repeated(p: np.ndarray, q: np.ndarray, times: int, eps: float) -> float:
    """The exact δ(ε) of `times` independent outputs."""
    ps = qs = np.ones(1)
    for _ in range(times):
        ps, qs = np.outer(ps, p).ravel(), np.outer(qs, q).ravel()
    return hockey_stick(ps, qs, eps)


# ---- Attended against the coins


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize(("rate", "rounds", "most"), SETTINGS)
def test_attended_gaussian_rounds_are_the_mixture_over_all_coins(rate, rounds, most, eps) -> None:
    event = events.ParticipationMixture(events.GaussianRelease(0.9), rate, rounds, most)
    true = mixed(lambda times: gaussian_delta(times, 0.9, eps), rate, rounds, most)
    assert delta(event, eps) == pytest.approx(true, rel=1e-9, abs=1e-15)
    assert delta(event, eps) >= true * (1 - 1e-12)


@pytest.mark.parametrize("eps", [30.0, 60.0])
def test_counts_too_rare_to_be_told_apart_are_put_at_the_cap(eps: float) -> None:
    """Taking part six times of twenty has a chance of 4e-20; what it costs is not left out."""
    ratio, rate, rounds = 0.5, 1e-4, 20
    event = events.ParticipationMixture(events.GaussianRelease(ratio), rate, rounds, rounds)
    chances = stats.binom.pmf(np.arange(rounds + 1), rounds, rate)
    true = math.fsum(
        chance * gaussian_delta(times, ratio, eps) for times, chance in enumerate(chances)
    )
    assert 0 < true <= delta(event, eps) <= 1e-16


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize(("rate", "rounds", "most"), SETTINGS)
def test_attended_pairs_are_the_mixture_over_all_coins(rate, rounds, most, eps) -> None:
    """The mechanism that is exactly (½, 10⁻³)-DP and no better, enumerated."""
    own, escape = 0.5, 1e-3
    yes = (1 - escape) / (1 + math.exp(-own))
    p = np.array([escape, yes, 1 - escape - yes, 0.0])
    event = events.ParticipationMixture(events.ApproximateRelease(own, escape), rate, rounds, most)
    true = mixed(lambda times: repeated(p, p[::-1], times, eps), rate, rounds, most)
    assert true <= delta(event, eps) * (1 + 1e-9)
    assert delta(event, eps) == pytest.approx(true, rel=5e-3, abs=1e-12)


RELEASES = [Binomial(8), TruncatedDiscreteLaplace(0.4, 3), DiscreteGaussian(1.3, 4)]


@pytest.mark.parametrize("noise", RELEASES, ids=str)
@pytest.mark.parametrize(("rate", "rounds", "most"), [s for s in SETTINGS if s[1] < 6])
def test_attended_discrete_noise_covers_all_coins_and_outputs(noise, rate, rounds, most) -> None:
    masses = np.array([count / 2**124 for count in noise.table(STEP).counts()])
    p, q = laws(masses, (1,))
    event = events.ParticipationMixture(noise.event(STEP, STEP, 1.0, 1.0), rate, rounds, most)
    for eps in EPSILONS:
        true = mixed(lambda times, eps=eps: repeated(p, q, times, eps), rate, rounds, min(most, 4))
        assert true <= delta(event, eps) * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "rounds", "most"), SETTINGS)
def test_mixed_renyi_divergences_are_the_moments_over_all_coins(rate, rounds, most) -> None:
    values = np.array(ORDERS) / 50
    times, chances = map(np.array, zip(*counts(rate, rounds, most), strict=True))
    found = Renyi.mixed(values, times, chances)
    for place in (0, 11, 28, 40):
        below, value = ORDERS[place] - 1, values[place]
        moment = mixed(lambda t, b=below, v=value: math.exp(b * t * v), rate, rounds, most)
        assert found[place] == pytest.approx(math.log(moment) / below, rel=1e-9, abs=1e-15)


def test_mixed_divergences_stay_infinite_where_they_are() -> None:
    values = np.where(np.arange(len(ORDERS)) % 2, np.inf, 0.1)
    found = Renyi.mixed(values, np.array([0, 1, 2]), np.array([0.5, 0.3, 0.2]))
    assert np.array_equal(np.isinf(found), np.isinf(values))
    never = Renyi.mixed(values, np.array([0]), np.array([1.0]))
    assert not never.any()


def test_attended_escapes_count_as_often_as_one_takes_part() -> None:
    flat = (0.0,) * len(ORDERS)
    event = events.ParticipationMixture(events.RenyiRelease(flat, 1e-3, 1e-5), 0.25, 8, 8)
    assert delta(event, 1.0) == pytest.approx(2 * (1e-3 + (1 + math.e) * 1e-5))


ATTENDED: list[events.Release] = [
    events.GaussianRelease(1.1),
    events.ApproximateRelease(0.4, 1e-6),
    events.RenyiRelease(tuple(order / 40 for order in ORDERS), 1e-7, 1e-9),
    TruncatedDiscreteLaplace(0.2, 60).event(STEP, STEP, 1.0, 1.0),
]


@pytest.mark.parametrize("release", ATTENDED, ids=lambda release: type(release).__name__)
def test_taking_part_for_sure_is_composition(release: events.Release) -> None:
    for rounds, most in [(7, 7), (7, 3), (1, 1)]:
        composed = events.Composed(release, most)
        attended = events.ParticipationMixture(release, 1.0, rounds, most)
        assert epsilon(attended, 1e-4) == pytest.approx(epsilon(composed, 1e-4), rel=2e-3)
        for eps in (0.1, 1.0):
            assert delta(attended, eps) == pytest.approx(delta(composed, eps), rel=1e-2)


@pytest.mark.parametrize("release", ATTENDED, ids=lambda release: type(release).__name__)
def test_more_of_anything_costs_more(release: events.Release) -> None:
    def spent(rate: float = 0.3, rounds: int = 12, most: int = 12) -> float:
        return delta(events.ParticipationMixture(release, rate, rounds, most), 0.7)

    by_cap = [spent(most=most) for most in (1, 2, 4, 8, 12)]
    by_rate = [spent(rate=rate) for rate in (0.01, 0.1, 0.3, 0.9, 1.0)]
    by_rounds = [spent(rounds=rounds, most=20) for rounds in (1, 3, 12, 20)]
    for found in (by_cap, by_rate, by_rounds):
        assert all(a <= b for a, b in itertools.pairwise(found))
        assert found[0] < found[-1]


def test_a_seen_coin_is_worth_less_than_a_hidden_one() -> None:
    release = events.GaussianRelease(1.0)
    hidden = events.Composed(events.PoissonSampled(0.1, release), 20)
    seen = events.ParticipationMixture(release, 0.1, 20, 20)
    surely = events.Composed(release, 20)
    assert epsilon(hidden, 1e-5) < epsilon(seen, 1e-5) < epsilon(surely, 1e-5)


def test_attending_something_that_is_not_private_is_not_private() -> None:
    assert delta(events.ParticipationMixture(events.NonPrivate("why"), 0.1, 3, 3), 5.0) == 1.0
    assert (
        epsilon(events.ParticipationMixture(events.GaussianRelease(1e-3), 0.1, 3, 3), 1e-5)
        == math.inf
    )


@pytest.mark.parametrize("release", [(1.0, 1e-9), (10.0, 1e-12)])
def test_a_count_without_a_guarantee_loses_no_more_than_its_chance(release) -> None:
    """Of 10,000 rounds one takes part in about ten; a chance of 1e-16 is put at all of them."""
    event = events.ApproximateRelease(*release)
    assert math.isinf(epsilon(events.Composed(event, 10_000), 1e-5))
    spent = events.ParticipationMixture(event, 1e-3, 10_000, 10_000)
    capped = events.ParticipationMixture(event, 1e-3, 10_000, 40)
    assert epsilon(capped, 1e-5) <= epsilon(spent, 1e-5) <= epsilon(capped, 1e-5 - 2e-16) + 1e-6
    often = events.ParticipationMixture(events.ApproximateRelease(600.0, 0.0), 0.9, 100, 100)
    assert delta(often, 1e3) >= 0.99


# ---- each loss by itself


@pytest.mark.parametrize("target", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize(("escape", "distance"), [(0.0, 0.0), (1e-10, 0.0), (0.0, 1e-13)])
def test_renyi_s_epsilon_and_delta_belong_together(target, escape, distance) -> None:
    loss = Renyi(np.array(ORDERS) / 10, escape, distance)
    found = loss.get_epsilon_for_delta(target)
    assert math.isfinite(found)
    assert loss.get_delta_for_epsilon(found) <= target * (1 + 1e-9)
    assert loss.get_delta_for_epsilon(0.99 * found) > target


def test_what_renyi_sets_aside_is_added() -> None:
    plain = Renyi(np.array(ORDERS) / 10, 0.0, 0.0)
    aside = Renyi(np.array(ORDERS) / 10, 2e-6, 3e-7)
    extra = 2e-6 + (1 + math.exp(1.5)) * 3e-7
    assert aside.get_delta_for_epsilon(1.5) == pytest.approx(
        plain.get_delta_for_epsilon(1.5) + extra
    )
    assert aside.get_epsilon_for_delta(1e-6) == math.inf  # less than what escapes
    assert aside.get_epsilon_for_delta(1e-3) > plain.get_epsilon_for_delta(1e-3)


def test_renyi_covers_the_gaussian_that_it_is_the_divergence_of() -> None:
    ratio = 1.7
    loss = Renyi(np.array(ORDERS) / (2 * ratio**2), 0.0, 0.0)
    for eps in EPSILONS:
        true = gaussian_delta(1, ratio, eps)
        assert true <= loss.get_delta_for_epsilon(eps) <= 12 * true


def test_unknown_orders_do_not_count() -> None:
    few = np.full(len(ORDERS), np.inf)
    few[ORDERS.index(8.0)] = 0.8
    all_known = np.array(ORDERS) / 10
    loss = Renyi(few, 0.0, 0.0)
    best = Renyi(all_known, 0.0, 0.0).get_epsilon_for_delta(1e-5)
    assert best <= loss.get_epsilon_for_delta(1e-5) < 2 * best
    nothing = Renyi(np.full(len(ORDERS), np.inf), 0.0, 0.0)
    assert nothing.get_epsilon_for_delta(1e-5) == math.inf
    assert nothing.get_delta_for_epsilon(5.0) == 1.0


def test_a_mixture_s_epsilon_is_the_least_for_its_delta() -> None:
    loss = GaussianMixture(0.8, np.array([0, 1, 5]), np.array([0.5, 0.3, 0.2]))
    for target in (1e-2, 1e-6):
        found = loss.get_epsilon_for_delta(target)
        assert loss.get_delta_for_epsilon(found) <= target
        assert loss.get_delta_for_epsilon(found * (1 - 1e-6)) > target
    assert loss.get_epsilon_for_delta(0.9) == 0.0


def test_weighted_losses_add_up_and_never_end_when_one_never_does() -> None:
    one = GaussianMixture(1.0, np.array([1]), np.array([1.0]))
    none = Renyi(np.full(len(ORDERS), np.inf), 0.0, 0.0)
    loss = Weighted(np.array([0.25, 0.75]), (one, one))
    assert loss.get_delta_for_epsilon(0.5) == pytest.approx(one.get_delta_for_epsilon(0.5))
    assert loss.get_epsilon_for_delta(1e-4) == pytest.approx(one.get_epsilon_for_delta(1e-4))
    half = Weighted(np.array([0.5, 0.5]), (one, none))
    assert half.get_delta_for_epsilon(9.0) == pytest.approx(0.5, abs=1e-6)
    assert half.get_epsilon_for_delta(0.1) == math.inf


# ---- the best of several proofs


def test_the_best_of_several_losses_is_taken_at_each_point() -> None:
    early = GaussianMixture(1.0, np.array([1]), np.array([1.0]))
    late = Weighted(np.array([1e-3]), (Renyi(np.full(len(ORDERS), np.inf), 0.0, 0.0),))
    both = Best((early, late))
    for eps in (0.1, 1.0, 5.0):
        found = [early.get_delta_for_epsilon(eps), late.get_delta_for_epsilon(eps)]
        assert both.get_delta_for_epsilon(eps) == min(found)
    assert both.get_delta_for_epsilon(0.1) == 1e-3
    assert both.get_delta_for_epsilon(5.0) < 1e-3
    assert both.get_epsilon_for_delta(1e-5) == early.get_epsilon_for_delta(1e-5)
    assert both.get_epsilon_for_delta(2e-3) == late.get_epsilon_for_delta(2e-3) == 0.0


def test_proven_releases_take_the_better_proof_over_all_rounds() -> None:
    """Pure ε adds up as K, Rényi as √K: one proof for few rounds, the other for many."""
    noise = TruncatedDiscreteLaplace(0.1, 250)
    event = noise.event(STEP, STEP, 1.0, 1.0)
    assert isinstance(event, events.Proven)
    for rounds in (1, 3, 100, 2000):
        ways = [epsilon(events.Composed(way, rounds), 1e-6) for way in event.ways]
        assert epsilon(events.Composed(event, rounds), 1e-6) == min(ways)
        attended = [
            epsilon(events.ParticipationMixture(way, 0.5, 6, 6), 1e-6) for way in event.ways
        ]
        assert epsilon(events.ParticipationMixture(event, 0.5, 6, 6), 1e-6) == min(attended)


def test_a_proof_without_a_guarantee_does_not_spoil_the_other() -> None:
    fine = events.GaussianRelease(1.0)
    proven = events.Proven((events.NonPrivate("why"), fine))
    assert epsilon(events.Composed(proven, 2), 1e-5) == epsilon(events.Composed(fine, 2), 1e-5)
    hopeless = events.Proven((events.NonPrivate("why"),))
    assert epsilon(events.Composed(hopeless, 2), 1e-5) == math.inf


def test_either_of_two_accounts_of_a_run_counts_where_it_is_better() -> None:
    release = events.GaussianRelease(1.0)
    few, sampled = events.Composed(release, 2), events.PoissonSampled(0.2, release)
    for rounds in (5, 400):
        hidden = events.Composed(sampled, rounds)
        either = events.Either((hidden, few))
        assert epsilon(either, 1e-5) == min(epsilon(hidden, 1e-5), epsilon(few, 1e-5))
    assert epsilon(events.Composed(sampled, 5), 1e-5) < epsilon(few, 1e-5)
    assert epsilon(events.Composed(sampled, 400), 1e-5) > epsilon(few, 1e-5)
