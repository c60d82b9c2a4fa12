"""Binomial noise between two yardsticks: its exact loss below, cpSGD's closed form above."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.accounting import events
from fedveil.accounting.accountant import epsilon
from fedveil.accounting.norms import Norms
from fedveil.errors import UserError
from fedveil.parts.discrete import Binomial, TruncatedDiscreteLaplace, binomial_masses
from tests.unit.accounting.cpsgd import INTERVAL, closed_form, composed_loss, coordinate_loss
from tests.unit.accounting.test_integers import (
    CHANGES,
    Move,
    hockey_stick,
    laws,
    moves_within,
    name,
)

DELTA = 1e-5
LAWS = {
    "binomial": binomial_masses(14),
    "laplace": TruncatedDiscreteLaplace(0.4, 4).masses(CHANGES[0]),
    "lopsided": np.array([0.1, 0.4, 0.3, 0.15, 0.05]),
}
SETTINGS: list[tuple[int, Move]] = [
    (4_000, (1,)),
    (4_000, (3, 2, 1)),
    (20_000, (8,)),
    (20_000, (2,) * 40),
    (200_000, (10,) * 10 + (1,) * 200),
]


def norms_of(move: Move) -> Norms:
    """The move's own norms: no other move of its kind is allowed for."""
    return Norms(len(move), float(sum(move)), math.hypot(*move), max(move), 1.0)


def exact(trials: int, move: Move) -> float:
    return float(composed_loss(binomial_masses(trials), move).get_epsilon_for_delta(DELTA))


def above(trials: int, move: Move) -> float:
    n = norms_of(move)
    return closed_form(trials, n.dim, n.l1, n.l2, n.linf, DELTA)


def by_renyi(trials: int, move: Move) -> float:
    change = norms_of(move)
    event = Binomial(trials).event(change, change, 1.0, 1.0)
    return epsilon(events.Composed(event, 1), DELTA)


# ---- the exact loss


@pytest.mark.parametrize("change", [CHANGES[1], CHANGES[3], CHANGES[4]], ids=name)
@pytest.mark.parametrize("law", LAWS)
def test_the_composed_loss_is_the_enumerated_one(law: str, change: Norms) -> None:
    """From above, by at most what rounding the losses up can do; δ falls as ε grows."""
    masses = LAWS[law]
    for move in moves_within(change):
        p, q = laws(masses, move)
        loss = composed_loss(masses, move)
        off = 2 * INTERVAL * change.dim
        for eps in (0.0, 0.5, 1.0, 3.0):
            found = float(loss.get_delta_for_epsilon(eps))
            assert hockey_stick(p, q, eps) <= found * (1 + 1e-9) + 1e-12
            assert found <= hockey_stick(p, q, max(eps - off, 0)) + off


def test_the_yardsticks_by_hand() -> None:
    masses = np.array([0.25, 0.5, 0.25])
    one, both = coordinate_loss(masses, 1), composed_loss(masses, [1, 0, 1])
    assert one.get_delta_for_epsilon(1.0) == pytest.approx(0.25, abs=1e-6)
    assert both.get_delta_for_epsilon(2.0) == pytest.approx(1 - 0.75**2, abs=1e-6)
    bound = closed_form(10**6, 10, l1=10.0, l2=math.sqrt(10), linf=1.0, delta=1e-5)
    assert bound == pytest.approx(0.0314, abs=5e-5)


def test_one_coordinate_is_a_composition_of_one() -> None:
    for eps in (0.0, 0.3, 2.0):
        one = coordinate_loss(LAWS["binomial"], 2).get_delta_for_epsilon(eps)
        assert one == composed_loss(LAWS["binomial"], [2]).get_delta_for_epsilon(eps)
        p, q = laws(LAWS["binomial"], (2,))
        assert float(one) == pytest.approx(hockey_stick(p, q, eps), abs=2 * INTERVAL)


def test_moves_count_as_often_as_they_occur_in_any_order_with_any_sign() -> None:
    masses = LAWS["binomial"]
    some = composed_loss(masses, [1, 2, 0, 1]).get_delta_for_epsilon(0.7)
    assert composed_loss(masses, [2, 1, 1]).get_delta_for_epsilon(0.7) == pytest.approx(some)
    assert composed_loss(masses, [-1, 1, -2]).get_delta_for_epsilon(0.7) == pytest.approx(some)
    assert composed_loss(masses, [2, 1]).get_delta_for_epsilon(0.7) < 0.9 * some


def test_both_directions_of_a_lopsided_law_are_covered() -> None:
    masses = LAWS["lopsided"]
    for eps in (0.2, 1.0):
        found = float(coordinate_loss(masses, 1).get_delta_for_epsilon(eps))
        back = float(coordinate_loss(masses, -1).get_delta_for_epsilon(eps))
        assert found == pytest.approx(back)
        assert found >= hockey_stick(*laws(masses, (1,)), eps) - 1e-12


def test_no_move_costs_nothing() -> None:
    assert composed_loss(LAWS["binomial"], [0, 0]).get_epsilon_for_delta(1e-9) == 0.0
    assert composed_loss(LAWS["binomial"], []).get_delta_for_epsilon(0.0) == pytest.approx(0.0)


# ---- below the closed form, below the Rényi accounting


@pytest.mark.parametrize(("trials", "move"), SETTINGS, ids=lambda v: f"{v}"[:20])
def test_the_exact_epsilon_is_below_the_closed_form(trials: int, move: Move) -> None:
    assert exact(trials, move) < above(trials, move)


@pytest.mark.parametrize(("trials", "move"), SETTINGS, ids=lambda v: f"{v}"[:20])
def test_the_accounted_epsilon_is_never_below_the_exact_one(trials: int, move: Move) -> None:
    """Above it by 8 to 13%, which is the conversion; by more only where ε is well below ¼."""
    found, true = by_renyi(trials, move), exact(trials, move)
    assert true - INTERVAL * len(move) <= found < above(trials, move)
    assert found <= (1.2 if true > 0.25 else 3.0) * true


def test_fewer_trials_than_accounted_would_be_noticed() -> None:
    for trials, move in SETTINGS[1:]:
        assert by_renyi(2 * trials, move) < exact(trials, move)


# ---- the closed form


def test_the_closed_form_is_the_theorem_term_by_term() -> None:
    """Agarwal et al. 2018, eq. 7 with p = ½: each norm's part alone, at round logarithms."""
    trials, delta = 40_000, 1e-6
    l2 = closed_form(trials, 5, 0.0, 1.0, 0.0, delta)
    l1 = closed_form(trials, 5, 1.0, 0.0, 0.0, delta)
    linf = closed_form(trials, 5, 0.0, 0.0, 1.0, delta)
    assert l2 == pytest.approx(
        math.sqrt(2 * math.log(1.25e6)) / 100 + 2.5 * math.sqrt(math.log(1e7)) / (1e4 * (1 - 1e-7))
    )
    assert l1 == pytest.approx(1 / 3e4, rel=1e-6)
    assert linf == pytest.approx(
        (2 / 3 * math.log(1.25e6) + 2 / 3 * math.log(1e8) * math.log(1e7)) / 1e4
    )
    together = closed_form(trials, 5, 7.0, 3.0, 2.0, delta)
    assert together == pytest.approx(7 * l1 + 3 * l2 + 2 * linf)


def test_its_constants_are_those_of_general_p_at_one_half() -> None:
    """c_p = √2(3p³ + 3(1−p)³ + 2p² + 2(1−p)²) is 2.475 at ½, for which 5/2 is used."""
    p = 0.5
    squares, cubes = p**2 + (1 - p) ** 2, p**3 + (1 - p) ** 3
    c = math.sqrt(2) * (3 * cubes + 2 * squares)
    assert 2.47 < c < 2.5
    assert 2 / 3 * squares + 1 - 2 * p == pytest.approx(1 / 3)
    assert 4 / 3 * squares == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("trials", "linf"), [(1_200, 1.0), (4_000, 501.0), (2, 0.0)], ids=["tail", "move", "two"]
)
def test_too_few_trials_are_refused(trials: int, linf: float) -> None:
    with pytest.raises(UserError, match=r"too few .* at least \d+\.$") as refused:
        closed_form(trials, 10, 1.0, 1.0, linf, DELTA)
    enough = int(str(refused.value).split()[-1].rstrip("."))
    assert closed_form(enough, 10, 1.0, 1.0, linf, DELTA) > 0
    with pytest.raises(UserError, match="delta"):
        closed_form(10**6, 10, 1.0, 1.0, 1.0, 0.0)
