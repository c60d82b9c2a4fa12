"""A cap on participation: what sampled rounds are left once it is almost surely reached."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from fedveil import algorithms, recipe
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.privacy import events
from fedveil.privacy.accounting import delta, epsilon
from fedveil.privacy.together import plan
from tests.privacy.test_integers import hockey_stick

ROUNDS, EPSILONS = 11, (0.0, 0.2, 0.5, 1.0, 2.0, 3.0)


def capped_laws(rate: float, cap: int, own: float) -> tuple[np.ndarray, np.ndarray]:
    """All outputs of randomized responses: a bit that leans to 1 if the unit takes part, else to 0.

    By enumeration of coins, of which the first `cap` that come up count; and without the unit.
    """
    lean = 1 / (1 + math.exp(-own))
    outputs = np.array(list(itertools.product((0, 1), repeat=ROUNDS)))
    absent = np.where(outputs == 1, 1 - lean, lean)
    present = 1 - absent
    with_unit = np.zeros(len(outputs))
    for coins in itertools.product((0, 1), repeat=ROUNDS):
        takes_part = np.array(coins) & (np.cumsum(coins) <= cap)
        chance = np.prod([rate if coin else 1 - rate for coin in coins])
        with_unit += chance * np.where(takes_part, present, absent).prod(axis=1)
    return with_unit, absent.prod(axis=1)


def ways(rate: float, cap: int, own: float) -> tuple[events.Composed, ...]:
    release = events.ApproximateRelease(own, 0.0)
    sampled = events.Composed(events.PoissonSampled(rate, release), ROUNDS)
    return recipe._until_the_cap(Poisson(rate, cap=cap), sampled)


@pytest.mark.parametrize(("rate", "cap", "own"), [(0.9, 1, 1.0), (0.9, 1, 3.0), (0.95, 2, 2.0)])
def test_rounds_until_the_cap_cover_a_run_by_enumeration(rate, cap, own: float) -> None:
    with_unit, without = capped_laws(rate, cap, own)
    found = ways(rate, cap, own)
    assert found
    for way in found:
        assert way.count < ROUNDS
        for eps in EPSILONS:
            true = hockey_stick(with_unit, without, eps)
            assert true <= delta(way, eps) * (1 + 1e-9)


@pytest.mark.parametrize("chance", [0.8, 0.05])
def test_what_is_set_aside_is_needed_on_both_sides(chance: float) -> None:
    """With a likely remainder: δ_t(ε) + e^ε·chance covers it, and δ_t(ε) alone does not."""
    rate, cap, own = 0.3, 1, 3.0
    with_unit, without = capped_laws(rate, cap, own)
    rounds = recipe.rounds_until(rate, cap, chance)
    assert rounds < ROUNDS
    sampled = events.PoissonSampled(rate, events.ApproximateRelease(own, 0.0))
    short = []
    for eps in EPSILONS:
        true = hockey_stick(with_unit, without, eps)
        early = delta(events.Composed(sampled, rounds), eps)
        assert true <= early + math.exp(eps) * chance
        short.append(true > early)
    assert any(short) == (chance == 0.8)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("cap", [1, 7, 40])
@pytest.mark.parametrize("chance", recipe.NOT_YET)
def test_the_rounds_are_the_least_that_reach_the_cap(rate, cap: int, chance: float) -> None:
    rounds = recipe.rounds_until(rate, cap, chance)
    assert binom.cdf(cap - 1, rounds, rate) <= chance
    assert binom.cdf(cap - 1, rounds - 1, rate) > chance * (1 - 1e-5)


def test_a_run_far_beyond_its_cap_costs_what_the_rounds_before_it_do() -> None:
    capped = algorithms.dp_fedavg(rate=0.1, cap=20, noise_multiplier=4.0)
    spent = capped.spent(10, 1000, 2000)
    assert isinstance(spent, events.Either)
    hidden, known, *early = spent.ways
    old = min(epsilon(hidden, 1e-5), epsilon(known, 1e-5))
    assert [way.count for way in early] == [
        recipe.rounds_until(0.1, 20, chance) for chance in recipe.NOT_YET
    ]
    assert epsilon(spent, 1e-5) < 0.55 * old
    more = capped.spent(10, 1000, 20_000)
    assert epsilon(more, 1e-5) == epsilon(spent, 1e-5)


def test_a_short_run_and_other_cohorts_are_counted_as_before() -> None:
    capped = algorithms.dp_fedavg(rate=0.1, cap=5, noise_multiplier=1.0)
    short = capped.spent(10, 1000, 50)
    assert isinstance(short, events.Either)
    assert len(short.ways) == 2
    fixed = dataclasses.replace(capped, cohort=FixedSize(10, cap=5))
    found = fixed.spent(10, 1000, 50_000)
    assert isinstance(found, events.Either)
    assert len(found.ways) == 2

    class Rare(Poisson):
        """Its rate is what it promises at most; nothing says that it comes up as often."""

    own = dataclasses.replace(capped, cohort=Rare(0.1, cap=5))
    assert len(own.spent(10, 1000, 50_000).ways) == 2


def test_lost_rounds_come_on_top_of_those_until_the_cap() -> None:
    capped = algorithms.dp_fedavg(rate=0.1, cap=20, noise_multiplier=4.0)
    planned = plan(capped, 10, 1000, "models")
    redrawn = planned.redrawn(7)
    for before, after in zip(planned.ways, redrawn.ways, strict=True):
        assert after.most == (None if before.most is None else before.most + 7)
    assert epsilon(planned.spent(2000), 1e-5) == epsilon(capped.spent(10, 1000, 2000), 1e-5)
    assert epsilon(redrawn.spent(2000), 1e-5) > epsilon(planned.spent(2000), 1e-5)


def test_the_chance_that_the_cap_is_not_reached_is_set_aside() -> None:
    for way in ways(0.9, 1, 1.0):
        assert isinstance(way.event, events.Dominated)
        chance = way.count * way.event.distance
        assert chance >= binom.cdf(0, way.count, 0.9)
        early = events.Composed(way.event.by, way.count)
        for eps in EPSILONS:
            paid = delta(early, eps) + math.exp(eps) * chance
            assert delta(way, eps) >= paid * (1 - 1e-12)
