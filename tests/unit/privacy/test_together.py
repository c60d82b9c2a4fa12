from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.parts.bound import AdaptiveClip, ProbedClip
from fedveil.parts.cohort import Everyone
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.privacy.composition import (
    ORDERS,
    Charged,
    ReleasePlan,
    Way,
    _once,
    adjacency,
    covered,
    epsilon,
    plan,
    reason,
)
from fedveil.recipe import Recipe, View

DIM, CLIENTS, DELTA = 30, 100, 1e-5
VIEWS: tuple[View, ...] = ("models", "sum", "messages")
RECIPES: dict[str, Recipe] = {
    "poisson": algorithms.dp_fedavg(noise_multiplier=2.0, rate=0.2),
    "poisson, capped": algorithms.dp_fedavg(noise_multiplier=2.0, rate=0.2, cap=3),
    "poisson, clients' noise": algorithms.dp_fedavg(
        noise_multiplier=9.0, rate=0.2, noise_at="client"
    ),
    "fixed size": algorithms.dp_fedavg(noise_multiplier=2.0, clients=20),
    "fixed size, capped": algorithms.dp_fedavg(noise_multiplier=2.0, clients=20, cap=3),
    "everyone": algorithms.fed_alpha_normec(noise_multiplier=5.0),
    "adaptive": algorithms.dp_fedavg_adaptive(noise_multiplier=2.0, rate=0.2),
    "adaptive, fixed size": algorithms.dp_fedavg_adaptive(noise_multiplier=2.0, clients=20),
    "binomial": algorithms.dp_norm_fedavg_binomial(clients=20, trials=4000),
    "secure aggregation": algorithms.dp_norm_fedavg_secagg(clients=20, sigma=40.0, support=400),
    "truncated Laplace": calibrated(
        algorithms.dp_norm_fedavg_qtdl(clients=20), Budget(8.0, DELTA), 10, DIM, CLIENTS
    ),
    "examples": algorithms.dp_sgd(rate=0.1, noise_multiplier=1.5),
}


def of(name: str, view: View = "models") -> ReleasePlan:
    return plan(RECIPES[name], DIM, CLIENTS, view)


def gaussian(ratio: float) -> ReleasePlan:
    return ReleasePlan((Way(events.GaussianRelease(ratio), None),), ("zero-out",))


# Plans


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_spends_what_its_recipe_does(name: str, view: View) -> None:
    for rounds in (1, 3, 4, 50):
        assert of(name, view).spent(rounds) == RECIPES[name].spent(DIM, CLIENTS, rounds, view)


@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_comes_back_from_json(name: str) -> None:
    plans = [of(name, view) for view in VIEWS]
    text = json.dumps([one.plain() for one in plans], allow_nan=False)
    assert [ReleasePlan.from_plain(plain) for plain in json.loads(text)] == plans


def test_lost_rounds_come_on_top_of_a_cap() -> None:
    known = events.Composed(of("poisson, capped").ways[1].event, 5)
    spent = of("poisson, capped").redrawn(2).spent(50)
    assert isinstance(spent, events.Either)
    assert spent.ways[1] == known
    assert of("poisson").redrawn(2) == of("poisson")


def test_a_threshold_from_the_data_has_no_guarantee() -> None:
    recipe = replace(RECIPES["poisson"], bound=ProbedClip(norm=1.0))
    assert epsilon([Charged(plan(recipe, DIM, CLIENTS, "models"), 5, 1)], DELTA) == math.inf


# One kind


@pytest.mark.parametrize("name", ["poisson", "poisson, capped", "fixed size", "binomial"])
def test_one_run_costs_what_its_statement_says(name: str) -> None:
    for rounds in (1, 7, 10):
        alone = accounting.epsilon(of(name).spent(rounds), DELTA)
        assert epsilon([Charged(of(name), 10, rounds)], DELTA, target=20.0) == alone


def test_streams_of_one_kind_add_up_to_one_run_within_the_first_one_s_plan() -> None:
    parts = [Charged(of("poisson"), 10, 4), Charged(of("poisson"), 10, 6)]
    assert epsilon(parts, DELTA) == epsilon([Charged(of("poisson"), 10, 10)], DELTA)


def test_beyond_the_first_one_s_plan_a_half_of_delta_counts() -> None:
    parts = [Charged(of("poisson"), 10, 10), Charged(of("poisson"), 10, 1)]
    spent = of("poisson").spent(11)
    assert epsilon(parts, DELTA) == accounting.epsilon(spent, DELTA / 2)
    assert epsilon(parts, DELTA) > accounting.epsilon(spent, DELTA)


def test_a_first_plan_that_needs_more_than_half_of_delta_leaves_less_for_others() -> None:
    """Its mass counts whether or not it is played to the end: others might be chosen then."""
    first, other = Charged(gaussian(3.0), 10, 2), Charged(gaussian(9.0), 10, 1)
    whole = accounting.epsilon(first.plan.spent(10), DELTA)
    roomy, tight = (epsilon([first, other], DELTA, whole * share) for share in (1.05, 1.0001))
    assert roomy < tight
    assert epsilon([first, other], DELTA, whole * 0.9) == math.inf


def test_nothing_costs_nothing() -> None:
    assert epsilon([], DELTA) == 0.0
    assert epsilon([Charged(of("poisson"), 10, 0)], DELTA) == 0.0
    nothing_first = [Charged(of("fixed size"), 10, 0), Charged(of("poisson"), 10, 3)]
    assert epsilon(nothing_first, DELTA) == epsilon([Charged(of("poisson"), 10, 3)], DELTA)


# Several kinds


@pytest.mark.parametrize(("one", "other"), [(1.5, 3.0), (4.0, 30.0), (10.0, 11.0)])
def test_gaussians_of_two_kinds_cost_at_least_what_they_cost_together(
    one: float, other: float
) -> None:
    both = epsilon([Charged(gaussian(one), 5, 5), Charged(gaussian(other), 5, 5)], DELTA)
    ratio = (5 / one**2 + 5 / other**2) ** -0.5
    exact = accounting.epsilon(events.GaussianRelease(ratio), DELTA)
    assert exact < both < 1.35 * exact


def test_sampled_kinds_cost_at_least_their_composition_and_less_than_their_sum() -> None:
    """Five runs of two kinds; what they cost alone is what one would add up without a ledger."""
    accountant, alone, runs = PLDAccountant(value_discretization_interval=1e-3), 0.0, []
    for multiplier in (1.5, 1.7, 1.5, 1.7, 1.5):
        recipe = algorithms.dp_fedavg(noise_multiplier=multiplier, rate=0.1)
        runs.append(Charged(plan(recipe, DIM, CLIENTS, "models"), 50, 50))
        alone += epsilon(runs[-1:], DELTA)
        event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(multiplier))
        accountant.compose(event, 50)
    together = epsilon(runs, DELTA)
    assert accountant.get_epsilon(DELTA) < together < 0.8 * alone
    assert together <= epsilon(runs, DELTA, target=together) < 1.1 * together


def by_the_rule(ratios: list[float], rounds: int, delta: float, target: float) -> float:
    """ε of so many rounds of each Gaussian kind: docs/privacy.md, "The rule", case 2.

    For a first plan that needs less than half of δ, which the other half is left for.
    """
    left = delta / 2
    last = next(place for place, a in enumerate(ORDERS) if a >= 1 + 2 * math.log(1 / left) / target)
    orders = ORDERS[: last + 1]
    cost = sum(rounds / (2 * ratio**2) for ratio in ratios)  # D_α = α·cost
    share = 0.75 * left / len(orders)
    return min(
        a * cost + math.log1p(-1 / a) - math.log(share * a) / (a - 1) for a in orders
    )  # Canonne et al. 2020, Prop. 12


@pytest.mark.parametrize(
    ("ratios", "rounds", "target"),
    [([4.0, 9.0], 3, 8.0), ([4.0, 9.0], 3, 2.0), ([20.0, 30.0], 2, 1.0), ([2.0, 2.1], 2, 12.0)],
)
def test_several_kinds_are_counted_by_the_rule(
    ratios: list[float], rounds: int, target: float
) -> None:
    """Orders that the target has fixed beforehand share ¾ of what is left of δ."""
    runs = [Charged(gaussian(ratio), rounds, rounds) for ratio in ratios]
    found = epsilon(runs, DELTA, target)
    assert found == pytest.approx(by_the_rule(ratios, rounds, DELTA, target), rel=1e-9)


def test_orders_are_fixed_by_the_target_and_not_by_what_was_spent() -> None:
    """Little was spent under a large target: the orders that would be best now were not chosen."""
    runs = [Charged(gaussian(ratio), 2, 2) for ratio in (20.0, 30.0)]
    assert epsilon(runs, DELTA, 12.0) > 1.5 * epsilon(runs, DELTA)


@pytest.mark.parametrize(("escape", "distance"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_what_releases_set_aside_is_held_to_a_quarter_of_what_is_left(
    escape: float, distance: float
) -> None:
    """Σ escape + (1 + e^ε)·Σ distance ≤ ¼(δ − h), at the ε that is promised, not the one spent."""
    target = 3.0
    first = Charged(gaussian(20.0), 2, 2)

    def spent(share: float) -> float:
        aside = share * DELTA / 2 / 4 / 2  # of δ − h = δ/2 a quarter, over two rounds
        exact = tuple(0.001 * order for order in events.ORDERS)
        away = distance * aside / (1 + math.exp(target))
        release = events.RenyiRelease(exact, escape * aside, away)
        second = ReleasePlan((Way(release, None),), ("zero-out",))
        return epsilon([first, Charged(second, 2, 2)], DELTA, target)

    assert spent(0.999) < target
    assert spent(1.001) == math.inf


SAMPLED = events.PoissonSampled(0.2, events.GaussianRelease(2.0))
CAPPED = ReleasePlan((Way(SAMPLED, None), Way(events.GaussianRelease(2.0), 3)), ("zero-out",))


def test_two_capped_streams_have_two_caps() -> None:
    """A unit that takes part three times in each of two equal runs is in six releases."""
    run = Charged(CAPPED, 200, 200)
    release = events.GaussianRelease(2.0)
    once, twice = (accounting.epsilon(events.Composed(release, n), DELTA) for n in (3, 6))
    assert epsilon([run], DELTA) == once
    assert epsilon([run, run], DELTA) > twice


def test_the_proof_of_a_capped_run_is_chosen_by_its_plan() -> None:
    """Not by the rounds that were played when somebody asked."""
    beside = Charged(gaussian(50.0), 1, 1)
    for planned, way in zip((2, 400), CAPPED.ways, strict=True):
        for rounds in (1, 300):
            alone = ReleasePlan((way,), ("zero-out",))
            both = [Charged(CAPPED, planned, rounds), beside]
            only = [Charged(alone, planned, rounds), beside]
            assert epsilon(both, DELTA) == epsilon(only, DELTA)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_stand_beside_another(name: str) -> None:
    """Also those whose noise is discrete, truncated, capped or sampled without replacement."""
    beside = Charged(gaussian(50.0), 1, 1)
    mixed = epsilon([Charged(of(name), 3, 3), beside], 1e-3)
    alone = epsilon([Charged(of(name), 3, 3)], 1e-3)
    if name == "adaptive":
        assert mixed == math.inf  # its neighbours are others
    else:
        assert alone < mixed < 4 * alone + 2


def test_a_non_private_run_spoils_everything_after_it() -> None:
    plain = Charged(ReleasePlan((Way(events.NonPrivate("none"), None),), ("zero-out",)), 1, 1)
    assert epsilon([plain], DELTA) == math.inf
    assert epsilon([Charged(gaussian(9.0), 1, 1), plain], DELTA) == math.inf


@pytest.mark.parametrize(("e", "order"), [(0.01, 2.0), (1.0, 3.0), (1.0, 256.0), (30.0, 7.0)])
def test_the_divergence_of_a_pure_release_is_randomized_response_s(e: float, order: float) -> None:
    import mpmath as mp

    mp.mp.dps = 60
    p = mp.e**e / (1 + mp.e**e)
    q = 1 - p
    exact = mp.log(p**order * q ** (1 - order) + q**order * p ** (1 - order)) / (order - 1)
    found = _once(events.ApproximateRelease(e, 1e-6))
    assert found.orders[ORDERS.index(order)] == pytest.approx(float(exact), rel=1e-9)
    assert found.orders[ORDERS.index(order)] >= float(exact) * (1 - 1e-15)
    assert found.escape == 1e-6


# Neighbours


@pytest.mark.parametrize(
    ("name", "view", "neighbours"),
    [
        ("poisson", "models", ("add-remove", "zero-out")),
        ("poisson, clients' noise", "models", ("zero-out",)),
        ("poisson, clients' noise", "messages", ("zero-out",)),
        ("fixed size", "models", ("replace-one", "zero-out")),
        ("everyone", "models", ("zero-out", "add-remove")),
        ("adaptive", "models", ("add-remove",)),
        ("adaptive, fixed size", "models", ("replace-one", "zero-out")),
        ("secure aggregation", "sum", ("replace-one", "zero-out")),
    ],
)
def test_the_neighbours_of_an_event(name: str, view: View, neighbours: tuple[str, ...]) -> None:
    assert covered(RECIPES[name], view) == neighbours


@pytest.mark.parametrize("name", ["adaptive, fixed size", "fixed size"])
def test_replacing_costs_no_less_than_blanking_out(name: str) -> None:
    """So an event for replaced units also holds for blanked-out ones."""
    recipe = RECIPES[name]
    replaced = recipe.release(DIM, CLIENTS)
    message: Norms = recipe.message(DIM)
    blank = recipe.noise.event(message, message.sensitivity("zero-out"), 20.0, 20.0)
    if isinstance(recipe.bound, AdaptiveClip):
        blank = recipe.bound.joined(blank, "zero-out", 20.0)
    assert isinstance(replaced, events.GaussianRelease)
    assert isinstance(blank, events.GaussianRelease)
    assert replaced.ratio < blank.ratio


def test_under_an_adaptive_clip_blanking_out_costs_more_than_removing() -> None:
    """That is why its events do not hold for blanked-out units."""
    bound = AdaptiveClip(start=1.0)
    removed, blanked = (
        bound.joined(events.GaussianRelease(1.0), kind, 20.0) for kind in ("add-remove", "zero-out")
    )
    assert blanked.ratio < removed.ratio


def test_neighbours_that_do_not_fit_have_no_epsilon() -> None:
    adaptive, fixed = (Charged(of(name), 5, 1) for name in ("adaptive", "fixed size"))
    other = Charged(of("poisson"), 5, 1)
    assert adjacency([adaptive, fixed]) is None
    assert epsilon([fixed, adaptive], DELTA) == epsilon([adaptive, fixed], DELTA) == math.inf
    assert reason([fixed, adaptive]) == "the runs on these data have no adjacency in common"
    assert epsilon([adaptive, other], DELTA) < math.inf
    assert adjacency([adaptive, other]) == "add-remove"
    assert adjacency([other, fixed]) == "zero-out"


def test_the_adjacency_of_an_account_does_not_depend_on_the_order_of_its_runs() -> None:
    """An adaptive clip holds for removed units alone, and so for some the first run holds for."""
    names = ("poisson", "adaptive", "everyone")
    for some in (names, names[:2]):
        for runs in itertools.permutations([Charged(of(name), 5, 5) for name in some]):
            assert adjacency(runs) == "add-remove"
            assert epsilon(runs, DELTA) == pytest.approx(
                epsilon([Charged(of(name), 5, 5) for name in some], DELTA)
            )


def test_under_a_budget_the_first_run_fixes_the_adjacency() -> None:
    """Else the analyst would choose it after the first releases."""
    adaptive, other = (Charged(of(name), 5, 1) for name in ("adaptive", "poisson"))
    assert adjacency([other, adaptive], budgeted=True) is None
    assert epsilon([other, adaptive], DELTA, 50.0) == math.inf
    assert "for zero-out neighbours" in reason([other, adaptive], budgeted=True)
    assert adjacency([adaptive, other], budgeted=True) == "add-remove"
    assert epsilon([adaptive, other], DELTA, 50.0) < math.inf


# However the next run is chosen


def most_an_analyst_gains(
    one: float, other: float, target: float, allowed: Callable[[int, int], bool]
) -> float:
    """sup over adaptive choices between randomized responses of δ(target), by dynamic programming.

    δ(ε) = E_P[(1 − e^{ε − L})₊], L the privacy loss when the analyst stops.
    """

    @functools.cache
    def value(i: int, j: int, m: int, n: int) -> float:
        best = max(0.0, -math.expm1(target - one * m - other * n))
        for a, b, e in ((1, 0, one), (0, 1, other)):
            if allowed(i + a, j + b):
                p = 1 / (1 + math.exp(-e))
                up, down = value(i + a, j + b, m + a, n + b), value(i + a, j + b, m - a, n - b)
                best = max(best, p * up + (1 - p) * down)
        return best

    return value(0, 0, 0, 0)


def composed(one: float, other: float, i: int, j: int, target: float) -> float:
    """The exact δ of i and j randomized responses, chosen beforehand."""
    from scipy.stats import binom

    pairs = ((x, y) for x in range(i + 1) for y in range(j + 1))
    p, q = (1 / (1 + math.exp(-e)) for e in (one, other))
    return float(
        sum(
            binom.pmf(x, i, p)
            * binom.pmf(y, j, q)
            * max(0.0, -math.expm1(target - one * (2 * x - i) - other * (2 * y - j)))
            for x, y in pairs
        )
    )


def test_composition_of_what_was_chosen_is_no_limit_for_one_who_chooses() -> None:
    """Every path composes to δ ≤ 0.01, and yet an analyst who looks gets 0.014."""

    @functools.cache
    def allowed(i: int, j: int) -> bool:
        return composed(0.5, 0.2, i, j, 1.5) <= 0.01

    assert most_an_analyst_gains(0.5, 0.2, 1.5, allowed) > 1.4 * 0.01


@pytest.mark.parametrize(
    ("one", "other", "planned", "target", "delta"),
    [(0.2, 0.5, 6, 1.5, 0.01), (0.4, 0.3, 4, 1.5, 0.02), (0.15, 0.7, 20, 1.5, 0.02)],
)
def test_no_analyst_gets_more_out_of_a_budget_than_it_allows(
    one: float, other: float, planned: int, target: float, delta: float
) -> None:
    """The first kind is `one`; the analyst chooses by all that was released so far."""
    kinds = [
        ReleasePlan((Way(events.ApproximateRelease(e, 0.0), None),), ("zero-out",))
        for e in (one, other)
    ]

    @functools.cache
    def allowed(i: int, j: int) -> bool:
        if i == 0 or i + j > 60:
            return False
        runs = [Charged(kind, planned, count) for kind, count in zip(kinds, (i, j), strict=True)]
        return epsilon(runs, delta, target) <= target

    assert allowed(1, 1)  # both kinds can be had
    assert 0.1 * delta < most_an_analyst_gains(one, other, target, allowed) <= delta


def law_of(event: events.Round) -> tuple[tuple[float, float], tuple[float, float]]:
    """A randomized response, sampled or not: its two outcomes' chances with and without the unit.

    Sampled, an outcome is the response with the unit with probability q, and else without it.
    """
    rate = 1.0
    if isinstance(event, events.PoissonSampled):
        rate, event = event.rate, event.event
    assert isinstance(event, events.ApproximateRelease)
    p = 1 / (1 + math.exp(-event.epsilon))
    return (rate * p + (1 - rate) * (1 - p), rate * (1 - p) + (1 - rate) * p), (1 - p, p)


def most_gained(
    kinds: tuple[events.Round, events.Round],
    target: float,
    allowed: Callable[[int, int], bool],
    reverse: bool = False,
) -> float:
    """As `most_an_analyst_gains`, for releases of two outcomes whose loss is not symmetric.

    A state is how often each kind was released, and how often with its first outcome.
    """
    laws = [law_of(kind) for kind in kinds]
    if reverse:
        laws = [(q, p) for p, q in laws]
    losses = [[math.log(a / b) for a, b in zip(p, q, strict=True)] for p, q in laws]

    @functools.cache
    def value(i: int, j: int, m: int, n: int) -> float:
        loss = sum(
            ups * up + (count - ups) * down
            for ups, count, (up, down) in zip((m, n), (i, j), losses, strict=True)
        )
        best = max(0.0, -math.expm1(target - loss))
        for a, b, (p, _) in ((1, 0, laws[0]), (0, 1, laws[1])):
            if allowed(i + a, j + b):
                up, down = value(i + a, j + b, m + a, n + b), value(i + a, j + b, m, n)
                best = max(best, p[0] * up + p[1] * down)
        return best

    return value(0, 0, 0, 0)


def response(epsilon: float, rate: float | None = None) -> events.Round:
    plain = events.ApproximateRelease(epsilon, 0.0)
    return plain if rate is None else events.PoissonSampled(rate, plain)


KINDS = [
    (response(0.4, rate=0.5), response(0.5), 6),
    (response(0.2), response(0.6, rate=0.8), 6),
    (response(0.2, rate=0.9), response(0.6, rate=0.8), 6),
]


@pytest.mark.parametrize(("one", "other", "planned"), KINDS)
@pytest.mark.parametrize("reverse", [False, True], ids=["removed", "added"])
def test_no_analyst_gets_more_out_of_sampled_releases_either(
    one: events.Round, other: events.Round, planned: int, reverse: bool
) -> None:
    """Sampled randomized responses: the unit's coins are hidden and drawn anew in every round."""
    target, delta = 1.5, 0.02
    kinds = [ReleasePlan((Way(event, None),), ("zero-out",)) for event in (one, other)]

    @functools.cache
    def allowed(i: int, j: int) -> bool:
        if i == 0 or i + j > 40:
            return False
        runs = [Charged(kind, planned, count) for kind, count in zip(kinds, (i, j), strict=True)]
        return epsilon(runs, delta, target) <= target

    assert allowed(1, 1)
    assert 0.1 * delta < most_gained((one, other), target, allowed, reverse) <= delta


def test_the_programming_for_sampled_releases_agrees_with_the_plain_one() -> None:
    def allowed(i: int, j: int) -> bool:
        return i + j <= 12

    found = most_gained((response(0.2), response(0.5)), 1.5, allowed)
    assert found == pytest.approx(most_an_analyst_gains(0.2, 0.5, 1.5, allowed), rel=1e-9)
    assert found > 0


def test_everyone_s_adaptive_clip_holds_for_both_kinds_of_neighbours() -> None:
    recipe = replace(RECIPES["adaptive"], cohort=Everyone())
    assert covered(recipe, "models") == ("zero-out", "add-remove")
