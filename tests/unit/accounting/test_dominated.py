"""Whole-number noise as a normal law in steps: the Gaussian that dominates it, and how closely."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from fedveil.accounting import events, integers
from fedveil.accounting.accountant import delta, epsilon
from fedveil.accounting.losses import Aside, GaussianMixture
from fedveil.accounting.norms import Norms
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    TruncatedDiscreteLaplace,
    binomial_masses,
)
from fedveil.privacy import composition as together
from fedveil.privacy.composition import ORDERS, Charged, ReleasePlan, Way
from tests.unit.accounting.cpsgd import composed_loss
from tests.unit.accounting.test_integers import (
    CHANGES,
    Move,
    hockey_stick,
    laws,
    moves_within,
    name,
)

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 40.0)  # escapes alone are left at 40
DELTA = 1e-5

Law = TruncatedDiscreteLaplace | Binomial | DiscreteGaussian
SMALL: list[tuple[Law, int]] = [
    (Binomial(20), 1),
    (Binomial(8), 3),
    (Binomial(120), 1),
    (DiscreteGaussian(0.5, 9), 1),
    (DiscreteGaussian(0.7, 9), 2),
    (DiscreteGaussian(1.0, 12), 1),
    (DiscreteGaussian(2.0, 20), 3),
    (TruncatedDiscreteLaplace(0.3, 12), 1),
    (TruncatedDiscreteLaplace(1.0, 9), 1),
    (TruncatedDiscreteLaplace(0.05, 60), 1),
]


def drawn(noise: Law, noise_shares: int) -> np.ndarray:
    """The masses of a sum of what is really drawn, by the sampler's own table."""
    once = np.array([count / 2**124 for count in noise.table(CHANGES[0]).counts()])
    total = once
    for _ in range(noise_shares - 1):
        total = np.convolve(total, once)
    return total


def dominated(noise: Law, change: Norms, noise_shares: int = 1) -> list[events.Dominated]:
    event = noise.event(change, change, noise_shares, noise_shares)
    ways = event.ways if isinstance(event, events.Proven) else (event,)
    return [way for way in ways if isinstance(way, events.Dominated)]


def norms_of(move: Move) -> Norms:
    return Norms(len(move), float(sum(move)), math.hypot(*move), max(move), 1.0)


# ---- never below the truth


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize(("noise", "noise_shares"), SMALL, ids=str)
def test_every_dominating_gaussian_covers_every_neighbour(noise, noise_shares, change) -> None:
    """Each by itself, whether or not another proof is better."""
    masses = drawn(noise, noise_shares)
    moving = {tuple(step for step in move if step) for move in moves_within(change)}
    moves = [move for move in moving if len(masses) ** len(move) < 3e6]
    true = dict.fromkeys(EPSILONS, 0.0)
    for p, q in (laws(masses, move) for move in moves):
        for eps in EPSILONS:
            true[eps] = max(true[eps], hockey_stick(p, q, eps))
    for eps in EPSILONS:
        for way in dominated(noise, change, noise_shares):
            assert true[eps] <= delta(way, eps) * (1 + 1e-9) + 1e-12


def test_most_small_laws_have_a_dominating_gaussian() -> None:
    having = [noise for noise, noise_shares in SMALL if dominated(noise, CHANGES[2], noise_shares)]
    assert len(having) >= len(SMALL) - 1


@pytest.mark.parametrize("move", [1, 2, 5])
@pytest.mark.parametrize("law", ["binomial", "gaussian", "laplace"])
def test_every_threshold_is_below_the_dominating_trade_off(law: str, move: int) -> None:
    """P(Y ≥ y) and P(Y + j < y): the corners of the trade-off, where domination is decided."""
    masses = {
        "binomial": binomial_masses(400),
        "gaussian": drawn(DiscreteGaussian(3.0, 40), 1),
        "laplace": drawn(TruncatedDiscreteLaplace(0.1, 120), 1),
    }[law]
    noise = {
        "binomial": Binomial(400),
        "gaussian": DiscreteGaussian(3.0, 40),
        "laplace": TruncatedDiscreteLaplace(0.1, 120),
    }[law]
    change = norms_of((move,))
    below = np.concatenate([[0.0], np.cumsum(masses)])
    above = np.concatenate([np.cumsum(masses[::-1])[::-1], [0.0]])
    for way in dominated(noise, change):
        inside = 1 - way.escape
        assert isinstance(way.by, events.GaussianRelease)
        for y in range(move, len(masses) + 1):
            first, second = min(above[y] / inside, 1.0), below[y - move]
            least = inside * stats.norm.cdf(stats.norm.isf(first) - 1 / way.by.ratio)
            assert second >= least * (1 - 1e-9) - 1e-15


def test_steps_are_not_below_their_exact_values() -> None:
    """Against 60 digits: the masses of a binomial as fractions, its quantiles by mpmath."""
    trials = 60
    law = integers.steps_of(
        np.array([math.log(math.comb(trials, trials // 2 + y)) for y in range(trials // 2 + 1)]),
        whole=True,
    )
    assert law is not None
    counts = [math.comb(trials, trials // 2 + y) for y in range(trials // 2 + 1)]
    tails = [Fraction(sum(counts[k:]), 2**trials) for k in range(1, trials // 2 + 1)]
    with mpmath.workdps(60):
        z = [
            -mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(t.numerator) / t.denominator - 1)
            for t in tails
        ]
        rises = [2 * z[0], *(b - a for a, b in itertools.pairwise(z))]
        steepest = [max(rises[: k + 1]) for k in range(len(rises))]
    assert len(law.tails) == len(tails)
    assert np.allclose(law.tails, [float(t) for t in tails], rtol=1e-12)
    for found, true in zip(law.steepest, steepest, strict=True):
        assert true <= mpmath.mpf(float(found)) <= true * (1 + mpmath.mpf("1e-9"))


@pytest.mark.parametrize("rough", [1e-6, 1e-3, 0.05])
def test_weights_that_are_off_by_a_factor_are_covered(rough: float) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60)
    exact = -(y**2) / 50.0
    stated = integers.steps_of(exact, False, rough)
    assert stated is not None
    for _ in range(20):
        real = integers.steps_of(exact + rng.uniform(-rough, rough, 60) / 2, False)
        assert real is not None
        places = min(len(real.steepest), len(stated.steepest))
        assert (real.steepest[:places] <= stated.steepest[:places]).all()
        assert (real.tails[:places] <= stated.tails[:places]).all()


# ---- and close to it

CLOSE: list[tuple[Law, Move, float]] = [
    (Binomial(200), (1,), 1.04),
    (Binomial(1_000), (1,) * 4, 1.02),
    (Binomial(20_000), (8,), 1.002),
    (Binomial(20_000), (10,) * 40, 1.002),
    (DiscreteGaussian(2.0, 40), (1,), 1.005),
    (DiscreteGaussian(10.0, 140), (8,), 1.002),
    (DiscreteGaussian(20.0, 280), (2,) * 40, 1.002),
]


def exact(noise: Law, move: Move, rounds: int = 1) -> float:
    """ε of the very move, in every round: its own loss distribution, from a fine grid."""
    interval = 1e-4 if len(move) * rounds < 10 else 1e-5
    loss = composed_loss(drawn(noise, 1), move * rounds, interval)
    return float(loss.get_epsilon_for_delta(DELTA))


@pytest.mark.parametrize(("noise", "move", "most"), CLOSE, ids=lambda v: f"{v}"[:30])
def test_the_accounted_epsilon_is_within_a_few_percent(noise, move, most: float) -> None:
    """Where the Rényi bound was 8 to 12% above."""
    found, true = epsilon(noise.event(norms_of(move), norms_of(move), 1, 1), DELTA), 0.0
    true = exact(noise, move)
    assert true * (1 - 3e-3) <= found <= most * true  # 3e-3: the grid of `exact`, from above


def test_over_many_rounds_too() -> None:
    noise, move = DiscreteGaussian(40.0, 500), (3, 2, 2, 1)
    event = noise.event(norms_of(move), norms_of(move), 1, 1)
    true = exact(noise, move, 50)
    assert true * (1 - 3e-3) <= epsilon(events.Composed(event, 50), DELTA) <= 1.002 * true


# ---- sampled


def sampled_laws(masses: np.ndarray, own: int, other: int, rate: float) -> list[np.ndarray]:
    """Sums in which the unit takes the others' place with a chance; they send 0."""
    width = max(own, other)
    shifted = [np.pad(masses, (shift, width - shift)) for shift in (0, own, other)]
    return [(1 - rate) * shifted[0] + rate * moved for moved in shifted[1:]]


@pytest.mark.parametrize("noise", [Binomial(40), DiscreteGaussian(2.0, 24)], ids=str)
@pytest.mark.parametrize(("own", "other"), [(2, 0), (0, 2), (2, 1)])
def test_a_sampled_release_covers_two_rounds_by_enumeration(noise, own: int, other: int) -> None:
    """One of four clients drawn a round, the noise of one: replaced, in either direction."""
    cohort, change = FixedSize(1), norms_of((2,))
    p, q = sampled_laws(drawn(noise, 1), own, other, 0.25)
    twice, both = np.outer(p, p).ravel(), np.outer(q, q).ravel()
    for way in dominated(noise, change):
        amplified = cohort.amplify(way, 4)
        assert isinstance(amplified, events.Dominated)
        assert isinstance(amplified.by, events.SampledWithoutReplacement)
        for eps in EPSILONS:
            assert hockey_stick(p, q, eps) <= delta(amplified, eps) * (1 + 1e-9) + 1e-12
            two = delta(events.Composed(amplified, 2), eps)
            assert hockey_stick(twice, both, eps) <= two * (1 + 1e-9) + 1e-12


def test_a_sampled_release_costs_what_a_gaussian_of_its_deviation_does() -> None:
    change = norms_of((6,))
    (way, *_) = dominated(DiscreteGaussian(6.0, 70), change)
    found = epsilon(events.Composed(FixedSize(1).amplify(way, 10), 20), DELTA)
    alike = FixedSize(1).amplify(events.GaussianRelease(1.0), 10)
    assert found == pytest.approx(epsilon(events.Composed(alike, 20), DELTA), rel=5e-3)


def test_escapes_are_scaled_by_the_chance_to_be_drawn_and_distances_are_not() -> None:
    way = events.Dominated(events.GaussianRelease(1.0), 1e-6, 1e-9)
    for cohort in (FixedSize(2), Poisson(0.2)):
        found = cohort.amplify(way, 10)
        assert isinstance(found, events.Dominated)
        assert found.escape == pytest.approx(2e-7)
        assert found.distance == 1e-9
    assert FixedSize(2, cap=3).amplify(way, 10) == way


# ---- what is set aside


def test_what_is_set_aside_is_paid_in_every_round() -> None:
    inner = GaussianMixture(1.0, np.array([3]), np.ones(1))
    loss = Aside(inner, 1e-6, 1e-8)
    for eps in (0.0, 1.0, 5.0):
        paid = 1e-6 + (1 + math.exp(eps)) * 1e-8
        assert loss.get_delta_for_epsilon(eps) == inner.get_delta_for_epsilon(eps) + paid
    event = events.Dominated(events.GaussianRelease(1.0), 1e-6 / 3, 1e-8 / 3)
    assert delta(events.Composed(event, 3), 2.0) == pytest.approx(loss.get_delta_for_epsilon(2.0))
    found = epsilon(events.Composed(event, 3), 1e-4)
    assert found == pytest.approx(loss.get_epsilon_for_delta(1e-4))
    assert loss.get_delta_for_epsilon(found) <= 1e-4
    assert loss.get_delta_for_epsilon(found * (1 - 1e-6)) > 1e-4
    assert loss.get_epsilon_for_delta(1e-6) == math.inf


def test_a_participation_mixture_sets_aside_as_often_as_one_takes_part() -> None:
    event = events.Dominated(events.GaussianRelease(1.0), 1e-6, 0.0)
    bare = events.ParticipationMixture(events.GaussianRelease(1.0), 0.5, 8, 8)
    found = delta(events.ParticipationMixture(event, 0.5, 8, 8), 2.0)
    assert found == pytest.approx(delta(bare, 2.0) + 4e-6, rel=1e-9)


# ---- in the ledger


def test_a_divergence_holds_for_the_law_that_did_not_escape() -> None:
    """P' = P without ⊤ against Q, for the pair that domination speaks of, by enumeration."""
    escape, ratio = 0.05, 1.5
    x = np.linspace(-40, 60, 40_001)
    width = math.log(x[1] - x[0])
    a, b = (stats.norm.logpdf(x, mean, ratio) + width for mean in (1, 0))
    q = math.log1p(-escape) + b  # and ⊥, where P' has nothing
    found = together._once(events.Dominated(events.GaussianRelease(ratio), escape, 1e-9))
    for order, stated in zip(ORDERS[:7], found.orders[:7], strict=True):
        true = float(logsumexp(order * a + (1 - order) * q)) / (order - 1)
        assert stated == pytest.approx(true, rel=1e-6)
    assert (found.escape, found.distance) == (escape, 1e-9)
    assert np.isinf(
        together._once(events.Dominated(events.GaussianRelease(ratio), 1.0)).orders
    ).all()


def test_a_ledger_chooses_between_proofs_by_the_event_alone() -> None:
    """The least divergence at the middle order, of those that do not set much more aside."""
    narrow = events.Dominated(events.GaussianRelease(2.0), 1e-9)
    wide = events.Dominated(events.GaussianRelease(1.9), 1e-20)
    poor = events.Dominated(events.GaussianRelease(1.0), 0.0)
    found = together._once(events.Proven((narrow, poor, wide)))
    assert np.array_equal(found.orders, together._once(wide).orders)
    assert found.escape == 1e-20


def test_runs_with_different_noise_are_composed_by_what_dominates_them() -> None:
    move = (3,)
    plans = [
        ReleasePlan((Way(noise.event(norms_of(move), norms_of(move), 1, 1), None),), ("zero-out",))
        for noise in (DiscreteGaussian(20.0, 260), Binomial(2000))
    ]
    runs = [Charged(plan, 30, 30) for plan in plans]
    found = together.epsilon(runs, DELTA)
    masses = [drawn(DiscreteGaussian(20.0, 260), 1), binomial_masses(2000)]
    losses = [composed_loss(law, move * 30, 1e-4) for law in masses]
    both = float(losses[0].compose(losses[1]).get_epsilon_for_delta(DELTA))
    assert both <= found <= 1.5 * both
    assert ReleasePlan.from_plain(plans[0].plain()) == plans[0]
