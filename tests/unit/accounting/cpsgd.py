"""Two references for integer noise: its exact privacy loss, and cpSGD's closed form.

They bracket the Rényi accounting of `fedveil.parts.discrete` from below and from above.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedveil.accounting.accountant import check_delta
from fedveil.errors import UserError

INTERVAL = 1e-4  # losses are rounded up to its multiples, once per coordinate
B, C, D = 1 / 3, 5 / 2, 2 / 3  # b_p, c_p (7√2/4, rounded up) and d_p of the theorem at p = ½


def coordinate_loss(masses: np.ndarray, move: int, interval: float = INTERVAL) -> Any:
    """dp-accounting's distribution of log P(y)/P(y − move), y ~ P, for noise with these masses.

    `masses` are those of consecutive whole numbers. Never below the true loss, and above it by less
    than `interval`. Covers both directions, whether or not P is symmetric.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    logs = {y: math.log(mass) for y, mass in enumerate(masses.tolist()) if mass > 0}
    moved = {y + move: log for y, log in logs.items()}
    return pld.from_two_probability_mass_functions(
        moved, logs, value_discretization_interval=interval, symmetric=False
    )


def composed_loss(masses: np.ndarray, moves: Sequence[int], interval: float = INTERVAL) -> Any:
    """The loss of independent noise on every coordinate, coordinate i moved by moves[i].

    Exact up to the interval times the number of coordinates that move, and never below the true
    loss.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    counts = Counter(int(move) for move in moves if move != 0)
    parts = [
        coordinate_loss(masses, move, interval).self_compose(count)
        for move, count in counts.items()
    ]
    nothing = pld.identity(value_discretization_interval=interval)
    return functools.reduce(lambda one, other: one.compose(other), parts) if parts else nothing


def closed_form(trials: int, dim: int, l1: float, l2: float, linf: float, delta: float) -> float:
    """An ε at which Bin(N, ½) on each of dim coordinates is (ε, δ)-DP; moves are in grid steps.

    Agarwal et al. 2018, Thm. 1 with p = ½ and s = 1; requires N/4 ≥ max(23·log(10d/δ), 2Δ∞).
    """
    check_delta(delta)
    variance = trials / 4
    least = max(23 * math.log(10 * dim / delta), 2 * linf)
    if variance < least:
        raise UserError(
            f"closed_form: {trials} trials are too few for Theorem 1 of cpSGD. "
            f"Use at least {math.ceil(4 * least)}."
        )
    tail, tenth = math.log(1.25 / delta), math.log(10 / delta)
    gaussian = l2 * math.sqrt(2 * tail / variance)
    curved = (l2 * C * math.sqrt(tenth) + l1 * B) / (variance * (1 - delta / 10))
    largest = linf * (2 / 3 * tail + D * math.log(20 * dim / delta) * tenth) / variance
    return gaussian + curved + largest
