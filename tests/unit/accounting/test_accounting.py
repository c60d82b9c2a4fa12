"""ε(δ): against dp-accounting's own accountants, closed forms and enumeration."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from fedveil import algorithms
from fedveil.accounting import accountant, events
from fedveil.accounting.accountant import delta, epsilon, quick_epsilon, subsampled
from fedveil.errors import UserError
from fedveil.parts.noise import Gaussian
from fedveil.privacy.calibrate import TOLERANCE, Budget, calibrate
from fedveil.privacy.guarantee import guarantee


@pytest.mark.parametrize(("rate", "ratio", "rounds"), [(0.2, 2.0, 200), (0.01, 0.8, 1000)])
def test_poisson_sampled_gaussian_agrees_with_the_library_s_accountant(rate, ratio, rounds) -> None:
    event = events.Composed(events.PoissonSampled(rate, events.GaussianRelease(ratio)), rounds)
    round = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(ratio))
    library = PLDAccountant().compose(round, rounds).get_epsilon(1e-5)
    rdp = RdpAccountant().compose(round, rounds).get_epsilon(1e-5)
    assert epsilon(event, 1e-5) == pytest.approx(library, rel=2e-3)
    assert epsilon(event, 1e-5) < rdp


@pytest.mark.parametrize("held", [list, np.array])
def test_an_event_that_cannot_be_remembered_has_its_epsilon_too(held) -> None:
    """A user's noise may give its divergences as a list or an array, which have no hash."""
    curve = tuple(order / 40 for order in events.ORDERS)
    wanted = epsilon(events.Composed(events.RenyiRelease(curve), 3), 1e-5)
    assert epsilon(events.Composed(events.RenyiRelease(held(curve)), 3), 1e-5) == wanted


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rounds", [1, 30])
def test_gaussian_release_has_its_closed_form(ratio: float, rounds: int) -> None:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = √rounds/ratio (Balle and Wang 2018)."""
    mu, eps = math.sqrt(rounds) / ratio, 1.3
    phi = stats.norm.cdf
    exact = phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)
    computed = delta(events.Composed(events.GaussianRelease(ratio), rounds), eps)
    assert exact <= computed * (1 + 1e-9)
    assert computed == pytest.approx(exact, rel=1e-2, abs=1e-12)


def without_replacement_by_integration(ratio: float, rate: float, eps: float) -> float:
    """max over both directions of H_{e^ε} between (1−q)Q + qP and Q, on a fine grid."""
    z = np.linspace(-12 * ratio, 12 * ratio + 1, 400_001)
    p, q = stats.norm.pdf(z, 1, ratio), stats.norm.pdf(z, 0, ratio)
    mixed = (1 - rate) * q + rate * p
    other = (1 - rate) * p + rate * q
    a = np.trapezoid(np.maximum(mixed - math.exp(eps) * q, 0), z)
    b = np.trapezoid(np.maximum(p - math.exp(eps) * other, 0), z)
    return float(max(a, b))


def delta_of(event: events.Round | events.Spent, eps: float) -> float:
    """That of the masses, also below 0, where `delta` asks for no ε."""
    return float(accountant._loss(event).get_delta_for_epsilon(eps))


@pytest.mark.parametrize("eps", [-0.15, -0.1, -0.01, 0.01, 0.1, 0.5])
def test_one_fixed_size_round_is_its_dominating_curve(eps: float) -> None:
    """Below 0, too, where the other direction is the larger one: composition reads it all."""
    event = events.SampledWithoutReplacement(20, 100, events.GaussianRelease(1.0))
    exact = without_replacement_by_integration(1.0, 0.2, eps)
    assert exact <= delta_of(event, eps) * (1 + 1e-6)
    assert delta_of(event, eps) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("cohort", "ratio", "rounds"), [(60, 1.0, 100), (300, 2.0, 50)])
def test_fixed_size_rounds_lie_below_renyi_and_above_poisson(cohort, ratio, rounds) -> None:
    """The library's Rényi bound for sampling without replacement is looser; and one-directional

    Poisson curves are the pieces whose larger one we compose, so they lie below.
    """
    release = events.GaussianRelease(ratio)
    ours = events.Composed(events.SampledWithoutReplacement(cohort, 3000, release), rounds)
    round = dp_accounting.SampledWithoutReplacementDpEvent(
        3000, cohort, dp_accounting.GaussianDpEvent(ratio)
    )
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    renyi = accountant.compose(round, rounds).get_epsilon(1e-5)
    poisson = events.Composed(events.PoissonSampled(cohort / 3000, release), rounds)
    assert epsilon(poisson, 1e-5) <= epsilon(ours, 1e-5) <= renyi


def test_fixed_size_composition_covers_a_brute_force_case() -> None:
    """Two clients, one drawn a round, two rounds, a replaced client: ±1 against 0 in one dimension.

    The true δ is computed by integration over both outputs; ours must not be smaller.
    """
    ratio, eps = 1.0, 0.4
    z = np.linspace(-9, 10, 801)
    cell = (z[1] - z[0]) ** 2
    # The other client sends 0, the replaced one sends a or b, |a − b| = Δ = 1 = sensitivity.
    with_a = 0.5 * stats.norm.pdf(z, 1, ratio) + 0.5 * stats.norm.pdf(z, 0, ratio)
    with_b = stats.norm.pdf(z, 0, ratio)
    p, q = np.outer(with_a, with_a), np.outer(with_b, with_b)
    true = max(
        float(np.maximum(p - math.exp(eps) * q, 0).sum() * cell),
        float(np.maximum(q - math.exp(eps) * p, 0).sum() * cell),
    )
    event = events.SampledWithoutReplacement(1, 2, events.GaussianRelease(ratio))
    claimed = delta(events.Composed(event, 2), eps)
    assert true <= claimed
    assert claimed < 2.5 * true  # and the claim is not vacuous


@pytest.mark.parametrize("eps", [-0.3, 0.0, 0.4])
def test_fixed_size_rounds_of_opposite_directions_are_covered(eps: float) -> None:
    """In one round the unit's message is moved in one world, in the next one in the other.

    A replaced unit may do that: it chooses both of its messages in every round.
    """
    ratio, rate = 1.0, 0.5
    z = np.linspace(-9, 10, 801)
    cell = (z[1] - z[0]) ** 2
    rest = stats.norm.pdf(z, 0, ratio)
    moved = (1 - rate) * rest + rate * stats.norm.pdf(z, 1, ratio)
    p, q = np.outer(moved, rest), np.outer(rest, moved)
    true = float(np.maximum(p - math.exp(eps) * q, 0).sum() * cell)
    event = events.SampledWithoutReplacement(1, 2, events.GaussianRelease(ratio))
    assert true <= delta_of(events.Composed(event, 2), eps) * (1 + 1e-9)


def test_an_approximate_release_keeps_its_two_numbers() -> None:
    event = events.ApproximateRelease(1.0, 1e-6)
    assert epsilon(event, 1e-6) == pytest.approx(1.0, rel=2e-3)
    assert delta(event, 1.001) == pytest.approx(1e-6, rel=1e-3)
    assert epsilon(event, 1e-7) == math.inf


@pytest.mark.parametrize(
    ("each", "rounds", "first"),
    [
        (0.0305, 1000, math.inf), (0.0305, 10_000, math.inf), (0.0303, 30_000, math.inf),
        (1.7, 9, math.inf), (1e-4, 10**5, 1.0), (1e-5, 10**6, 1.0), (0.0305, 1000, 3.0),
    ],
)  # fmt: skip
def test_pure_releases_have_the_epsilon_of_a_binomial_sum(each, rounds, first) -> None:
    """Whatever ε₀ is, also after a Gaussian release: none of the losses are rounded."""
    ups = np.arange(rounds + 1)
    chances = stats.binom.pmf(ups, rounds, 1 / (1 + math.exp(-each)))
    losses = (2 * ups - rounds) * each
    before = None if math.isinf(first) else events.Dominated(events.GaussianRelease(first))
    spent = events.Composed(events.ApproximateRelease(each, 0.0), rounds, before)

    def true(eps: float) -> float:
        rest = eps - losses
        if before is None:
            return float(chances @ np.maximum(-np.expm1(np.minimum(rest, 0.0)), 0.0))
        lost = np.exp(rest + stats.norm.logcdf(-0.5 / first - rest * first))
        return float(chances @ (stats.norm.cdf(0.5 / first - rest * first) - lost))

    found = epsilon(spent, 1e-5)
    assert true(found * (1 + 1e-7)) <= 1e-5 <= true(found * (1 - 1e-5))
    assert delta(spent, found) == pytest.approx(1e-5, rel=1e-4)


def test_subsampling_an_approximate_release() -> None:
    event = events.PoissonSampled(0.1, events.ApproximateRelease(1.0, 1e-6))
    amplified = math.log(1 + 0.1 * (math.e - 1))
    assert epsilon(event, 1e-7) == pytest.approx(amplified, rel=5e-3)


@pytest.mark.parametrize(
    ("event", "target", "most"),
    [
        (events.ApproximateRelease(0.1, 0.6), 0.65, 0.1),
        (events.PoissonSampled(1e-3, events.ApproximateRelease(0.1, 0.6)), 1e-2, 1e-4),
        (events.SampledWithoutReplacement(1, 10**3, events.ApproximateRelease(1.0, 1.0)), 2e-3, 0),
    ],
)
def test_a_large_delta_of_one_release_has_a_finite_epsilon(event, target, most) -> None:
    assert epsilon(event, target) <= most * (1 + 1e-3)
    assert epsilon(events.ApproximateRelease(0.1, 1.0), 0.99) == math.inf


WITH_DELTA = [
    events.GaussianRelease(1.0),
    events.PoissonSampled(0.1, events.GaussianRelease(1.0)),
    events.RenyiRelease(tuple(order / 40 for order in events.ORDERS)),
    events.ApproximateRelease(1.0, 1e-9),
]


@pytest.mark.parametrize("event", WITH_DELTA, ids=lambda event: type(event).__name__)
def test_delta_is_a_probability_at_every_epsilon(event: events.Round) -> None:
    for spent in (events.Composed(event, 3), events.ParticipationMixture(event, 0.5, 3, 3)):
        found = [delta(spent, eps) for eps in (0.0, 1.0, 1e3, 1e9, 1e300, math.inf)]
        assert found == sorted(found, reverse=True)
        assert 0 <= found[-1] <= 4e-9
        for eps in (-1.0, math.nan, "1"):
            with pytest.raises(UserError, match="epsilon is"):
                delta(spent, eps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "ratio", "rounds"), [(0.2, 2.0, 50), (0.01, 0.8, 300)])
def test_a_quick_epsilon_is_rough_and_from_above(rate, ratio, rounds) -> None:
    release = events.GaussianRelease(ratio)
    sampled = events.Composed(events.PoissonSampled(rate, release), rounds)
    quick = quick_epsilon(sampled, 1e-5)
    assert quick is not None
    assert epsilon(sampled, 1e-5) <= quick <= 1.4 * epsilon(sampled, 1e-5)
    alone = events.Composed(release, rounds)
    assert quick_epsilon(alone, 1e-5) == epsilon(alone, 1e-5)  # a closed form
    assert quick_epsilon(events.Composed(events.ApproximateRelease(1.0, 0.0), 3), 1e-5) is None


def test_a_quick_epsilon_looks_through_proofs_and_what_dominates() -> None:
    release = events.GaussianRelease(2.0)
    drawn = events.SampledWithoutReplacement(20, 100, release)
    poisson = quick_epsilon(events.Composed(events.PoissonSampled(0.2, release), 50), 1e-5)
    assert quick_epsilon(events.Composed(drawn, 50), 1e-5) == poisson
    proven = events.Proven((events.ApproximateRelease(1.0, 0.0), events.Dominated(drawn, 1e-20)))
    assert quick_epsilon(events.Composed(proven, 50), 1e-5) == poisson
    nothing = events.Proven((events.ApproximateRelease(1.0, 0.0),))
    assert quick_epsilon(events.Composed(nothing, 50), 1e-5) is None


def test_no_noise_no_guarantee() -> None:
    assert epsilon(events.NonPrivate("why"), 1e-5) == math.inf
    assert delta(events.Composed(events.NonPrivate("why"), 3), 10.0) == 1.0


def test_no_rounds_cost_nothing() -> None:
    assert (
        epsilon(events.Composed(events.PoissonSampled(0.1, events.GaussianRelease(1)), 0), 1e-5)
        == 0
    )


@pytest.mark.parametrize("wrong", [0.0, -1e-5, 1.0, 2.0, math.nan])
def test_delta_must_be_a_probability(wrong: float) -> None:
    with pytest.raises(UserError, match="delta"):
        epsilon(events.GaussianRelease(1.0), wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_epsilon_must_be_positive(wrong: float) -> None:
    with pytest.raises(UserError, match="epsilon"):
        Budget(wrong, 1e-5)


SETTINGS = [
    (algorithms.dp_fedavg(clip=31.25, rate=0.2), 5.0, 200),
    (algorithms.dp_norm_fedavg(scale=1.0, clients=600), 1.5, 100),
    (algorithms.alpha_normec(private=True), 8.0, 50),
    (algorithms.dp_sgd(clip=1.0, rate=0.05), 0.3, 400),
    (algorithms.dp_norm_fedavg_qtdl(clients=30, levels=4), 4.0, 3),
]


@pytest.mark.parametrize(("recipe", "eps", "rounds"), SETTINGS, ids=lambda v: str(v)[:24])
def test_calibration_meets_the_budget_from_below(recipe, eps: float, rounds: int) -> None:
    calibrated = calibrate(recipe, Budget(eps, 1e-5), rounds, dim=50, population=3000)
    spent = guarantee(calibrated, 50, 3000, rounds, 1e-5)
    assert spent.epsilon <= eps
    assert spent.epsilon == pytest.approx(eps, rel=0.02)


def test_calibration_is_to_half_a_percent_of_the_noise() -> None:
    recipe = algorithms.dp_fedavg(clip=1.0, rate=0.2)
    calibrated = calibrate(recipe, Budget(2.0, 1e-5), 50, dim=3, population=100)
    assert isinstance(calibrated.noise, Gaussian)
    less = algorithms.dp_fedavg(
        clip=1.0, rate=0.2, noise_multiplier=calibrated.noise.multiplier / (1 + TOLERANCE)
    )
    assert guarantee(less, 3, 100, 50, 1e-5).epsilon > 2.0


@pytest.mark.parametrize("ratio", [1e-200, 1e-3, 0.01])
def test_hardly_any_noise_is_no_guarantee_and_no_long_wait(ratio: float) -> None:
    release = events.GaussianRelease(ratio)
    for event in (release, events.PoissonSampled(0.1, release)):
        assert epsilon(events.Composed(event, 10), 1e-5) == math.inf


def test_a_budget_that_protects_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="at most 200"):
        Budget(1000.0, 1e-5)
    with pytest.raises(UserError, match="1e-12"):
        Budget(1.0, 1e-300)


@pytest.mark.parametrize(("eps", "rounds"), [(200.0, 1), (150.0, 50), (0.01, 1000)])
def test_extreme_budgets_are_met(eps: float, rounds: int) -> None:
    for recipe in (algorithms.dp_fedavg(rate=0.1), algorithms.alpha_normec(private=True)):
        calibrated = calibrate(recipe, Budget(eps, 1e-6), rounds, dim=3, population=100)
        assert 0.9 * eps < guarantee(calibrated, 3, 100, rounds, 1e-6).epsilon <= eps


@pytest.mark.parametrize(
    ("count", "mu", "delta"),
    [(10**6, 4.0, 1e-9), (10**5, 0.5, 1e-10), (10**4, 1.0, 1e-12), (1000, 4.0, 1e-10)],
)
def test_long_compositions_are_not_below_the_truth_for_small_deltas(
    count: int, mu: float, delta: float
) -> None:
    """A rate of 1 has a closed form; the convolution's rounding must not come out below it."""
    ratio = math.sqrt(count) / mu
    long = epsilon(
        events.Composed(events.PoissonSampled(1.0, events.GaussianRelease(ratio)), count), delta
    )
    true = epsilon(events.ParticipationMixture(events.GaussianRelease(1 / mu), 1.0, 1, 1), delta)
    assert long >= true * (1 - 1e-6)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_little_signal_in_each_of_many_rounds_adds_up_to_a_gaussian(rate: float) -> None:
    rounds = events.Composed(events.PoissonSampled(rate, events.GaussianRelease(1e6)), 10**8)
    limit = epsilon(events.GaussianRelease(1e2 / rate), 1e-5)
    assert limit * (1 - 1e-6) <= epsilon(rounds, 1e-5) <= 1.01 * limit


@pytest.mark.parametrize(("count", "mu", "delta"), [(10**6, 4.0, 1e-9), (10**4, 1.0, 1e-10)])
def test_so_are_long_compositions_of_fixed_size_cohorts(count: int, mu: float, delta) -> None:
    """All of ten drawn is no sampling, and has a closed form."""
    drawn = events.SampledWithoutReplacement(10, 10, events.GaussianRelease(math.sqrt(count) / mu))
    true = epsilon(events.GaussianRelease(1 / mu), delta)
    assert true * (1 - 1e-6) <= epsilon(events.Composed(drawn, count), delta) <= 1.01 * true


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta"),
    [
        (1e-5, 0.95, 2 * 10**7, 1e-5), (1e-5, 1.0, 2 * 10**7, 1e-5), (3e-5, 1.0, 2 * 10**7, 1e-7),
        (1e-4, 1.0, 10**8, 1e-5),
    ],
)  # fmt: skip
def test_long_runs_at_tiny_rates_have_the_epsilon_of_the_limit(rate, ratio, rounds, delta) -> None:
    """A Gaussian with μ = q·√(K·(e^{1/ρ²} − 1)); a fixed size is at most 40 % above it."""
    mu = rate * math.sqrt(rounds * math.expm1(ratio**-2))
    limit, release = epsilon(events.GaussianRelease(1 / mu), delta), events.GaussianRelease(ratio)
    poisson = epsilon(events.Composed(events.PoissonSampled(rate, release), rounds), delta)
    drawn = events.SampledWithoutReplacement(round(rate * 10**9), 10**9, release)
    fixed = events.Composed(drawn, rounds)
    assert limit <= poisson <= 1.01 * limit
    assert poisson <= epsilon(fixed, delta) <= 1.4 * limit
    assert 0 <= accountant.delta(fixed, 0.0) <= 1


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta", "true"),
    [(0.5, 1000.0, 10**6, 1e-12, 3.449), (0.0102, 4.26, 68_720, 1.1e-12, 4.457)],
)
def test_a_delta_that_rounding_would_swallow_has_a_tight_epsilon(
    rate, ratio, rounds, delta, true
) -> None:
    """That of a Gaussian with μ = q·√K/ratio, and that of a finer grid in extended precision."""
    release = events.GaussianRelease(ratio)
    event = events.Composed(events.PoissonSampled(rate, release), rounds)
    assert true <= epsilon(event, delta) <= 1.01 * true


def test_runs_that_are_too_long_for_a_grid_have_the_epsilon_of_moments() -> None:
    """With a memory of one round; the moments of a Gaussian with μ = q·√K/ratio."""
    rounds = events.Composed(events.PoissonSampled(0.5, events.GaussianRelease(1e6)), 10**12)
    true = epsilon(events.GaussianRelease(2.0), 1e-5)
    assert true <= epsilon(rounds, 1e-5) <= 1.2 * true


def test_a_larger_delta_never_has_a_larger_epsilon_where_the_bounds_meet() -> None:
    event = events.Composed(events.PoissonSampled(0.01, events.GaussianRelease(4.0)), 50_000)
    at = np.geomspace(1e-12, 1e-9, 13)  # rounding takes a tenth of δ at 1e-10
    found = [epsilon(event, float(one)) for one in at]
    assert found == sorted(found, reverse=True)
    assert all(delta(event, e) <= d * (1 + 1e-6) for e, d in zip(found, at, strict=True))


WEAK = [
    (events.PoissonSampled(0.5, events.GaussianRelease(0.3)), 10**5),
    (events.PoissonSampled(0.5, events.GaussianRelease(0.02)), 10**9),
    (events.PoissonSampled(0.01, events.GaussianRelease(0.1)), 10**5),
    (events.SampledWithoutReplacement(50, 100, events.GaussianRelease(0.3)), 10**6),
    (events.ApproximateRelease(1.0, 1e-9), 10**6),
    (events.PoissonSampled(0.5, events.ApproximateRelease(5.0, 0.0)), 10**9),
    (events.ApproximateRelease(1e300, 0.0), 1),
]


@pytest.mark.parametrize(("event", "rounds"), WEAK, ids=str)
def test_weakly_noised_rounds_are_no_guarantee_before_any_grid(event, rounds, monkeypatch) -> None:
    """They took gigabytes: a run of ε = 225,473 five of them."""
    monkeypatch.setattr(accountant, "_one_round", lambda *given: pytest.fail("made a grid"))
    assert epsilon(events.Composed(event, rounds), 1e-5) == math.inf
    assert delta(events.Composed(event, rounds), 10.0) == 1.0


@pytest.mark.parametrize(
    "release", [events.GaussianRelease(1e-3), events.ApproximateRelease(1, 0.1)]
)
def test_rounds_that_sample_nobody_cost_nothing(release) -> None:
    never = events.Composed(events.PoissonSampled(0.0, release), 1000)
    assert epsilon(never, 1e-12) == 0
    first = events.Dominated(events.GaussianRelease(2.0))
    after = events.Composed(events.PoissonSampled(0.0, release), 1000, first)
    assert epsilon(after, 1e-5) == pytest.approx(epsilon(first.by, 1e-5), rel=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rounds", [1, 1000])
@pytest.mark.parametrize("ratio", [1.0, 1e9, 1e200, 1.7e308])
@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-17, 0.5, 1.0])
def test_the_least_rates_and_the_largest_noise_have_their_epsilon(rate, ratio, rounds) -> None:
    """More noise than 1e6 sensitivities counts as that much, a rate below 1e-100 as 1e-100."""
    release = events.GaussianRelease(ratio)
    found = epsilon(events.Composed(events.PoissonSampled(rate, release), rounds), 1e-5)
    assert 0 <= found < (1e-3 if rate < 0.1 or ratio > 1 else 2000)
    assert epsilon(events.Composed(release, rounds), 1e-5) < (0.01 if ratio > 1 else 2000)


def test_a_huge_pure_epsilon_is_never_reduced_below_what_sampling_leaves_of_it() -> None:
    """log(1 − q + q·e^1000) is 1000 + log q. It was computed with 700 in the place of 1000."""
    for rate in (0.5, 1e-6):
        exact = 1000 + math.log(rate)
        assert subsampled(events.ApproximateRelease(1000.0, 0.0), rate).epsilon >= exact
