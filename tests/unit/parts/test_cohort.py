"""Cohorts: the law of who takes part, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.accounting import events
from fedveil.errors import UserError
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Participants, Poisson
from fedveil.parts.part import Tensors
from fedveil.parts.spaced import CyclicPoisson, Separated

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


def mean_attendance(cohort: Cohort, population: int, rounds: int, runs: int) -> float:
    """Participants per round, drawn."""
    taken, rng = 0, np.random.default_rng(0)
    for _ in range(runs):
        state: Tensors = {"taken": torch.zeros(population, dtype=torch.int64)}
        for _ in range(rounds):
            drawn = cohort.draw(population, rng, state)
            state = cohort.step(state, drawn)
            taken += len(drawn)
    return taken / rounds / runs


def test_participants_of_capped_coins_are_exact_and_of_a_capped_size_a_tight_bound() -> None:
    exact = Poisson(0.2, cap=3).participants(100, 20)
    assert exact.exact
    # 100 runs of 100 clients: the deviation of the mean is below 0.02.
    assert exact.mean == pytest.approx(mean_attendance(Poisson(0.2, cap=3), 100, 20, 100), abs=0.08)
    for rounds in (12, 15, 16, 20):
        bound = FixedSize(20, cap=3).participants(100, rounds)
        drawn = mean_attendance(FixedSize(20, cap=3), 100, rounds, 10)
        assert not bound.exact
        assert 0.97 * bound.mean <= drawn <= bound.mean


@pytest.mark.parametrize("cohort", [Poisson(0.2), Poisson(0.2, cap=20), FixedSize(20), Everyone()])
def test_without_a_cap_that_counts_as_many_take_part_as_expected(cohort: Cohort) -> None:
    assert cohort.participants(100, 20) == Participants(cohort.expected(100), exact=True)


@dataclass(frozen=True)
class Twenty(Cohort):
    """Twenty clients, by a draw of one's own."""

    cap: int | None = None
    fixed = True

    def expected(self, population: int) -> float:
        return 20.0

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return np.sort(rng.choice(population, 20, replace=False))


class OtherCoins(Poisson):
    """Coins that may not be coins."""


def test_of_a_cohort_of_one_s_own_only_what_follows_from_its_cap_is_known() -> None:
    assert Twenty(cap=3).participants(100, 20) == Participants(15.0, exact=False)
    assert Twenty(cap=3).participants(100, 10) == Participants(20.0, exact=False)
    assert OtherCoins(0.2, cap=3).participants(100, 20) == Participants(15.0, exact=False)
    for cohort in (Twenty(), OtherCoins(0.2)):
        assert cohort.with_population(2.0) is None
        assert cohort.with_size(10.0, 100) is None


@pytest.mark.parametrize(
    "cohort", [Everyone(), Poisson(0.2), FixedSize(20), CyclicPoisson(0.2, 4), Separated(20, 4)]
)
def test_the_cohorts_of_fedveil_keep_their_share_of_a_larger_population(cohort: Cohort) -> None:
    larger = cohort.with_population(3.0)
    assert larger is not None
    assert larger.expected(300) == pytest.approx(3 * cohort.expected(100))


def test_a_description_says_that_a_cap_makes_participants_fewer() -> None:
    told = Twenty(cap=3).describe("client", 100)
    assert "20 of 100 clients on average per round until clients reach the cap" in told
    assert "until" not in Twenty().describe("client", 100)
    assert "up to 20 clients per round" in FixedSize(20, cap=3).describe("client", 100)
    assert "Fixed size: 20 clients per round" in FixedSize(20).describe("client", 100)
