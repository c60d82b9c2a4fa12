"""Cohorts: the law of who takes part, and what it is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedveil.accounting import events
from fedveil.errors import UserError
from fedveil.parts.cohort import Everyone, FixedSize, Poisson

RELEASE = events.GaussianRelease(2.0)


@pytest.mark.parametrize("number", [2.0, np.int64(2), "2", True, None, 10**400], ids=str)
def test_a_size_and_a_cap_are_ints(number: Any) -> None:
    wrong = r"it must be a whole number \(int\), at least 1"
    with pytest.raises(UserError, match=f"FixedSize: clients is .*; {wrong}"):
        FixedSize(number)
    if number is not None:
        with pytest.raises(UserError, match=f"Poisson: cap is .*; {wrong}"):
            Poisson(0.5, cap=number)


def test_everyone_comes_and_nothing_is_gained() -> None:
    assert Everyone().draw(4, np.random.default_rng(0)).tolist() == [0, 1, 2, 3]
    assert Everyone().expected(4) == 4.0
    assert Everyone().amplify(RELEASE, 4) is RELEASE
    assert Everyone().adjacency == "zero-out"


def test_poisson_draws_each_client_independently_at_its_rate() -> None:
    rng = np.random.default_rng(0)
    draws = [Poisson(0.2).draw(50, rng) for _ in range(4000)]
    sizes = np.array([len(draw) for draw in draws])
    # Binomial(50, 0.2): the variance tells Poisson sampling from a fixed size of 10.
    assert sizes.mean() == pytest.approx(10, abs=0.25)
    assert sizes.var() == pytest.approx(8, rel=0.1)
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_poisson_cohort_can_be_empty() -> None:
    assert len(Poisson(1e-9).draw(10, np.random.default_rng(0))) == 0


def test_fixed_size_draws_without_replacement_uniformly() -> None:
    rng = np.random.default_rng(0)
    draws = [FixedSize(5).draw(20, rng) for _ in range(4000)]
    assert all(len(np.unique(draw)) == 5 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_denominator_is_public() -> None:
    assert Poisson(0.2).expected(3000) == pytest.approx(600)
    assert FixedSize(7).expected(3000) == 7


def test_amplification_is_tied_to_its_adjacency() -> None:
    assert Poisson(0.2).adjacency == "add-remove"
    assert Poisson(0.2).amplify(RELEASE, 10) == events.PoissonSampled(0.2, RELEASE)
    assert FixedSize(2).adjacency == "replace-one"
    assert FixedSize(2).amplify(RELEASE, 10) == events.SampledWithoutReplacement(2, 10, RELEASE)
    nothing = events.NonPrivate("no noise")
    assert Poisson(0.2).amplify(nothing, 10) is nothing


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(UserError, match="rate"):
        Poisson(rate)


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(UserError, match="only 3"):
        FixedSize(4).expected(3)
