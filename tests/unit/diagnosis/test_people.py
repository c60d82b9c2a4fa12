"""Advice on cohorts claims nothing that the cohort did not answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil import algorithms
from fedveil.diagnosis.change import cohort_flags, flags, larger_cohort
from fedveil.diagnosis.noise import RULES as NOISE
from fedveil.diagnosis.people import FEW_CLIENTS, MISSING
from fedveil.diagnosis.rule import Finding
from fedveil.diagnosis.run import DiagnosedRun
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson

BASE = algorithms.dp_fedavg(rate=0.2, noise_multiplier=4.0)
CAP = "raise the cap, or use a smaller cohort or fewer rounds"


@dataclass(frozen=True)
class Own(Cohort):
    """A cohort that answers nothing but its size."""

    size: float = 20.0
    cap: int | None = None

    def expected(self, population: int) -> float:
        if population > 1000:
            raise MemoryError("nobody asked for so many clients")
        return self.size

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return np.arange(int(self.size))


def run(cohort: Cohort, came: float, population: int | None = 100) -> DiagnosedRun:
    """Twenty rounds in which so many clients took part, with much noise."""
    row = {"participants": came, "clipped_fraction": 1.0, "signal": 0.2, "noise": 4.0, "norm": 2.0}
    rows = [{"round": number, **row} for number in range(1, 21)]
    recipe = replace(BASE, cohort=cohort)
    return DiagnosedRun(Path("a"), recipe, rows, None, population, 650, 20, (8.0, 1e-5))


def test_a_cap_is_blamed_where_there_is_one() -> None:
    found = MISSING(run(Own(cap=3), 13.0))
    assert found is not None
    assert found.advice.startswith(CAP)
    for cohort in (Own(), Own(cap=20), Poisson(0.2)):
        found = MISSING(run(cohort, 13.0))
        assert found is not None
        assert "cap" not in found.advice
        assert "draws as many as it expects" in found.advice


@pytest.mark.parametrize(
    ("cohort", "population", "advised"),
    [
        (Own(3.0), 100, True),
        (Own(3.0), 3, False),  # all of them
        (Own(3.0), None, False),  # a run that has not ended: nobody knows of how many
        (FixedSize(3), 100, True),
        (FixedSize(3), None, True),
        (Everyone(), 3, False),
        (Everyone(), None, False),
    ],
)
def test_a_larger_sample_is_advised_where_there_is_a_sample(
    cohort: Cohort, population: int | None, advised: bool
) -> None:
    assert (FEW_CLIENTS(run(cohort, 3.0, population)) is not None) == advised


def noisy(cohort: Cohort) -> Finding:
    (found,) = (found for rule in NOISE if (found := rule(run(cohort, 20.0))) is not None)
    return found


def test_more_clients_are_promised_by_cohorts_that_say_how_they_grow() -> None:
    assert "clients in total, instead of 100, would reach" in noisy(Poisson(0.2)).advice
    assert "in total" not in noisy(Own()).advice
    assert "per round instead" not in noisy(Own()).advice
    assert noisy(Own()).command == ""


def test_a_larger_cohort_that_only_reaches_its_cap_sooner_gains_nothing() -> None:
    """Four times the clients per round would all be at the cap after a quarter of the rounds."""
    free, capped = (larger_cohort(run(Poisson(0.05, cap=cap), 5.0)) for cap in (None, 1))
    assert free["larger"] > capped["larger"]


def test_flags_are_those_of_the_algorithm_that_is_named() -> None:
    own = replace(BASE, cohort=Own())  # in Python, under the name of an algorithm of fedveil
    assert flags(BASE, rate=0.4) == "--set rate=0.4"
    assert flags(own, rate=0.4) == cohort_flags(own, 40, 100) == ""
