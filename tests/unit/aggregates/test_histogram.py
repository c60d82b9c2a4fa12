"""Ranges and quantiles from noisy histograms: found with enough units, and never far away."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import Desk
from fedveil.aggregates.histogram import COARSE, NoisyHistogram, histogram, refined


def of(values: np.ndarray, precision: float = 1.0, edges: np.ndarray = COARSE) -> NoisyHistogram:
    desk = Desk(Allowance(precision, 1e-6), np.random.default_rng(0))
    return histogram(desk, np.arange(len(values)), values, edges, precision)


LAWS = {
    "ages": lambda rng: rng.uniform(18, 90, 2000),
    "sodium": lambda rng: rng.normal(140, 4, 2000),
    "years": lambda rng: rng.integers(1980, 2025, 2000).astype(float),
    "costs": lambda rng: rng.lognormal(6, 1.5, 2000),
    "counts": lambda rng: rng.poisson(0.7, 2000).astype(float),
    "flags": lambda rng: (rng.random(2000) < 0.2).astype(float),
    "losses": lambda rng: -rng.lognormal(3, 1, 2000),
    "changes": lambda rng: rng.normal(0, 10, 2000),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_range_covers_most_values_and_is_not_far_too_wide(law: str) -> None:
    values = LAWS[law](np.random.default_rng(3))
    edges = refined(of(values, 0.01))  # noise of 10 units per bin, of 2,000
    assert edges is not None
    inside = np.mean((values >= edges[0]) & (values <= edges[-1]))
    assert inside > 0.9
    fine = of(values, 0.01, edges)
    low, high = fine.quantile(0.05), fine.quantile(0.95)
    bin = edges[-1] - edges[-2]  # quantiles are interpolated within bins
    ranks = np.mean(values < low - bin), np.mean(values <= high + bin)
    assert ranks[0] < 0.12
    assert ranks[1] > 0.88


def test_a_quantile_is_exact_without_noise() -> None:
    edges = np.linspace(0, 10, 11)
    flat = NoisyHistogram(edges, np.full(10, 5.0), 0.0)
    assert [flat.quantile(q) for q in (0, 0.25, 0.5, 1)] == pytest.approx([0, 2.5, 5, 10], abs=1e-6)
    assert NoisyHistogram(edges, np.full(10, -1.0), 1.0).quantile(0.5) == 5


def test_noise_alone_shows_no_range_or_a_short_one() -> None:
    """Of 200 histograms of noise, at most one in ten seems to have a range (5.7 % expected)."""
    rng, shown = np.random.default_rng(0), 0
    for _ in range(200):
        shown += NoisyHistogram(COARSE, rng.normal(0, 1, len(COARSE) - 1), 1.0).range() is not None
    assert shown <= 20


def test_a_rank_error_covers_what_noise_does() -> None:
    rng, edges = np.random.default_rng(0), np.linspace(0, 16, 17)
    stated = NoisyHistogram(edges, np.full(16, 100.0), 10.0).rank_error()
    found = []
    for _ in range(300):
        noisy = NoisyHistogram(edges, 100 + rng.normal(0, 10, 16), 10.0)
        found.append(abs(noisy.quantile(0.5) / 16 - 0.5))
    assert np.mean(np.array(found) <= stated) > 0.95


def test_the_noise_of_empty_bins_does_not_stretch_the_quantiles() -> None:
    """All 480 units are in the second bin. 4.3 % of draws are expected to leave it."""
    rng, edges, stretched = np.random.default_rng(0), np.linspace(128, 256, 17), 0
    for _ in range(200):
        weights = rng.normal(0, 7, 16)
        weights[1] += 480
        found = NoisyHistogram(edges, weights, 7.0)
        stretched += not 136 <= found.quantile(0.05) < found.quantile(0.95) <= 144
    assert stretched <= 16
