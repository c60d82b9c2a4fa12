"""Whole-number noise against whole-number moves: every bound against all moves it speaks of.

The enumeration that other tests of discrete noise rely on is here, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from fedveil.accounting import integers
from fedveil.accounting.events import ORDERS
from fedveil.accounting.norms import Norms
from fedveil.parts.discrete import _binomial_steps, binomial_masses, binomial_reach

Move = tuple[int, ...]

CHANGES = [  # in grid steps: a single full move, all coordinates, and what lies between
    Norms(1, l1=1, l2=1, linf=1, grid=1.0),
    Norms(1, l1=3, l2=3, linf=3, grid=1.0),
    Norms(2, l1=2, l2=math.sqrt(2), linf=1, grid=1.0),
    Norms(2, l1=4, l2=3, linf=3, grid=1.0),
    Norms(3, l1=4, l2=math.sqrt(6), linf=2, grid=1.0),
    Norms(4, l1=4, l2=2, linf=2, grid=1.0),
]


def name(change: Norms) -> str:
    return f"d={change.dim} l1={change.l1:g} l2={change.l2:.3g} linf={change.linf:g}"


def moves_within(change: Norms) -> list[Move]:
    """Every vector of whole moves within the norms, but for order and signs, zero left out."""
    tried = itertools.combinations_with_replacement(range(int(change.linf), -1, -1), change.dim)
    slack = 1 + 1e-12
    return [
        move
        for move in tried
        if 0 < sum(move) <= change.l1 * slack and math.hypot(*move) <= change.l2 * slack
    ]


def laws(masses: np.ndarray, move: Move) -> tuple[np.ndarray, np.ndarray]:
    """The chances of all outputs, of noise alone and of noise moved."""
    p = q = np.ones(1)
    for step in move:
        p = np.outer(p, np.pad(masses, (0, step))).ravel()
        q = np.outer(q, np.pad(masses, (step, 0))).ravel()
    return p, q


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    """The exact δ(ε), in both directions."""
    one = np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
    other = np.maximum(q - math.exp(epsilon) * p, 0.0).sum()
    return float(max(one, other))


def worst_delta(masses: np.ndarray, moves: Iterable[Move], epsilon: float) -> float:
    return max(hockey_stick(*laws(masses, move), epsilon) for move in moves)


def true_escape(masses: np.ndarray, move: Move) -> float:
    """The chance of an output that the other law does not have."""
    p, q = laws(masses, move)
    return float(p[q == 0].sum())


def true_divergence(masses: np.ndarray, move: Move, order: float) -> float:
    """(1/(a − 1))·log Σ P^a·Q^{1−a} over the outputs that both laws have."""
    p, q = laws(masses, move)
    both = (p > 0) & (q > 0)
    powers = order * np.log(p[both]) + (1 - order) * np.log(q[both])
    return float(logsumexp(powers)) / (order - 1)


def laplace_masses(alpha: float, support: int) -> np.ndarray:
    weights = np.exp(-alpha * np.abs(np.arange(-support, support + 1)))
    return weights / weights.sum()


LAWS = {
    "laplace": laplace_masses(0.3, 5),
    "steep": laplace_masses(1.5, 3),
    "binomial": binomial_masses(12),
    "flat": np.full(7, 1 / 7),
}


def test_the_moves_are_all_there_are() -> None:
    assert moves_within(CHANGES[-1]) == [(2, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 0),
                                         (1, 0, 0, 0)]  # fmt: skip
    assert moves_within(CHANGES[3]) == [(3, 0), (2, 2), (2, 1), (2, 0), (1, 1), (1, 0)]


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize("law", LAWS)
def test_no_move_escapes_more_often_than_stated(law: str, change: Norms) -> None:
    stated = integers.escape(LAWS[law], change)
    escapes = [true_escape(LAWS[law], move) for move in moves_within(change)]
    assert max(escapes) <= stated * (1 + 1e-12)
    assert stated <= 1.7 * max(escapes)


@pytest.mark.parametrize("change", [CHANGES[0], CHANGES[2]], ids=name)
@pytest.mark.parametrize("law", LAWS)
def test_the_escape_is_exact_if_all_moves_are_single_steps(law: str, change: Norms) -> None:
    full = (1,) * change.dim
    assert integers.escape(LAWS[law], change) == pytest.approx(true_escape(LAWS[law], full))


def test_noise_that_does_not_reach_always_escapes() -> None:
    change = Norms(1, l1=7, l2=7, linf=7, grid=1.0)
    assert integers.escape(LAWS["flat"], change) == 1.0
    six = Norms(1, l1=6, l2=6, linf=6, grid=1.0)
    assert integers.escape(LAWS["flat"], six) == pytest.approx(6 / 7)


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize("law", ["laplace", "binomial"])
def test_divergences_cover_every_move_at_every_order(law: str, change: Norms) -> None:
    stated = integers.divergences(LAWS[law], change)
    for order in integers.FEW:
        found = [true_divergence(LAWS[law], move, order) for move in moves_within(change)]
        assert max(found) <= stated[ORDERS.index(order)] * (1 + 1e-9)
    assert np.isinf(stated[ORDERS.index(6.0)])  # not computed, so not claimed


@pytest.mark.parametrize("order", integers.FEW)
def test_divergences_are_exact_for_single_steps(order: float) -> None:
    stated = integers.divergences(LAWS["binomial"], CHANGES[2])[ORDERS.index(order)]
    assert stated == pytest.approx(true_divergence(LAWS["binomial"], (1, 1), order))


@pytest.mark.parametrize("change", CHANGES, ids=name)
@pytest.mark.parametrize(("alpha", "support"), [(0.3, 6), (1.5, 4)])
def test_laplace_divergences_cover_every_move(alpha: float, support: int, change: Norms) -> None:
    masses = laplace_masses(alpha, support)
    stated = integers.laplace_divergences(alpha, 1 / masses[support], change)
    for place in range(0, len(ORDERS) - 8, 3):
        for move in moves_within(change):
            found = true_divergence(masses, move, ORDERS[place])
            assert found <= stated[place] + 1e-12


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_laplace_divergences_are_exact_where_the_support_is_wide(order: float) -> None:
    masses = laplace_masses(1.0, 40)
    change = Norms(1, l1=2, l2=2, linf=2, grid=1.0)
    stated = integers.laplace_divergences(1.0, 1 / masses[40], change)[ORDERS.index(order)]
    assert stated == pytest.approx(true_divergence(masses, (2,), order), rel=1e-6)


def test_conditioning_is_what_it_does_to_the_law() -> None:
    """P given that nothing escaped, by enumeration, against the formula."""
    masses, move = LAWS["steep"], (2, 1)
    p, q = laws(masses, move)
    given_inside = np.where(q > 0, p, 0.0) / (1 - true_escape(masses, move))
    values = np.array([true_divergence(masses, move, order) for order in ORDERS[:40]])
    padded = np.append(values, np.zeros(len(ORDERS) - 40))
    grown = integers.conditioned(padded, true_escape(masses, move))
    both = given_inside > 0
    for order, found in zip(ORDERS[:40:5], grown[:40:5], strict=True):
        moment = np.sum(given_inside[both] ** order * q[both] ** (1 - order))
        assert found == pytest.approx(math.log(moment) / (order - 1))


@settings(max_examples=200, deadline=None)
@given(
    costs=st.lists(st.floats(-2, 5), min_size=1, max_size=4),
    move=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    room=st.sampled_from([1.0, 1.5]),
)
@example(costs=[-1.0], move=[1], room=1.5)
def test_no_sum_of_costs_exceeds_the_worst(costs: list[float], move: list[int], room) -> None:
    """Whatever the costs, convex or not, negative or not, and whether or not the norms are met."""
    move = [min(step, len(costs)) for step in move]
    l1, l2 = room * sum(move), room * math.hypot(*move)
    change = Norms(len(move), l1, l2, linf=len(costs), grid=1.0)
    total = sum(costs[step - 1] for step in move if step)
    assert total <= float(integers.worst(np.array(costs), change)) + 1e-9


def test_worst_uses_whichever_norm_says_more() -> None:
    squares = np.array([1.0, 4.0, 9.0])
    sparse = Norms(100, l1=30, l2=3, linf=3, grid=1.0)
    assert float(integers.worst(squares, sparse)) == pytest.approx(9.0)
    linear = np.array([1.0, 2.0, 3.0])
    short = Norms(100, l1=4, l2=4, linf=3, grid=1.0)
    assert float(integers.worst(linear, short)) == pytest.approx(4.0)


@pytest.mark.parametrize("trials", [20, 1000, 20_000, 186_240])
@pytest.mark.parametrize("coordinates", [1, 40])
def test_escapes_of_binomial_noise_are_rounded_up(trials: int, coordinates: int) -> None:
    """Against whole numbers: the mass of one step beyond the end, or of a step beyond a core."""
    import mpmath as mp

    mp.mp.dps = 60
    steps = Norms(coordinates, coordinates, math.sqrt(coordinates), 1, 1.0)
    reach = binomial_reach(trials)
    half = trials // 2
    ways = [mp.binomial(trials, half)]  # of half + y, with sixty digits: 1e-55 off in all
    for y in range(half):
        ways.append(ways[-1] * (half - y) / (half + y + 1))
    beyond = list(itertools.accumulate(reversed(ways)))[::-1]  # of half + y or more
    weights = ways[: min(reach, half) + 1]
    inside = weights[0] + 2 * mp.fsum(weights[1:])
    exact = 1 - (1 - weights[-1] / inside) ** coordinates
    found = integers.escape(binomial_masses(trials), steps)
    assert exact <= found <= exact * (1 + (2 * reach + 200) * 2**-44)
    law = _binomial_steps(trials)
    assert law is not None
    for core in (1, reach // 2, reach):
        exact = 1 - (1 - beyond[core] / mp.mpf(2) ** trials) ** coordinates
        found = integers.core_escape(law, steps, core)
        assert exact <= found <= exact * (1 + (12 * reach + 200) * 2**-44)
