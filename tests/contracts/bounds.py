"""The contract of a bound: radial, and ‖b‖ ≤ C for arbitrary floats, as the loop computes b."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil import loop
from fedveil.engines.updates import DenseUpdates
from fedveil.parts.bound import AdaptiveClip, Bound

ROWS = st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=6)
SPECIAL = [0.0, math.nan, math.inf, -math.inf, 3.4e38, 1e-45, 1e-38, -1.5, 1e30]


def bounded(bound: Bound, rows: Tensor) -> Tensor:
    """The messages as the loop makes them."""
    updates = DenseUpdates(rows)
    return loop.bounded_rows(updates, loop.scales_of(updates.norms(), bound))


def exact_norm(row: Tensor) -> float:
    return math.hypot(*row.double().tolist())


def check_bound(bound: Bound) -> None:
    """Raise unless every message is finite, at most as long as `bound.norms` says, and radial.

    A bound that moves by itself is checked at many of its thresholds.
    """
    for one in _at_thresholds(bound):
        _special_values(one)
        _rows_of_many_lengths(one)
        _keeps_directions(one)
        _norms_fit_together(one)
    _arbitrary_rows(bound)


def _at_thresholds(bound: Bound) -> list[Bound]:
    if not isinstance(bound, AdaptiveClip):
        return [bound]
    return [bound, *(bound.at(norm) for norm in (1e-12, 1e-3, 1.0, 1e12))]


def _check(bound: Bound, rows: Tensor) -> None:
    allowed = bound.norms(rows.shape[1]).l2
    for message in bounded(bound, rows):
        assert torch.isfinite(message).all(), f"{bound} sent {message}"
        assert exact_norm(message) <= allowed, f"{bound} sent a norm of {exact_norm(message)!r}"


def _arbitrary_rows(bound: Bound) -> None:
    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(row=ROWS)
    def holds(row: list[float]) -> None:
        _check(bound, torch.tensor([row], dtype=torch.float32))

    holds()


def _special_values(bound: Bound) -> None:
    """In every coordinate, and in one."""
    for value in SPECIAL:
        for size in (1, 2, 1000):
            rows = torch.stack([torch.full((size,), value), torch.ones(size)])
            rows[1, -1] = value
            _check(bound, rows)


def _rows_of_many_lengths(bound: Bound) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 3, 100, 5000):
        rows = torch.randn(50, size, generator=generator)
        _check(bound, rows * torch.logspace(-20, 20, 50)[:, None])


def _keeps_directions(bound: Bound) -> None:
    """b = s·w with one s ≥ 0 for all coordinates of a row."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(20, 50, generator=generator) * torch.logspace(-3, 3, 20)[:, None]
    messages = bounded(bound, rows).double()
    for row, message in zip(rows.double(), messages, strict=True):
        scale = float(message @ row / (row @ row))
        assert scale >= 0, f"{bound} turned a row around"
        off = float((message - scale * row).norm())
        assert off <= 1e-6 * float(message.norm()) + 1e-40, f"{bound} changed a direction by {off}"


def _norms_fit_together(bound: Bound) -> None:
    """No declared norm is below what the declared L2 norm allows."""
    for dim in (1, 5, 1000):
        norms = bound.norms(dim)
        assert norms.dim == dim, f"{bound} speaks of {norms.dim} coordinates, not {dim}"
        assert norms.linf >= norms.l2, (
            f"{bound}: an axis is longer than its L∞ norm of {norms.linf}"
        )
        assert norms.l1 >= norms.l2 * math.sqrt(dim) * (1 - 1e-12), f"{bound}: L1 is {norms.l1}"
