"""Bounds by inversion: formulas against integrals, and coverage on mechanisms known exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, norm

from fedveil.audit import bounds
from fedveil.audit.bounds import Aligned
from fedveil.audit.report import ALARM
from tests.statistics.audit.chances import DEVIATIONS, at_least, at_most

REPETITIONS = 400
DELTA = 1e-5


@pytest.mark.parametrize("mu", [0.1, 0.9, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 4.0])
def test_the_delta_of_a_gaussian_is_its_hockey_stick_divergence(mu: float, epsilon: float) -> None:
    def excess(x: float) -> float:
        return max(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0.0)

    edge = mu / 2 + epsilon / mu
    integral = quad(excess, edge, edge + 40, limit=200)[0]
    assert bounds.gaussian_delta(mu, epsilon) == pytest.approx(integral, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 5.0])
def test_epsilon_and_mu_of_a_gaussian_are_inverse(mu: float) -> None:
    epsilon = bounds.gaussian_epsilon(mu, DELTA)
    assert bounds.gaussian_delta(mu, epsilon) >= DELTA
    assert bounds.gaussian_delta(mu, epsilon * (1 + 1e-6)) <= DELTA
    assert bounds.gaussian_mu(epsilon, DELTA) == pytest.approx(mu, rel=1e-6)


def test_a_mu_too_small_for_delta_has_no_epsilon() -> None:
    assert bounds.gaussian_epsilon(1e-5, DELTA) == 0.0
    assert bounds.gaussian_epsilon(1e-4, DELTA) > 0.0


@pytest.mark.parametrize("chance", [0.001, 0.2, 0.97])
@pytest.mark.parametrize("trials", [1, 7, 60])
def test_clopper_pearson_bounds_are_wrong_as_rarely_as_they_say(chance: float, trials: int) -> None:
    hits = np.arange(trials + 1)
    law = binom.pmf(hits, trials, chance)
    below = [bounds.chance_at_least(int(h), trials, 0.05) > chance for h in hits]
    above = [bounds.chance_at_most(int(h), trials, 0.05) < chance for h in hits]
    assert law @ below <= 0.05
    assert law @ above <= 0.05


def test_clopper_pearson_bounds_are_not_idle() -> None:
    assert bounds.chance_at_least(50, 100, 0.05) > 0.41
    assert bounds.chance_at_most(50, 100, 0.05) < 0.59
    assert bounds.chance_at_most(0, 1000, 0.05) == pytest.approx(1 - 0.05 ** (1 / 1000))


# ------------------------------------------------------------------- a Gaussian release, exactly


def sphere(count: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    rows = rng.normal(size=(count, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def released(
    mu: float, canaries: int, dim: int, others: float, rng: np.random.Generator, rounds: int = 1
) -> list[Aligned]:
    """Rounds of others + Σ canaries + N(0, I/μ²), where others answer what was released before."""
    seen: list[Aligned] = []
    answer = np.ones(dim) / math.sqrt(dim)
    for _ in range(rounds):
        directions = sphere(canaries, dim, rng)
        sent = directions.sum(axis=0) if mu > 0 else np.zeros(dim)
        noise = rng.normal(size=dim) / (mu if mu > 0 else 1.0)
        release = others * answer + sent + noise
        answer = release / np.linalg.norm(release)
        seen += Aligned.of(directions.sum(axis=0), release)
    return seen


SETTINGS = [  # μ, canaries, dim, what others send, rounds
    (0.9, 5, 8, 0.0, 1),
    (0.9, 5, 8, 5.0, 1),
    (0.5, 30, 12, 0.0, 3),  # more canaries than dimensions
    (0.5, 30, 60, 20.0, 4),
    (3.0, 2, 3, 1.0, 2),
    (0.2, 100, 300, 30.0, 2),
]


@pytest.mark.parametrize(("mu", "canaries", "dim", "others", "rounds"), SETTINGS)
def test_the_gaussian_bound_is_wrong_in_at_most_one_of_twenty_runs(
    mu: float, canaries: int, dim: int, others: float, rounds: int
) -> None:
    rng = np.random.default_rng(dim)
    p_values = np.array(
        [
            bounds.alignment_p(released(mu, canaries, dim, others, rng, rounds), mu)
            for _ in range(REPETITIONS)
        ]
    )
    wrong = int((p_values <= 0.05).sum())
    assert wrong <= at_most(0.05, REPETITIONS)
    if others == 0:  # then it is exact, in any dimension
        assert wrong >= at_least(0.05, REPETITIONS)
        spread = math.sqrt(1 / 12 / REPETITIONS)
        assert p_values.mean() == pytest.approx(0.5, abs=DEVIATIONS * spread)


def test_the_law_that_is_inverted_is_right_at_every_level() -> None:
    """A noncentral t against draws, up to levels far from any use."""
    rng = np.random.default_rng(6)
    for dim, moved in ((3, 2.0), (50, 30.0), (1000, 400.0)):
        draws = math.sqrt(dim - 1) * (rng.normal(size=2000) + moved)
        draws /= np.sqrt(rng.chisquare(dim - 1, size=2000))
        seen = [[Aligned(1.0, float(t), dim)] for t in draws]
        low = sum(bounds.alignment_p(one, moved) <= 0.1 for one in seen)
        assert at_least(0.1, 2000) <= low <= at_most(0.1, 2000)


def test_a_bound_lies_below_the_level_just_where_the_level_is_not_rejected() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        seen = released(1.0, 40, 50, 2.0, rng)
        bound = bounds.alignment_mu(seen)
        if bound > 0:
            assert bounds.alignment_p(seen, bound) <= 0.05 < bounds.alignment_p(seen, bound * 1.01)


def test_without_a_leak_the_answer_is_zero_but_for_the_doubt_that_is_allowed() -> None:
    rng = np.random.default_rng(1)
    found = [bounds.alignment_mu(released(0.0, 20, 40, 1.0, rng)) for _ in range(REPETITIONS)]
    assert np.count_nonzero(found) <= at_most(bounds.DOUBT, REPETITIONS)


def test_half_the_noise_is_noticed_and_the_right_noise_is_not() -> None:
    rng = np.random.default_rng(2)
    seen = released(1.0, 200, 400, 5.0, rng, rounds=4)
    assert bounds.alignment_p(seen, 1.0) > ALARM
    assert bounds.alignment_p(seen, 0.5) < ALARM


def test_500_canaries_find_three_and_a_half_of_an_epsilon_of_four() -> None:
    """With k canaries μ̂ has the deviation 1/√k: here 1000 dimensions stand for a model."""
    mu, rng = bounds.gaussian_mu(4.0, DELTA), np.random.default_rng(3)
    seen = [released(mu, 500, 1000, 0.0, rng) for _ in range(60)]
    found = [bounds.gaussian_epsilon(bounds.alignment_mu(one), DELTA) for one in seen]
    assert np.mean(found) >= 3.5
    estimates = [bounds.estimated_mu(one) for one in seen]
    assert np.mean(estimates) == pytest.approx(mu, abs=DEVIATIONS / math.sqrt(500 * 60))


def test_a_release_without_noise_is_a_leak_of_any_size() -> None:
    rng = np.random.default_rng(4)
    canaries = sphere(10, 100, rng).sum(axis=0)
    assert bounds.alignment_mu(Aligned.of(canaries, canaries) * 3) > 100


def test_rounds_without_canaries_or_without_a_release_say_nothing() -> None:
    assert Aligned.of(np.zeros(5), np.ones(5)) == []
    assert Aligned.of(np.ones(5), np.zeros(5)) == []
    assert bounds.alignment_p([], 0.0) == 1.0
    assert bounds.alignment_mu([]) == 0.0
    assert bounds.estimated_mu([]) == 0.0
