"""The contract of a quantizer: whole grid steps within its declared norms, for every coin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.parts.bound import within
from fedveil.parts.checks import repeatable
from fedveil.parts.quantize import Quantize

DIMS, NORMS = (1, 2, 7, 100), (1.0, 0.37, 62.5)
SLACK = 1 + 1e-9  # of float64 sums in this check


class EqualCoins:
    """A generator whose every uniform number is the same: all coins fall the same way."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, shape: Any = None) -> np.ndarray:
        """The same number, as often as asked."""
        return np.full(shape, self.value)


def check_quantizer(quantize: Quantize) -> None:
    """Raise unless messages are on the grid, within `quantize.norms`, and moved by a step at most.

    Tries rows of 1 to 100 coordinates up to the bound's length, with coins that all fall the same
    way and with random ones, and checks that grouping rows changes nothing. It cannot try every
    coin: a norm that is exceeded with a small chance passes.
    """
    for dim in DIMS:
        for norm in NORMS:
            bound = within(norm, dim)
            rows = bounded_rows(bound)
            _draws_from_its_stream(quantize, rows, bound)
            for rng in _coins():
                _check(quantize, rows, bound, quantize(rows, bound, rng))
            _grouping(quantize, rows, bound)


def bounded_rows(bound: Norms) -> Tensor:
    """Rows up to the bound's length: corners, axes, halves of a step, tiny and random ones."""
    rng = np.random.default_rng(0)
    dim = bound.dim
    axis = np.eye(dim)[0]
    shapes = [np.zeros(dim), axis, -axis, np.ones(dim), -np.ones(dim), np.arange(dim) - dim / 2]
    shapes += [rng.normal(size=dim) for _ in range(20)]
    unit = [shape / max(np.linalg.norm(shape), 1e-12) for shape in shapes]
    lengths = (1.0, 0.5, 0.03, 1e-6)
    rows = np.stack([length * shape for length in lengths for shape in unit])
    return torch.from_numpy(rows * bound.l2 * (1 - 2.0**-20)).float()


def _coins() -> Iterator[Any]:
    yield from (EqualCoins(0.0), EqualCoins(1 - 2.0**-53), EqualCoins(0.5))
    yield from (np.random.default_rng(seed) for seed in range(20))


def _check(quantize: Quantize, rows: Tensor, bound: Norms, messages: Tensor) -> None:
    declared = quantize.norms(bound)
    if declared.grid is not None:
        kind = messages.dtype
        assert kind == torch.int64, f"{quantize} gave {kind}, not whole steps (int64)"
    values = messages.double() * (declared.grid or 1.0)
    for order, allowed in ((1, declared.l1), (2, declared.l2), (np.inf, declared.linf)):
        longest = float(torch.linalg.vector_norm(values, ord=order, dim=1).max())
        assert longest <= allowed * SLACK, (
            f"{quantize} sent an L{order} norm of {longest:.6g}, above the declared {allowed:.6g}"
        )
    moved = float((values - rows.double()).abs().max())
    allowed = declared.grid or 0.0
    assert moved <= allowed * SLACK, f"{quantize} moved a coordinate by {moved}, a step: {allowed}"


def _draws_from_its_stream(quantize: Quantize, rows: Tensor, bound: Norms) -> None:
    assert repeatable(lambda rng: quantize(rows, bound, rng)), (
        f"{quantize} makes other messages from an equal stream; draw from `rng` alone"
    )


def _grouping(quantize: Quantize, rows: Tensor, bound: Norms) -> None:
    """The same stream gives the same messages, whether rows come together or a few at a time."""
    together = quantize(rows, bound, np.random.default_rng(7))
    for size in (1, 3):
        rng = np.random.default_rng(7)
        parts = [quantize(rows[i : i + size], bound, rng) for i in range(0, len(rows), size)]
        assert torch.equal(torch.cat(parts), together), (
            f"{quantize} depends on grouping: groups of {size} give other messages than all at once"
        )
