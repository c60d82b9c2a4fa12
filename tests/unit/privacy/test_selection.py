"""The best of a random number of runs: the bounds against enumeration and against the library."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_repeat_and_select

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.events import ORDERS
from fedveil.errors import UserError
from fedveil.privacy.composition import Charged, curve, plan
from fedveil.privacy.selection import (
    TAIL,
    Law,
    PoissonRuns,
    TruncatedNegativeBinomial,
    _mixed,
    described,
    drawn,
    law_of,
    selection,
)
from fedveil.recipe import Recipe

LAWS: list[Law] = [
    *(TruncatedNegativeBinomial.of_mean(eta, mean) for eta in (-0.5, 0.0, 0.5, 1.0, 3.0)
      for mean in (1.2, 4.0, 10.0)),
    *(PoissonRuns(mean) for mean in (0.3, 1.0, 4.0, 20.0)),
]  # fmt: skip
GAUSSIAN = algorithms.dp_fedavg(noise_multiplier=2.0, rate=0.3, steps=1)
OTHER = algorithms.dp_fedavg(noise_multiplier=4.0, rate=0.3, steps=1)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """D_λ(p‖q) at ORDERS, of two laws on a few outcomes."""
    orders = np.array(ORDERS)[:, None]
    with np.errstate(divide="ignore", over="ignore"):
        logs = orders * np.log(p) + (1 - orders) * np.log(q)
    top = logs.max(axis=1, keepdims=True)
    sums = top[:, 0] + np.log(np.exp(logs - top).sum(axis=1))
    return np.asarray(sums / (orders[:, 0] - 1))


def best(law: Law, q: np.ndarray) -> np.ndarray:
    """The law of the best of K draws from q, worst outcome first; of none, where K may be 0.

    P(best ≤ y) = E[q(≤ y)^K], summed over all K that occur.
    """
    chances = law.chances()
    chances = chances[: np.flatnonzero(chances > 1e-18)[-1] + 1]
    below = np.concatenate([[0.0], np.cumsum(q)])
    below[-1] = 1.0
    powers = below[:, None] ** np.arange(len(chances))[None, :]
    steps = np.diff(powers @ chances)
    return np.append(steps, chances[0]) if chances[0] else steps


def responses(epsilon: float, outcomes: int) -> tuple[np.ndarray, np.ndarray]:
    """Randomized response: the first outcome is likely in one world, the last in the other."""
    p = np.ones(outcomes)
    p[0] = math.exp(epsilon)
    return p / p.sum(), p[::-1] / p.sum()


def rounded_gaussians(move: float) -> tuple[np.ndarray, np.ndarray]:
    from scipy.stats import norm

    cuts = np.linspace(-4, 4 + move, 60)
    laws = [np.diff(np.concatenate([[0], norm.cdf(cuts - m), [1]])) for m in (0.0, move)]
    return laws[0], laws[1]


PAIRS = {
    "response": responses(1.0, 2),
    "weak response": responses(0.1, 2),
    "responses": responses(2.0, 5),
    "gaussian": rounded_gaussians(0.5),
    "far gaussian": rounded_gaussians(2.0),
    "equal": (np.full(4, 0.25), np.full(4, 0.25)),
}


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_bound_holds_by_enumeration(law: Law, pair: str) -> None:
    p, q = PAIRS[pair]
    single = np.maximum(divergence(p, q), divergence(q, p))
    claimed = law.selected(single)
    for a, b in ((p, q), (q, p), (p[::-1], q[::-1]), (q[::-1], p[::-1])):
        assert np.all(divergence(best(law, a), best(law, b)) <= claimed + 1e-9)


@pytest.mark.parametrize("law", [*LAWS[:13:3], *LAWS[-4:]], ids=str)
def test_the_printed_epsilon_is_not_below_the_exact_one(law: Law) -> None:
    """Two members, drawn by a coin: P(S) ≤ e^ε·Q(S) + δ for the best one's exact laws.

    Outcomes are (member, answer), in an order of merit in which the members' answers alternate.
    """
    found_out = False
    for one, other in itertools.product(("response", "gaussian"), ("weak response", "responses")):
        sides = [_mixture(PAIRS[one][side], PAIRS[other][side]) for side in (0, 1)]
        both = [
            np.maximum(divergence(*PAIRS[n]), divergence(*PAIRS[n][::-1])) for n in (one, other)
        ]
        claimed = tuple(map(float, law.selected(_mixed(np.array(both)))))
        for (p, q), delta in itertools.product((sides, sides[::-1]), (1e-5, 1e-2)):
            epsilon = accounting.epsilon(events.RenyiRelease(claimed, 0.0, TAIL), delta)
            assert _above(best(law, p), best(law, q), epsilon) <= delta
            alone = next(e for e in np.arange(0, 3, 0.01) if _above(p, q, e) <= delta)
            found_out |= _above(best(law, p), best(law, q), alone) > delta
    assert found_out  # the ε of one run is too small for the best of several


def _above(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence: the δ that goes with an ε."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def _mixture(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Half of each, answers in turn; the longer one's last answers are the best."""
    count = 2 * max(len(one), len(other))
    mixed = np.zeros(count)
    mixed[: 2 * len(one) : 2], mixed[1 : 2 * len(other) : 2] = one / 2, other / 2
    return mixed[mixed > 0]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_chances_are_a_law_with_the_stated_mean(law: Law) -> None:
    chances = law.chances()
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    assert chances @ np.arange(len(chances)) == pytest.approx(law.mean, rel=1e-6)
    rng = np.random.default_rng(0)
    counts = np.array([drawn(law, rng) for _ in range(400)])
    error = math.sqrt(chances @ np.arange(len(chances)) ** 2 - law.mean**2) / math.sqrt(400)
    assert abs(counts.mean() - law.mean) < 5 * error
    for k, chance in enumerate(chances[:20]):  # K is as spread out as its law, not only on average
        share = float((counts == k).mean())
        assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / 400) + 1e-2


def test_eta_one_is_geometric_and_zero_logarithmic() -> None:
    geometric = TruncatedNegativeBinomial(1.0, 0.2).chances()
    assert np.allclose(geometric[1:6], 0.2 * 0.8 ** np.arange(5))
    logarithmic = TruncatedNegativeBinomial(0.0, 0.2).chances()
    k = np.arange(1, 6)
    assert np.allclose(logarithmic[1:6], 0.8**k / (k * math.log(5)))


def test_too_small_a_bound_would_be_found_out() -> None:
    """Without log E[K]/(λ − 1), or without the term of the spread, enumeration contradicts it."""
    law = TruncatedNegativeBinomial.of_mean(1.0, 20.0)
    p, q = PAIRS["response"]
    exact = divergence(best(law, p), best(law, q))
    single = divergence(p, q)
    assert np.any(exact > single + math.log(20) / (np.array(ORDERS) - 1))
    p, q = PAIRS["weak response"]
    fixed = np.array([1 - (1 - p[1]) ** 20, (1 - p[1]) ** 20])
    moved = np.array([1 - (1 - q[1]) ** 20, (1 - q[1]) ** 20])
    assert np.any(divergence(fixed, moved) > law.selected(divergence(p, q)))  # K must be random


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 3.0])
def test_the_library_has_the_same_numbers(eta: float) -> None:
    single = curve(charged(GAUSSIAN, 50)).orders
    known = _compute_rdp_repeat_and_select(ORDERS, single, 10.0, eta)
    found = TruncatedNegativeBinomial.of_mean(eta, 10.0).selected(single)
    assert np.allclose(found, known, rtol=1e-6)


def test_a_poisson_law_costs_little_more_than_the_library_has_it() -> None:
    """The library leaves the chance of no run out; that is at most e^−m/(m·(λ − 1))."""
    single = curve(charged(GAUSSIAN, 50)).orders
    known = np.asarray(_compute_rdp_repeat_and_select(ORDERS, single, 10.0, math.inf))
    known = np.minimum.accumulate(known[::-1])[::-1]
    found = PoissonRuns(10.0).selected(single)
    assert np.all(known <= found + 1e-12)
    assert np.all(found <= known + math.exp(-10) / (10 * (np.array(ORDERS) - 1)) + 1e-9)


def test_between_whole_orders_the_curve_lies_above_the_library_s() -> None:
    """The library's series at fractional orders is itself only good to a few digits."""
    sampled = algorithms.dp_fedavg(noise_multiplier=2.0, rate=0.1, steps=1)
    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0))
    known = RdpAccountant(ORDERS).compose(event, 3)._rdp
    ratio = curve(charged(sampled, 3)).orders / np.array(known)
    assert np.all(ratio > 0.995)
    assert np.all(ratio < 1.25)
    assert np.allclose(ratio[np.array(ORDERS) % 1 == 0], 1.0)


def charged(recipe: Recipe, rounds: int) -> Charged:
    return Charged(plan(recipe, 18, 12, "models"), rounds, rounds)


def test_selecting_costs_more_than_one_run_and_less_than_all_of_them() -> None:
    one, rounds = charged(GAUSSIAN, 20), 20
    alone = accounting.epsilon(one.plan.spent(rounds), 1e-5)
    everything = accounting.epsilon(one.plan.spent(20 * rounds), 1e-5)
    for law in (law_of("geometric", 20), law_of("logarithmic", 20), law_of("poisson", 20)):
        found = accounting.epsilon(events.Composed(selection([one], law), 1), 1e-5)
        assert alone < found < 0.7 * everything
    least = accounting.epsilon(selection([one], law_of("logarithmic", 20)), 1e-5)
    assert least < accounting.epsilon(selection([one], law_of("geometric", 20)), 1e-5)


def test_a_member_with_less_noise_weighs_by_its_chance() -> None:
    law = law_of("geometric", 4)
    curves = [np.array(selection([charged(r, 20)], law).divergences) for r in (GAUSSIAN, OTHER)]
    both = np.array(selection([charged(GAUSSIAN, 20), charged(OTHER, 20)], law).divergences)
    assert np.all(both <= curves[0] + 1e-12)
    assert np.all(both >= curves[1] - 1e-12)
    assert np.any(both < curves[0] - 1e-3)


def test_what_a_run_sets_aside_counts_as_often_as_runs_are_expected() -> None:
    release = events.RenyiRelease(tuple(0.1 * a for a in ORDERS), 1e-9, 1e-12)
    known = charged(GAUSSIAN, 3)
    member = replace(
        known, plan=replace(known.plan, ways=(known.plan.ways[0]._replace(event=release),))
    )
    found = selection([member], law_of("geometric", 8))
    assert found.escape == pytest.approx(8 * 3e-9)
    assert found.distance == pytest.approx(8 * 3e-12 + TAIL)


def test_members_of_other_neighbours_are_not_selected_among() -> None:
    adaptive = algorithms.dp_fedavg_adaptive(noise_multiplier=2.0, count_noise=3.0, steps=1)
    fixed = algorithms.dp_fedavg(noise_multiplier=2.0, clients=4, steps=1)
    with pytest.raises(UserError, match="do not share an adjacency"):
        selection([charged(adaptive, 5), charged(fixed, 5)], law_of("geometric", 4))


def test_runs_without_a_guarantee_have_none_when_selected() -> None:
    member = Charged(plan(GAUSSIAN, 18, 12, "sum"), 5, 5)
    assert math.isinf(accounting.epsilon(selection([member], law_of("geometric", 4)), 1e-5))


@pytest.mark.parametrize(
    ("name", "mean", "eta", "problem"),
    [
        ("geometric", 1.0, None, "must be above 1"),
        ("geometric", 5000.0, None, "Give a smaller expected number"),
        ("poisson", 0.0, None, "must be above 0"),
        ("geometric", 4.0, -1.0, "above -1"),
        ("geometric", math.nan, None, "must be above 1"),
    ],
)
def test_laws_that_make_no_sense(name: str, mean: float, eta: float | None, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        law_of(name, mean, eta)


def test_a_law_is_described_without_its_outcome() -> None:
    assert described(law_of("poisson", 3.0)) == {"law": "poisson", "expected": 3.0}
    found = described(law_of("geometric", 4.0))
    assert found["gamma"] == pytest.approx(0.25)
    assert found["expected"] == pytest.approx(4.0)
