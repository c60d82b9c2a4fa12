"""A Gaussian release before the rounds: the composition, against closed forms and the library."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant

from fedveil.accounting import events
from fedveil.accounting.accountant import delta, epsilon
from fedveil.accounting.correlation import Column
from fedveil.parts.statistics import Statistics
from fedveil.privacy import composition
from fedveil.privacy.composition import Charged, ReleasePlan, Way

FIRST = Statistics(3.0, 1e-6).event("add-remove")


def test_a_first_release_and_gaussian_rounds_are_one_gaussian() -> None:
    spent = events.Composed(events.GaussianRelease(5.0), 10, FIRST)
    alone = events.GaussianRelease((10 / 25 + 1 / 9) ** -0.5)
    assert delta(spent, 1.0) == pytest.approx(delta(alone, 1.0) + 1e-6, rel=1e-9)


@pytest.mark.parametrize(("rate", "ratio", "rounds"), [(0.2, 2.0, 50), (0.05, 0.8, 1)])
def test_a_first_release_and_sampled_rounds_agree_with_the_library(rate, ratio, rounds) -> None:
    sampled = events.PoissonSampled(rate, events.GaussianRelease(ratio))
    accountant = PLDAccountant().compose(dp.GaussianDpEvent(3.0))
    round = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(ratio))
    library = accountant.compose(round, rounds).get_epsilon(1e-5 - 1e-6)
    found = epsilon(events.Composed(sampled, rounds, FIRST), 1e-5)
    assert found == pytest.approx(library, rel=5e-3)


def test_no_round_leaves_the_first_release() -> None:
    sampled = events.PoissonSampled(0.1, events.GaussianRelease(1.0))
    for event in (sampled, events.NonPrivate("no noise"), events.GaussianRelease(1.0)):
        assert epsilon(events.Composed(event, 0, FIRST), 1e-5) == epsilon(FIRST, 1e-5)


def test_renyi_bounds_add_up() -> None:
    curve = tuple(order / 50 for order in events.ORDERS)  # a Gaussian of ratio 5
    bound = epsilon(events.Composed(events.RenyiRelease(curve), 4, FIRST), 1e-5)
    exact = epsilon(events.Composed(events.GaussianRelease(5.0), 4, FIRST), 1e-5)
    assert exact < bound < 1.3 * exact


def test_replacing_a_unit_counts_for_more() -> None:
    statistics = Statistics(3.0, 1e-6)
    event = statistics.event("replace-one")
    assert event.by.ratio == pytest.approx(3 / math.sqrt(2))
    assert statistics.of_examples().event("zero-out") == event
    assert statistics.of_examples().event("replace-one") == event
    assert statistics.and_(statistics).ratio == pytest.approx(3 / math.sqrt(2))
    assert statistics.and_(statistics).escape == 2e-6


def test_every_run_pays_for_its_own_first_release() -> None:
    """Two equal runs have two first releases: their rounds alone do not say how many."""
    plan = ReleasePlan((Way(events.GaussianRelease(20.0), None, None, FIRST),), ("zero-out",))
    assert ReleasePlan.from_plain(plan.plain()) == plan
    one, two = [Charged(plan, 10, 10)], [Charged(plan, 10, 5), Charged(plan, 10, 5)]
    assert composition.epsilon(one, 1e-5) == epsilon(plan.spent(10), 1e-5)
    exact = epsilon(events.Composed(events.GaussianRelease(20.0), 10, FIRST), 1e-5)
    twice = (10 / 400 + 2 / 9) ** -0.5
    assert composition.epsilon(two, 1e-5) > epsilon(events.GaussianRelease(twice), 1e-5) > exact


def test_a_first_release_counts_beside_correlated_noise() -> None:
    """All rounds of correlated noise are one Gaussian release, and the first one is another."""
    correlated = events.Correlated(4.0, Column(weights=(0.3,), decays=(0.9,)))
    spent = events.Composed(correlated, 6, FIRST)
    alone = correlated.whole(6).ratio
    joint = events.GaussianRelease((alone**-2 + 1 / 9) ** -0.5)
    assert delta(spent, 1.0) == pytest.approx(delta(joint, 1.0) + 1e-6, rel=1e-9)
    plan = ReleasePlan((Way(correlated, None, None, FIRST),), ("zero-out",))
    other = ReleasePlan((Way(events.GaussianRelease(9.0), None),), ("zero-out",))
    runs = [Charged(plan, 6, 6), Charged(other, 3, 3)]
    exact = events.GaussianRelease((alone**-2 + 1 / 9 + 3 / 81) ** -0.5)
    assert composition.epsilon(runs, 1e-5) > epsilon(exact, 1e-5)


def test_infinite_losses_count_after_a_first_release() -> None:
    spent = events.Composed(events.ApproximateRelease(0.1, 1e-6), 5, FIRST)
    assert delta(spent, 100.0) == pytest.approx(1e-6 + 5e-6, rel=1e-4)
