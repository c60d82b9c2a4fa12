"""One-run auditing: exact against brute force on few canaries, and coverage on many."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import expit
from scipy.stats import binom

from fedveil.audit import bounds, guessing
from fedveil.audit.guessing import Guesses, Profile
from tests.statistics.audit.chances import at_most

DELTA = 1e-5
CLAIMS: list[Profile] = [
    [(0.5, 0.0)],
    [(0.5, 0.05)],
    [(1.5, 0.02)],
    [(0.0, 0.1)],
    [(0.0, 0.2), (1.0, 0.05), (2.0, 0.001)],
]


def worst_mechanism(guesses: Guesses, profile: Profile) -> float:
    """max P(enough right) over *all* maps from coins to guesses that keep the profile."""
    m, r = guesses.canaries, guesses.made
    worlds = list(itertools.product((-1, 1), repeat=m))
    outputs = [t for t in itertools.product((-1, 0, 1), repeat=m) if sum(map(abs, t)) == r]
    pairs = [
        (a, b)
        for a, b in itertools.permutations(range(len(worlds)), 2)
        if sum(x != y for x, y in zip(worlds[a], worlds[b], strict=True)) == 1
    ]
    chances, size = len(worlds) * len(outputs), len(outputs)
    columns = chances + len(pairs) * len(profile) * size
    gain = np.zeros(columns)
    for (a, world), (t, output) in itertools.product(enumerate(worlds), enumerate(outputs)):
        right = sum(x == y for x, y in zip(world, output, strict=True))
        gain[a * size + t] = -(right >= guesses.right) / len(worlds)
    rows, limits, aside = [], [], chances
    for (epsilon, delta), (a, b) in itertools.product(profile, pairs):
        for t in range(size):
            row = np.zeros(columns)
            row[a * size + t], row[b * size + t], row[aside + t] = 1, -math.exp(epsilon), -1
            rows.append(row)
            limits.append(0.0)
        row = np.zeros(columns)
        row[aside : aside + size] = 1
        rows.append(row)
        limits.append(delta)
        aside += size
    total = np.zeros((len(worlds), columns))
    for a in range(len(worlds)):
        total[a, a * size : (a + 1) * size] = 1
    found = linprog(gain, np.array(rows), limits, total, np.ones(len(worlds)), method="highs")
    return float(-found.fun)


@pytest.mark.parametrize("profile", CLAIMS, ids=str)
@pytest.mark.parametrize(("canaries", "made"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_no_mechanism_does_better_than_the_bound_and_one_does_as_well(
    canaries: int, made: int, profile: Profile
) -> None:
    for right in range(1, made + 1):
        guesses = Guesses(canaries, made, right)
        true = worst_mechanism(guesses, profile)
        assert guessing.profile_p(guesses, profile) == pytest.approx(true, abs=3e-6)
        curve = guessing.trade_off_p(guesses, guessing.profile_inverse(profile))
        assert curve >= true - 1e-6, "the bound by the trade-off curve is below the truth"


def published(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Steinke et al. 2023, Thm. 5.2, as its code has it."""
    r, v = guesses.made, guesses.right
    tails = binom.sf(np.arange(v - 1, -2, -1), r, expit(epsilon))
    steepest = float(np.max((tails[1:] - tails[0]) / np.arange(1, v + 1)))
    return min(float(tails[0]) + 2 * guesses.canaries * delta * steepest, 1.0)


def test_without_delta_the_bound_is_a_binomial_tail() -> None:
    for made, right in ((20, 15), (100, 60)):
        guesses = Guesses(150, made, right)
        tail = binom.sf(right - 1, made, expit(0.4))
        assert guessing.profile_p(guesses, [(0.4, 0.0)]) == pytest.approx(tail, abs=3e-6)


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_where_it_matters_the_bound_is_sharper_than_the_published_one(
    epsilon: float, delta: float
) -> None:
    for canaries, made in ((100, 100), (500, 40)):
        mean = made * float(expit(epsilon))
        for right in range(math.ceil(mean + 1), made + 1, 3):
            guesses = Guesses(canaries, made, right)
            exact = guessing.profile_p(guesses, [(epsilon, delta)])
            assert exact <= published(guesses, epsilon, delta) + 3e-6


def test_the_published_bound_is_below_the_truth_for_few_right_guesses() -> None:
    guesses = Guesses(3, 2, 1)
    true = worst_mechanism(guesses, [(1.5, 0.02)])
    assert published(guesses, 1.5, 0.02) < true - 0.002


# ------------------------------------------------------------------- coverage


@cache
def rejected(guesses: Guesses, epsilon: float) -> bool:
    """Whether the bound by any mechanism is above this ε."""
    return guessing.profile_p(guesses, [(epsilon, DELTA)]) <= 0.05


@cache
def curve_rejected(guesses: Guesses, mu: float) -> bool:
    """Whether the bound by a Gaussian curve is above this μ."""
    return guessing.trade_off_p(guesses, guessing.gaussian_inverse(mu)) <= 0.05


def test_on_randomized_response_the_bound_is_wrong_in_nearly_one_of_twenty_runs() -> None:
    """The mechanism for which it is sharp: every coin is told right with chance e^ε/(1 + e^ε)."""
    right = np.arange(101)
    law = binom.pmf(right, 100, expit(1.5))
    wrong = [rejected(Guesses(100, 100, int(v)), 1.5) for v in right]
    assert 0.02 < law @ wrong <= 0.05


def test_a_bound_lies_just_where_levels_are_no_longer_rejected() -> None:
    guesses = Guesses(100, 100, 88)
    found = guessing.one_run_epsilon(guesses, DELTA)
    assert rejected(guesses, found)
    assert not rejected(guesses, 1.01 * found)
    assert 1.0 < found < 1.5
    mu = guessing.trade_off_mu(guesses)
    assert curve_rejected(guesses, mu)
    assert not curve_rejected(guesses, 1.01 * mu)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_on_a_gaussian_release_neither_bound_is_wrong_too_often(epsilon: float) -> None:
    mu, rng = bounds.gaussian_mu(epsilon, DELTA), np.random.default_rng(1)
    made = guessing.number_of_guesses(200, mu)
    wrong = np.zeros(2)
    for _ in range(500):
        included = rng.random(200) < 0.5
        scores = rng.normal(size=200) + mu * included
        guesses = guessing.guess(scores, included, made)
        wrong += [rejected(guesses, epsilon), curve_rejected(guesses, mu)]
    assert (wrong <= at_most(0.05, 500)).all()


def test_without_a_leak_both_answer_zero_but_for_the_doubt_that_is_allowed() -> None:
    right = np.arange(51)
    law = binom.pmf(right, 50, 0.5)
    cases = [Guesses(100, 50, int(v)) for v in right]
    told = np.array([guessing.nothing_p(one) <= bounds.DOUBT for one in cases])
    assert 0 < law @ told <= bounds.DOUBT
    last = cases[int(np.flatnonzero(~told)[-1])]
    assert guessing.one_run_epsilon(last, DELTA) == 0.0
    assert guessing.trade_off_mu(last) == 0.0


def test_a_curve_tells_more_than_a_pair_and_both_more_than_nothing() -> None:
    guesses = Guesses(500, 100, 85)
    pair = guessing.one_run_epsilon(guesses, DELTA)
    curve = bounds.gaussian_epsilon(guessing.trade_off_mu(guesses), DELTA)
    assert 1.0 < pair < curve < 4.0


def test_guesses_are_made_at_both_ends() -> None:
    scores = np.array([5.0, -1.0, 0.0, 3.0, -2.0, 1.0])
    included = np.array([True, False, True, False, True, True])
    assert guessing.guess(scores, included, 4) == Guesses(6, 4, 2)
    assert guessing.guess(scores, included, 2) == Guesses(6, 2, 1)


def test_more_leak_deserves_another_number_of_guesses() -> None:
    few, many = guessing.number_of_guesses(500, 3.0), guessing.number_of_guesses(500, 0.2)
    assert few % 2 == many % 2 == 0
    assert few <= many == 500
