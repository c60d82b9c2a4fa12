"""The signal's formula against draws, and noise of every kind against what a run draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.partition import Iid
from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Clip, Normalize, SmoothNormalize, Unbounded
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.planning.noise import deviation, noise_norm
from fedveil.planning.signal import AssumedUpdates, MeasuredUpdates, Spread, rounding
from fedveil.recipe import Recipe
from fedveil.training.start import train

DIM, POPULATION = 6, 40


def vectors(rng: np.random.Generator, count: int) -> np.ndarray:
    """Updates around one direction of length 0.5, with E‖b‖² = 0.25 + 6·0.3²."""
    return rng.normal(scale=0.3, size=(count, DIM)) + 0.5 * np.eye(DIM)[0]


@pytest.mark.parametrize("cohort", [Everyone(), FixedSize(8), Poisson(0.2)], ids=lambda c: str(c))
def test_the_signal_of_a_cohort_is_that_of_drawn_ones(cohort: Cohort) -> None:
    """And from the signal of a round, the population's own mean is found again."""
    rng = np.random.default_rng(0)
    all_of_them = vectors(rng, POPULATION)
    mean = all_of_them.mean(axis=0)
    spread = Spread(float(mean @ mean), float((all_of_them**2).sum(axis=1).mean()))
    recipe = replace(algorithms.clipped_fedavg(clip=9.0), cohort=cohort)
    sums = [all_of_them[cohort.draw(POPULATION, rng)].sum(axis=0) for _ in range(4000)]
    signal = math.sqrt(np.mean(np.square(sums).sum(axis=1))) / cohort.expected(POPULATION)
    predicted = spread.signal(recipe, DIM, POPULATION)
    assert predicted == pytest.approx(signal, rel=0.02)
    if not isinstance(cohort, Everyone):
        assert math.sqrt(spread.mean) < 0.95 * predicted  # so the draw's part is tested
    found = Spread.measured(signal, spread.square, cohort, POPULATION)
    assert found.mean == pytest.approx(spread.mean, rel=0.06)
    assert Spread.measured(0.0, 1.0, cohort, POPULATION).mean <= 0.0
    assert Spread(-1.0, 0.1).signal(recipe, DIM, POPULATION) == 0.0
    assert Spread(0.0, 0.0).cosine == 0.0


def test_rounding_adds_its_variance() -> None:
    recipe = algorithms.dp_norm_fedavg_discrete(clients=10, levels=4)
    rng, dim = np.random.default_rng(2), 300
    rows = torch.from_numpy(rng.normal(size=(200, dim)))
    rows /= rows.norm(dim=1, keepdim=True)
    recipe = replace(recipe, quantize=algorithms.dp_norm_fedavg_qtdl(10, levels=4).quantize)
    steps = recipe.quantize(rows.float(), recipe.bound.norms(dim), rng)
    grown = (steps.double() / 4).square().sum(dim=1).mean() - 1
    fine = rounding(replace(recipe, bound=Normalize(1.0)), dim)
    assert fine == pytest.approx(dim / 16 / 6)
    # coordinates far below the grid are rounded with less variance than evenly spread ones
    assert 0.5 * fine < grown < 1.2 * fine
    assert rounding(algorithms.dp_fedavg(), dim) == 0.0


def test_assumed_updates_are_bounded_by_the_recipe_s_own_bound() -> None:
    assert AssumedUpdates(0.25, 3.0).spreads(Clip(2.0), 9)[0].square == pytest.approx(4.0, rel=1e-5)
    assert AssumedUpdates(0.25, 1.0).spreads(Clip(2.0), 9)[0].mean == pytest.approx(0.25)
    assert AssumedUpdates(0.25).spreads(Clip(2.0), 9)[0] == Spread(1.0, 4.0)
    smooth = AssumedUpdates(1.0, 1.0).spreads(SmoothNormalize(1.0), 9)[0]
    assert smooth.square == pytest.approx(0.25, rel=1e-5)
    with pytest.raises(UserError, match="--norm"):
        AssumedUpdates(0.5).spreads(Unbounded(), 9)
    for wrong in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(UserError, match="cosine"):
            AssumedUpdates(wrong)
    with pytest.raises(UserError, match="norm"):
        AssumedUpdates(0.5, math.nan)


def test_seen_norms_are_bounded_anew_when_c_moves() -> None:
    seen = MeasuredUpdates((torch.tensor([1.0, 3.0]).double(),), (0.5,), "a pilot")
    assert seen.spreads(Clip(2.0), 9)[0].square == pytest.approx((1 + 4) / 2, rel=1e-5)
    assert seen.spreads(Clip(10.0), 9)[0].mean == pytest.approx(0.5 * (1 + 9) / 2)
    assert seen.norm == 2.0
    assert Clip(2.0).stretched(3.0) == Clip(6.0)
    assert AdaptiveClip(start=1.0).stretched(3.0) == AdaptiveClip(start=3.0)
    assert SmoothNormalize(0.1).stretched(3.0) is None


KINDS: dict[str, Callable[[], Recipe]] = {
    "gaussian": lambda: algorithms.dp_fedavg(clip=2.0, rate=0.5, noise_multiplier=1.5),
    "at clients": lambda: algorithms.dp_fedavg(rate=0.3, noise_multiplier=1.5, noise_at="client"),
    "rounded": lambda: algorithms.dp_norm_fedavg(rate=0.5, levels=2, noise_multiplier=0.3),
    "secagg": lambda: algorithms.dp_norm_fedavg_secagg(clients=7, sigma=2.0, support=20),
    "narrow": lambda: algorithms.dp_norm_fedavg_discrete(clients=7, sigma=0.4, support=3),
    "binomial": lambda: algorithms.dp_norm_fedavg_binomial(clients=7, trials=40),
    "laplace": lambda: algorithms.dp_norm_fedavg_qtdl(clients=7, alpha=0.3, support=9),
    "memory": lambda: algorithms.fed_alpha_normec(rate=0.5, noise_multiplier=2.0),
    "examples": lambda: algorithms.dp_sgd(rate=0.05, noise_multiplier=2.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_run_is_the_predicted_one(kind: str) -> None:
    """To 5%, with 650 coordinates and 6 rounds; 20 clients, or 1437 examples."""
    recipe, data = KINDS[kind](), load("digits").split(Iid(20))
    result = train(recipe, data, rounds=6)
    population = len(data.labels) if recipe.unit == "example" else 20
    predicted = noise_norm(recipe, 650, population, 1)
    measured = np.mean([record.noise for record in result.records])
    assert measured == pytest.approx(predicted, rel=0.05)


def test_no_noise_has_no_norm() -> None:
    assert deviation(algorithms.fedavg(), 10, 10, 1) == 0.0
