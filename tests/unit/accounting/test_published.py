"""Correlated noise against published facts: coefficients, optimal buffers, losses, events.

The facts are those of Google DeepMind's jax_privacy (commit 8967688, `matrix_factorization` and
`accounting`, with their tests) and of the papers that it cites: Dvijotham et al. 2024
(arXiv 2404.16706) and Choquette-Choo et al. 2023 (arXiv 2306.08153).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.correlation import Column, energy, prefix_errors, square_root

# jax_privacy, buffered_toeplitz_test.test_optimize_single_participation_golden: two buffers with
# the least largest error for n = 100,000 rounds of one participation.
ROUNDS = 100_000
WEIGHTS, DECAYS = (0.0122853238, 0.1878393665), (0.9999528892, 0.9857068667)


def max_loss(column: Column, rounds: int, separation: int, most: int) -> float:
    """Sensitivity times the largest error of a prefix sum, which is that of the last."""
    sensitivity = math.sqrt(energy.__wrapped__(column, rounds, separation, most))
    return sensitivity * prefix_errors(column, rounds)[1]


def mathias(rounds: int) -> float:
    """1 + log(n)/π, about the least loss of any matrix.  arXiv 2404.16706, Eq. (2.8)."""
    return 1 + math.log(rounds) / math.pi


def test_the_inverse_of_the_square_root_has_the_published_coefficients() -> None:
    """jax_privacy, toeplitz_test: 1, −1/2, −1/8, −1/16, −5/128."""
    found = square_root(5).inverse(5)
    assert found == pytest.approx([1, -1 / 2, -1 / 8, -1 / 16, -5 / 128], rel=1e-12)


def test_the_published_buffers_have_the_least_loss_here_too() -> None:
    """Another weight or decay by 2% makes the loss larger, to the same extent on both sides.

    At a wrong sensitivity or error this point would not be a minimum: the differences are of second
    order, about 1e-4, and a slope of the loss would show in the first order, about 1e-2.
    """
    least = max_loss(Column(weights=WEIGHTS, decays=DECAYS), ROUNDS, ROUNDS, 1)
    for place, factor in itertools.product(range(2), (0.98, 1.02)):
        weights, memories = np.array(WEIGHTS), 1 - np.array(DECAYS)
        weights[place] *= factor
        memories[place] *= factor
        for column in (
            Column(weights=tuple(map(float, weights)), decays=DECAYS),
            Column(weights=WEIGHTS, decays=tuple(map(float, 1 - memories))),
        ):
            assert 1 < max_loss(column, ROUNDS, ROUNDS, 1) / least < 1.0002


def test_losses_are_within_the_published_factors_of_the_bound() -> None:
    """Two buffers: at most 1.16 at n = 100,000. The square root: Σ c_j², just above the bound."""
    buffers = max_loss(Column(weights=WEIGHTS, decays=DECAYS), ROUNDS, ROUNDS, 1)
    assert 1.12 < buffers / mathias(ROUNDS) < 1.16
    for rounds in (10, 100, 2_000):
        column = square_root(rounds)
        loss = max_loss(column, rounds, rounds, 1)
        assert loss == pytest.approx(sum(c * c for c in column.coefficients), rel=1e-9)
        assert mathias(rounds) < loss < mathias(rounds) + 0.07


@pytest.mark.parametrize(("rounds", "bands"), [(128, 16), (100, 10), (130, 16)])
def test_turns_have_the_event_of_amplified_banded_noise(rounds: int, bands: int) -> None:
    """jax_privacy, accounting.amplified_bandmf_event: ⌈n/b⌉ releases sampled with probability q.

    The noise multiplier is over the norm of a column. ε by dp-accounting itself.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    rate, multiplier, column = 0.01, 0.7, square_root(bands)
    ratio = multiplier * math.sqrt(energy(column, bands, bands, 1))
    mine = events.CyclicSampled(rate, events.Correlated(ratio, column, separation=bands))
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))
    theirs = PLDAccountant().compose(dp.SelfComposedDpEvent(step, math.ceil(rounds / bands)))
    found = accounting.epsilon(events.Composed(mine, rounds), 1e-6)
    assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-3)


def test_without_sampling_the_run_is_one_gaussian_release() -> None:
    """jax_privacy, toeplitz_test.test_helper_stddev_at_max_bands: n = 100, b = 10, (2, 1e-6).

    The standard deviation is that of one Gaussian release times √k·‖c‖, k = n/b.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    column, multiplier = square_root(10), 2.2
    sensitivity = math.sqrt(10 * sum(c * c for c in column.coefficients))
    run = events.Correlated(multiplier * sensitivity, column, separation=10, most=10)
    theirs = PLDAccountant().compose(dp.GaussianDpEvent(multiplier)).get_epsilon(1e-6)
    found = accounting.epsilon(events.Composed(run, 100), 1e-6)
    assert found == pytest.approx(theirs, rel=1e-3)
