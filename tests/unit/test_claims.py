"""The table of claimed and true privacy: its rows, its formulas, and that it is current."""

from __future__ import annotations

import doctest
import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events

ROOT = Path(__file__).resolve().parents[2]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "experiments" / "claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


claims = loaded()


def row(name: str, epsilon: float) -> Any:
    (found,) = (c for c in claims.claims() if (c.name, c.epsilon) == (name, epsilon))
    return found


def gaussian_delta(ratio: float, epsilon: float) -> float:
    """Balle and Wang 2018, Thm. 8, by erfc, which keeps the digits of small tails."""
    high, low = (epsilon * ratio + sign * 0.5 / ratio for sign in (-1, 1))
    tails = [math.erfc(edge / math.sqrt(2)) / 2 for edge in (high, low)]
    return tails[0] - math.exp(epsilon) * tails[1]


def test_the_document_is_current() -> None:
    current = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert current == claims.document(), "run `python experiments/claims.py > docs/claims.md`"


def test_the_bits_of_das_2021_are_reproduced() -> None:
    found = {case.name: (case.support, case.bits) for case in claims.published()}
    assert found == {
        "Fashion-MNIST, s = 2^6": (9, 8),
        "Fashion-MNIST, s = 2^12": (413, 14),
        "CIFAR-10, s = 2^9": (54, 11),
        "CIFAR-10, s = 2^20": (105205, 22),
    }


def test_one_coordinate_moved_by_one_level_has_the_mass_of_the_largest_noise() -> None:
    case = claims.published()[0]
    masses = np.exp(-case.alpha * np.abs(np.arange(-case.support, case.support + 1)))
    masses /= masses.sum()
    assert case.escape(1) == pytest.approx(masses[-1], rel=1e-9)
    assert case.escape(4) == pytest.approx(masses[-4:].sum(), rel=1e-9)
    assert round(case.escape(1), 3) == 0.053


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_the_escape_is_the_delta_of_all_outputs(epsilon: float) -> None:
    """The hockey-stick divergence in two dimensions, where moves of Δ∞ = 2 use up Δ₁ = 4."""
    case = claims.Quantized("small", 2, 4, 0.5, 4.0, 2.0)
    support = range(-case.support, case.support + 1)
    weights = {y: math.exp(-case.alpha * abs(y)) for y in support}
    total = sum(weights.values())

    def mass(first: int, second: int) -> float:
        return weights.get(first, 0.0) * weights.get(second, 0.0) / total**2

    excess = sum(
        max(mass(a, b) - math.exp(epsilon) * mass(a + 2, b + 2), 0.0)
        for a, b in itertools.product(support, support)
    )
    assert excess == pytest.approx(1 - (1 - case.escape(2)) ** 2, rel=1e-9)
    assert excess == pytest.approx(1 - 10 ** -case.digits_of_safety(), rel=1e-9)
    assert excess > 2**-case.dim


def test_opposite_vectors_are_told_apart_whatever_the_levels_and_rounds() -> None:
    for levels, rounds in ((2**8, 10), (2**20, 1000)):
        case = claims.unassuming(levels, rounds)
        assert case.escape(2 * levels) == pytest.approx(0.5, abs=0.002)


def test_full_participation_has_a_closed_form() -> None:
    claim = row("Das 2022, quadratics", 5.0)
    sigma = math.sqrt(500 * math.log(1e6)) / 5 * 100 / 100  # r·σ/C by eq. 5 with q = 1
    epsilon = claims.models(claim)
    assert gaussian_delta(sigma / math.sqrt(500), epsilon) == pytest.approx(1e-6, rel=1e-6)
    assert epsilon == claims.sum_always(claim) == claims.sum_by_chance(claim)
    assert epsilon > claim.epsilon


@pytest.mark.parametrize("ratio", [0.05, 0.7, 5.0, 100.0])
def test_the_closed_form_agrees_with_the_accountant(ratio: float) -> None:
    bound = accounting.epsilon(events.GaussianRelease(ratio), 1e-5)
    assert claims.gaussian(ratio, 1e-5) <= bound
    assert claims.gaussian(ratio, 1e-5) == pytest.approx(bound, rel=2e-3, abs=2e-4)


def test_so_much_noise_that_delta_is_met_costs_nothing() -> None:
    assert claims.gaussian(1e6, 1e-5) == 0.0


def test_as_drawn_is_the_mean_over_the_number_of_participations() -> None:
    """Seen coins: δ(ε) = Σ_k P(k participations)·δ_k(ε), with k Gaussians as one."""
    ratio, rate, rounds = 1.8, 0.25, 300
    epsilon = claims.by_chance(ratio, rate, rounds, 1e-5)

    def exact(epsilon: float) -> float:
        return math.fsum(
            math.comb(rounds, k) * rate**k * (1 - rate) ** (rounds - k)
            * gaussian_delta(ratio / math.sqrt(k), epsilon)
            for k in range(1, rounds + 1)
        )  # fmt: skip

    assert exact(epsilon) <= 1e-5 * (1 + 1e-6)
    assert exact(epsilon * 0.999) > 1e-5


def test_the_views_are_ordered_and_the_claim_is_false_in_each() -> None:
    seen = [view(row("Das 2022, Fashion-MNIST", 5.0)) for view in claims.VIEWS]
    models, always, drawn, messages_always, messages_drawn = seen
    assert 5.0 < models < drawn < always < messages_drawn < messages_always


def test_noise_of_the_server_hides_nothing_from_the_server() -> None:
    claim = row("DP-LSGD, CIFAR-10", 2.0)
    assert claims.models(claim) < math.inf
    assert all(math.isinf(view(claim)) for view in claims.VIEWS[1:])


@pytest.mark.parametrize("view", ["models", "messages_always"])
def test_the_factor_makes_the_claim_true_and_little_less_does_not(view: str) -> None:
    claim, look = row("Das 2022, Fashion-MNIST", 1.5), getattr(claims, view)
    factor = claims.factor_needed(claim, look)
    assert look(claim.louder(factor)) <= claim.epsilon
    assert look(claim.louder(0.99 * factor)) > claim.epsilon


def test_every_round_does_not_depend_on_their_number() -> None:
    claim = row("Das 2022, Fashion-MNIST", 5.0)
    longer = claims.messages_always(claim.lasting(2000))
    assert longer == pytest.approx(claims.messages_always(claim), rel=1e-9)


def test_numbers_are_rounded_up() -> None:
    assert doctest.testmod(claims) == doctest.TestResults(failed=0, attempted=1)
