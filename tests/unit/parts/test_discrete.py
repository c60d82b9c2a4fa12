"""Discrete noise: laws and variances by their tables, every claimed (ε, δ) by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedveil import algorithms
from fedveil.accounting import events, integers
from fedveil.accounting.accountant import delta
from fedveil.accounting.events import ORDERS
from fedveil.accounting.norms import Norms
from fedveil.accounting.rounding import short
from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
    sum_roughness,
)
from fedveil.parts.noise import Noise, Share
from fedveil.parts.quantize import StochasticRound
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.wire import bits_for
from tests.unit.accounting.test_integers import (
    CHANGES,
    hockey_stick,
    laws,
    moves_within,
    name,
    true_divergence,
    true_escape,
    worst_delta,
)

EPSILONS = (0.0, 0.3, 1.0, 2.0, 4.0)
ONE = CHANGES[0]

Law = TruncatedDiscreteLaplace | Binomial | DiscreteGaussian
LAWS: list[Law] = [
    TruncatedDiscreteLaplace(0.3, 5),
    TruncatedDiscreteLaplace(1.0, 6),
    TruncatedDiscreteLaplace(0.05, 4),
    Binomial(8),
    Binomial(20),
    DiscreteGaussian(1.0, 4),
    DiscreteGaussian(2.0, 6),
    DiscreteGaussian(3.0, 5),
]


def drawn_masses(noise: Law, noise_shares: int = 1) -> np.ndarray:
    """The masses of what is really drawn, by the sampler's table; of a sum by convolution."""
    table = noise.table(ONE)
    once = np.array([count / 2**124 for count in table.counts()])
    total = once
    for _ in range(noise_shares - 1):
        total = np.convolve(total, once)
    return total


def claimed(noise: Noise, change: Norms, epsilon: float, noise_shares: int = 1, rounds: int = 1):
    event = noise.event(change, change, noise_shares, noise_shares)
    return delta(events.Composed(event, rounds), epsilon)


# ---- every claim by enumeration


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_a_message_s_delta_covers_every_neighbour(noise: Law, change: Norms) -> None:
    masses = drawn_masses(noise)
    for epsilon in EPSILONS:
        true = worst_delta(masses, moves_within(change), epsilon)
        assert true <= claimed(noise, change, epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("change", CHANGES[:5], ids=name)
@pytest.mark.parametrize("noise_shares", [2, 3])
@pytest.mark.parametrize(
    "noise", [Binomial(8), DiscreteGaussian(1.0, 4), DiscreteGaussian(0.7, 3)], ids=str
)
def test_a_sum_s_delta_covers_every_neighbour(noise: Law, noise_shares: int, change: Norms) -> None:
    masses = drawn_masses(noise, noise_shares)
    for epsilon in EPSILONS:
        true = worst_delta(masses, moves_within(change), epsilon)
        assert true <= claimed(noise, change, epsilon, noise_shares) * (1 + 1e-9)


@pytest.mark.parametrize("change", [CHANGES[0], CHANGES[1], CHANGES[2]], ids=name)
@pytest.mark.parametrize("noise", [LAWS[0], LAWS[2], LAWS[3], LAWS[5], LAWS[7]], ids=str)
def test_two_rounds_are_covered_whichever_neighbours_each_has(noise: Law, change: Norms) -> None:
    masses = drawn_masses(noise)
    moves = moves_within(change)
    both = [one + other for one in moves for other in moves]
    for epsilon in EPSILONS:
        true = worst_delta(masses, both, epsilon)
        assert true <= claimed(noise, change, epsilon, rounds=2) * (1 + 1e-9)


def test_the_noise_of_others_is_not_counted_for_a_laplace_sum() -> None:
    noise, change = TruncatedDiscreteLaplace(0.3, 5), CHANGES[1]
    assert not noise.adds_up
    assert noise.event(change, change, 9.0, 9.0) == noise.event(change, change, 1.0, 1.0)
    alone = worst_delta(drawn_masses(noise), moves_within(change), 0.5)
    assert worst_delta(drawn_masses(noise, 3), moves_within(change), 0.5) < alone


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize("noise", LAWS[:5], ids=str)
def test_renyi_divergences_and_escapes_cover_every_neighbour(noise: Law, change: Norms) -> None:
    """Order by order, for the law given that nothing escaped: before any conversion hides slack."""
    masses = drawn_masses(noise)
    release = renyi(noise.event(change, change, 1.0, 1.0))
    for move in moves_within(change):
        escape = true_escape(masses, move)
        assert escape <= release.escape * (1 + 1e-9)
        for order in integers.FEW:
            inside = true_divergence(masses, move, order)
            found = inside - order / (order - 1) * math.log1p(-escape)
            assert found <= release.divergences[ORDERS.index(order)] * (1 + 1e-9)


def renyi(event: events.Release) -> events.RenyiRelease:
    ways = event.ways if isinstance(event, events.Proven) else (event,)
    found = [way for way in ways if isinstance(way, events.RenyiRelease)]
    assert len(found) == 1
    return found[0]


def distances(event: events.Release) -> list[float]:
    """Of all proofs but the pure one, which has it in its δ."""
    assert isinstance(event, events.Proven)
    kinds = events.RenyiRelease | events.Dominated
    found = [way.distance for way in event.ways if isinstance(way, kinds)]
    assert len(found) >= len(event.ways) - 1
    return found


@pytest.mark.parametrize("noise_shares", [1, 2, 3])
@pytest.mark.parametrize("sigma", [0.6, 1.0])
@pytest.mark.parametrize("change", CHANGES[:4], ids=name)
def test_a_discrete_gaussian_s_divergences_cover_its_sums(
    sigma, noise_shares, change: Norms
) -> None:
    """Without the cut: its mass is in the distance. Nearly tight, so that 0.95·σ is noticed."""
    wide = gaussian_masses(sigma, noise_shares, reach=22)
    release = renyi(DiscreteGaussian(sigma, 22).event(change, change, noise_shares, noise_shares))
    for order in (1.5, 2.0, 3.0):
        stated = release.divergences[ORDERS.index(order)]
        found = [true_divergence(wide, move, order) for move in moves_within(change)]
        assert max(found) <= stated * (1 + 1e-9)
        roughness = (2 * order - 1) / (order - 1) * change.dim * sum_roughness(sigma, noise_shares)
        nearest = max(math.hypot(*move) for move in moves_within(change)) / change.l2
        assert max(found) >= 0.95 * (stated - roughness) * nearest**2 - roughness


def gaussian_masses(sigma: float, noise_shares: int, reach: int) -> np.ndarray:
    """Sums of discrete Gaussians on −reach..reach, cut far out."""
    y = np.arange(-reach, reach + 1)
    once = np.exp(-(y**2) / (2 * sigma**2))
    once = total = once / once.sum()
    for _ in range(noise_shares - 1):
        total = np.convolve(total, once, mode="same")
    return total


# ---- and the claims are not vacuous


@pytest.mark.parametrize("move", [1, 3])
@pytest.mark.parametrize("noise", LAWS[:3], ids=str)
def test_a_laplace_message_s_delta_is_exact_for_one_full_move(noise: Law, move: int) -> None:
    """At its own ε = αΔ₁ nothing but the escape is left, and one move escapes as stated."""
    assert isinstance(noise, TruncatedDiscreteLaplace)
    change = Norms(1, l1=move, l2=move, linf=move, grid=1.0)
    own = noise.alpha * move + 1e-3  # a step of the accountant's grid
    true = hockey_stick(*laws(drawn_masses(noise), (move,)), own)
    assert true == pytest.approx(true_escape(drawn_masses(noise), (move,)))
    assert claimed(noise, change, own) == pytest.approx(true, rel=1e-9)


@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_claims_are_within_a_small_factor_where_delta_is_large(noise: Law) -> None:
    for change in CHANGES[:3]:
        true = worst_delta(drawn_masses(noise), moves_within(change), 0.3)
        assert claimed(noise, change, 0.3) <= 6 * true


MUTANTS: list[tuple[str, Law, Law]] = [
    ("half the support", TruncatedDiscreteLaplace(0.3, 5), TruncatedDiscreteLaplace(0.3, 2)),
    ("more alpha", TruncatedDiscreteLaplace(0.3, 5), TruncatedDiscreteLaplace(0.4, 5)),
    ("fewer trials", Binomial(20), Binomial(8)),
    ("half the cut", DiscreteGaussian(2.0, 14), DiscreteGaussian(2.0, 4)),
    ("half of sigma", DiscreteGaussian(2.0, 14), DiscreteGaussian(1.0, 14)),
]


@pytest.mark.parametrize(("real", "drawn"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_less_noise_than_accounted_would_be_noticed(real: Law, drawn: Law) -> None:
    change = CHANGES[1]
    masses = drawn_masses(drawn)
    assert any(
        worst_delta(masses, moves_within(change), epsilon) > claimed(real, change, epsilon)
        for epsilon in EPSILONS
    )


def test_moves_beyond_the_centre_are_covered_too() -> None:
    """There escapes are not convex: several moves of m can be worse than fewer of 2m."""
    noise = TruncatedDiscreteLaplace(0.8, 2)
    change = Norms(2, l1=4, l2=4, linf=4, grid=1.0)
    masses = drawn_masses(noise)
    assert true_escape(masses, (2, 2)) < true_escape(masses, (4, 0))
    for epsilon in (1.0, 4.0):
        true = worst_delta(masses, moves_within(change), epsilon)
        assert true <= claimed(noise, change, epsilon) * (1 + 1e-9)


def test_all_coordinates_can_be_worse_than_one() -> None:
    noise, change = TruncatedDiscreteLaplace(0.05, 4), CHANGES[2]
    assert true_escape(drawn_masses(noise), (1, 1)) > true_escape(drawn_masses(noise), (1, 0))
    assert claimed(noise, change, 2.0) == pytest.approx(true_escape(drawn_masses(noise), (1, 1)))


@pytest.mark.parametrize("noise", [TruncatedDiscreteLaplace(0.3, 1), Binomial(2)], ids=str)
def test_noise_that_cannot_cover_a_move_is_not_private(noise: Law) -> None:
    change = CHANGES[1]  # three steps; the noise has a width of two
    event = noise.event(change, change, 1.0, 1.0)
    assert isinstance(event, events.NonPrivate)
    assert "3 steps" in event.reason
    assert true_escape(drawn_masses(noise), (3,)) == pytest.approx(1.0)


def test_the_events_count_what_the_samplers_may_be_off() -> None:
    change = Norms(1000, l1=1, l2=1, linf=1, grid=1.0)
    for noise in (
        TruncatedDiscreteLaplace(1.0, 200),
        Binomial(4000),
        DiscreteGaussian(2.0, 200),
    ):
        for stated in distances(noise.event(change, change, 1.0, 1.0)):
            assert stated >= 1000 * noise.table(change).error
    event = TruncatedDiscreteLaplace(1.0, 200).event(change, change, 1.0, 1.0)
    assert isinstance(event, events.Proven)
    pair = event.ways[0]
    assert isinstance(pair, events.ApproximateRelease)
    escape = renyi(event).escape
    assert pair.delta >= escape + (1 + math.e) * 1000 * noise.table(change).error


@pytest.mark.parametrize("sigma", [0.5, 2.0, 5.3])
@pytest.mark.parametrize("cut", [1, 3, 9])
def test_the_cut_s_mass_is_in_the_distance(sigma: float, cut: int) -> None:
    wide = gaussian_masses(sigma, 1, reach=150)
    outside = 1 - wide[150 - cut : 150 + cut + 1].sum()
    for noise_shares in (1, 3):
        release = renyi(DiscreteGaussian(sigma, cut).event(ONE, ONE, noise_shares, noise_shares))
        assert min(noise_shares * outside, 1.0) <= release.distance * (1 + 1e-9) + 1e-15
        assert release.distance <= 1.0


# ---- sums of discrete Gaussians


@pytest.mark.parametrize("sigma", [0.4, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("noise_shares", [1, 2, 3, 5])
def test_sum_roughness_bounds_what_a_sum_lacks_of_a_discrete_gaussian(sigma, noise_shares) -> None:
    reach, near = 40, slice(40 - 8, 40 + 9)
    total = gaussian_masses(sigma, noise_shares, reach)[near]
    alike = gaussian_masses(sigma * math.sqrt(noise_shares), 1, reach)[near]
    true = float(np.abs(np.log(total / alike)).max())
    bound = sum_roughness(sigma, noise_shares)
    assert true <= bound + 1e-13
    if (
        noise_shares == 2
    ):  # later noise_shares smooth what earlier ones left, which the bound leaves out
        assert bound < 2.2 * true


def test_too_rough_sums_have_no_guarantee() -> None:
    assert sum_roughness(0.2, 2) == math.inf
    assert claimed(DiscreteGaussian(0.2, 9), CHANGES[0], 3.0, noise_shares=2) == 1.0


# ---- the published QTDL

PUBLISHED = [
    (328_810, 2**6, 8),
    (328_810, 2**12, 14),
    (2_210_410, 2**9, 11),
    (2_210_410, 2**20, 22),
]


def published(dim: int, levels: int) -> Norms:
    return StochasticRound(levels).norms(within(1.0, dim))


@pytest.mark.parametrize(("dim", "levels", "bits"), PUBLISHED)
def test_published_message_sizes(dim: int, levels: int, bits: int) -> None:
    """Das et al. 2021, §6: t for Fashion-MNIST and CIFAR-10 at epsilon = 10, mu = 0.1."""
    recipe = algorithms.dp_norm_fedavg_qtdl(
        clients=10, levels=levels, calibration="das2021", claimed_epsilon=10.0, mu=0.1
    )
    assert isinstance(recipe.noise, PublishedLaplace)
    _, support = recipe.noise.amount(published(dim, levels))
    assert bits_for(-levels - support, levels + support) == bits
    wire = recipe.wire(dim, 100)
    assert wire is not None
    assert wire.bits == bits


def test_the_published_noise_is_what_the_paper_has() -> None:
    """Thm. 1 with eq. 6: α = ε/(2d + μs√d), m = ⌈−log(1 − (e^α − 1)(2 + μs))/α⌉."""
    dim, levels = 328_810, 64
    alpha, support = PublishedLaplace(epsilon=10.0, mu=0.1).amount(published(dim, levels))
    assert alpha == pytest.approx(10 / (2 * dim + 6.4 * math.sqrt(dim)))
    assert support == 9
    assert support - 1 < -math.log(1 - math.expm1(alpha) * 8.4) / alpha <= support


@pytest.mark.parametrize(("dim", "levels"), [(328_810, 64), (300, 4)])
def test_the_published_noise_states_its_true_delta_and_no_guarantee(dim, levels) -> None:
    noise, message = PublishedLaplace(epsilon=10.0, mu=0.1), published(dim, levels)
    change = message.sensitivity("replace-one")
    event = noise.event(message, change, 1.0, 1.0)
    assert isinstance(event, events.NonPrivate)
    alpha, support = noise.amount(message)
    escape = integers.escape(TruncatedDiscreteLaplace(alpha, support).masses(message), change.steps)
    assert noise.true_delta(message, change) == pytest.approx(escape)
    assert f"the true δ of a message is {short(escape, 2)} (" in event.reason
    assert f"2^-{dim}" in event.reason


def test_one_level_of_one_coordinate_already_breaks_the_claim() -> None:
    """At s = 2^6 the true δ is 0.053, by enumeration, where the paper has 2^-328810."""
    noise, message = PublishedLaplace(epsilon=10.0, mu=0.1), published(328_810, 64)
    masses = noise.masses(message)
    assert hockey_stick(*laws(masses, (1,)), 10.0) == pytest.approx(0.053, abs=0.001)
    event = noise.event(message, message, 1.0, 1.0)
    assert isinstance(event, events.NonPrivate)
    assert "(0.053 if a single coordinate changes by one level)" in event.reason


def test_the_published_noise_meets_no_budget_not_even_one_it_would_keep() -> None:
    recipe = algorithms.dp_norm_fedavg_qtdl(
        clients=1, levels=1, calibration="das2021", claimed_epsilon=0.001
    )
    kept = Budget(200.0, 0.999)
    message = recipe.message(1)
    alike = TruncatedDiscreteLaplace(*recipe.noise.amount(message))
    honest = replace(recipe, noise=alike)
    assert calibrated(honest, kept, 1, dim=1, population=10) == honest
    with pytest.raises(UserError, match="not private as claimed"):
        calibrated(recipe, kept, 1, dim=1, population=10)
    with pytest.raises(UserError, match="cannot meet a budget"):
        recipe.noise.scaled(1.0, message, message, Share(1.0, 1.0, 1e-5))


# ---- draws, variances, amounts


@pytest.mark.parametrize("noise", [LAWS[0], LAWS[4], LAWS[6]], ids=str)
def test_messages_carry_the_noise_and_the_server_adds_none(noise: Law) -> None:
    message = replace(ONE, dim=50_000)
    rng = np.random.default_rng(1)
    drawn = noise.each(message, rng)
    law = drawn_masses(noise)
    half = noise.max_magnitude(message)
    counts = np.bincount(drawn + half, minlength=len(law))
    seen = law * len(drawn) > 5
    chances = np.append(law[seen], law[~seen].sum())
    observed = np.append(counts[seen], counts[~seen].sum())
    kept = chances > 1e-9
    pvalue = stats.chisquare(
        observed[kept], chances[kept] / chances[kept].sum() * len(drawn)
    ).pvalue
    assert pvalue > 1e-3
    assert abs(int(drawn.max())) <= half
    assert noise.at == "client"
    assert noise.on_messages
    assert not noise.draw(message, 5, 5.0, rng).any()


def test_a_sum_of_messages_holds_the_noise_of_each() -> None:
    noise, message = TruncatedDiscreteLaplace(0.3, 12), replace(ONE, dim=50_000)
    rng = np.random.default_rng(1)
    total = sum(noise.each(message, rng) for _ in range(6))
    assert np.var(total) == pytest.approx(6 * noise.variance(message), rel=0.03)
    assert noise.deviation_of_message(message) == pytest.approx(np.std(total) / 6**0.5, rel=0.02)


@pytest.mark.parametrize(("alpha", "support"), [(0.3, 12), (1.0, 3), (0.01, 50), (2.0, 1)])
def test_lemma_1_s_variance_is_the_enumerated_one(alpha: float, support: int) -> None:
    noise = TruncatedDiscreteLaplace(alpha, support)
    values = np.arange(-support, support + 1)
    assert noise.masses(ONE) == pytest.approx(drawn_masses(noise))
    assert noise.variance(ONE) == pytest.approx(float(noise.masses(ONE) @ values**2))


def test_the_binomial_s_variance_is_the_enumerated_one() -> None:
    values, message = np.arange(-20, 21), within(1.0, 1)
    assert Binomial(40).variance(message) == pytest.approx(
        float(drawn_masses(Binomial(40)) @ values**2)
    )


@pytest.mark.parametrize("budget", [1e-3, 1e-8])
def test_scaled_laplace_noise_has_the_least_support_that_escapes_rarely_enough(budget) -> None:
    message = StochasticRound(2).norms(within(2.0, 3))
    change = message.sensitivity("replace-one")
    noise = TruncatedDiscreteLaplace().scaled(0.5, message, change, Share(10.0, 4.0, budget))
    assert isinstance(noise, TruncatedDiscreteLaplace)
    assert noise.alpha == pytest.approx(1 / (0.5 * change.steps.l2))
    assert renyi(noise.event(message, change, 1.0, 10.0)).escape <= budget / 2
    smaller = replace(noise, support=noise.support - 1)
    assert renyi(smaller.event(message, change, 1.0, 10.0)).escape > budget / 2


@pytest.mark.parametrize("noise", [Binomial(), DiscreteGaussian()], ids=str)
def test_scaled_sums_have_the_deviation_of_their_level(noise: Noise) -> None:
    message = StochasticRound(8).norms(within(1.0, 5))
    scaled = noise.scaled(3.0, message, message, Share(100.0, 4.0, 1e-6))
    law = drawn_masses(scaled)
    values = np.arange(len(law)) - len(law) // 2
    wanted = (3.0 * message.steps.l2) ** 2 / 100
    assert float(law @ values**2) == pytest.approx(wanted, rel=0.1)
    assert (
        noise.scaled(6.0, message, message, Share(100.0, 4.0, 1e-6)).max_magnitude(message)
        > len(law) // 2
    )


def test_the_cut_of_a_scaled_discrete_gaussian_takes_a_hundredth_of_delta() -> None:
    message = StochasticRound(8).norms(within(1.0, 5))
    noise = DiscreteGaussian().scaled(3.0, message, message, Share(100.0, 4.0, 1e-6))
    distance = renyi(noise.event(message, message, 100.0, 100.0)).distance
    assert (1 + math.exp(4.0)) * distance <= 1.01e-8
    tighter = replace(noise, support=noise.support - 1)
    more = renyi(tighter.event(message, message, 100.0, 100.0)).distance
    assert (1 + math.exp(4.0)) * more > 1e-8


WRONG: list[Callable[[], object]] = [
    lambda: TruncatedDiscreteLaplace(0.1),
    lambda: TruncatedDiscreteLaplace(-0.1, 3),
    lambda: TruncatedDiscreteLaplace(0.1, 0),
    lambda: TruncatedDiscreteLaplace(0.1, 2.5),
    lambda: Binomial(3),
    lambda: Binomial(0),
    lambda: DiscreteGaussian(2.0),
    lambda: DiscreteGaussian(math.nan, 3),
    lambda: DiscreteGaussian(2.0, 0),
    lambda: PublishedLaplace(epsilon=0.0),
    lambda: PublishedLaplace(0.1, 3),
    lambda: PublishedLaplace(epsilon=50.0).amount(published(2, 64)),
    lambda: Binomial().table(ONE),
    lambda: DiscreteGaussian().event(ONE, ONE, 1.0, 1.0),
    lambda: TruncatedDiscreteLaplace().amount(ONE),
]


@pytest.mark.parametrize("make", WRONG)
def test_wrong_amounts_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value).endswith(".")
