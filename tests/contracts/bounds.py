"""The contract of a bound: ‖b‖ ≤ C for arbitrary floats, as the loop really computes b."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.engines.updates import DenseUpdates
from fedveil.loop import bounded_rows, scales_of
from fedveil.parts.bound import Bound

ROWS = st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=6)
SPECIAL = [0.0, math.nan, math.inf, -math.inf, 3.4e38, 1e-45, 1e-38, -1.5, 1e30]


def bounded(bound: Bound, rows: Tensor) -> Tensor:
    """The messages as the loop makes them."""
    updates = DenseUpdates(rows)
    return bounded_rows(updates, scales_of(updates.norms(), bound))


def exact_norm(row: Tensor) -> float:
    return math.hypot(*row.double().tolist())


def check_bound(bound: Bound) -> None:
    """Raise unless every message is finite and at most as long as `bound.norms` says."""
    _arbitrary_rows(bound)
    _special_values(bound)
    _rows_of_many_lengths(bound)


def _check(bound: Bound, rows: Tensor) -> None:
    allowed = bound.norms(rows.shape[1]).l2
    for message in bounded(bound, rows):
        assert torch.isfinite(message).all(), f"{bound} sent {message}"
        assert exact_norm(message) <= allowed, f"{bound} sent a norm of {exact_norm(message)!r}"


def _arbitrary_rows(bound: Bound) -> None:
    @settings(max_examples=200, deadline=None)
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
