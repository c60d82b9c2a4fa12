"""The contract of a bound: every message within its norms, and a function of one update alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.accounting.norms import Norms, declared
from fedveil.engines.bounding import bounded_rows
from fedveil.engines.updates import DenseUpdates
from fedveil.parts.bound import Bound
from fedveil.testing.states import driven

ROWS = st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=6)
SPECIAL = [0.0, math.nan, math.inf, -math.inf, 3.4e38, 1e-45, 1e-38, -1.5, 1e30]
ROUNDING = 1 + 1e-3  # of a bound's own float32 arithmetic, which the loop corrects for


def bounded(bound: Bound, rows: Tensor) -> Tensor:
    """The messages as the loop computes them."""
    updates = DenseUpdates(rows)
    dim = updates.rows().shape[1]
    limit = declared(bound, bound.norms(dim), dim)
    return bounded_rows(updates, updates.norms(), bound, limit)[0]


def check_bound(bound: Bound, dim: int | None = None) -> None:
    """Raise unless every message is finite and within all three norms of `bound.norms`.

    Tries updates of 1 to 5,000 coordinates, or of `dim` for a bound that is made for one model:
    NaN, ±∞, subnormal and huge values, and lengths from 1e-20 to 1e20. Also checks that an update's
    message does not depend on other updates, that a radial bound keeps directions, that
    `threshold` and `stretched`, where given, are true, and that the bound answers after all that as
    before. A bound that adapts is checked at thresholds that it moves to by itself.

    It cannot show that the norms hold for inputs that were not tried. Training does not rely on
    that: it shortens whatever a bound from outside fedveil returns to the norms it declares.
    """
    before = _answers(bound, dim)
    for one in _over_rounds(bound):
        _special_values(one, dim)
        _rows_of_many_lengths(one, dim)
        _one_update_at_a_time(one, dim or 30)
        _norms_fit_together(one, dim)
        _threshold_is_where_clipping_begins(one, dim or 40)
        if one.radial:
            _keeps_directions(one, dim or 50)
    _stretches(bound, dim or 7)
    _random_bits(bound, dim)
    _arbitrary_rows(bound, dim)
    after = _answers(bound, dim)
    assert before == after, (
        f"{bound} declares or sends {after} after its use, and {before} before; keep nothing in "
        "the bound between updates"
    )


def _sizes(dim: int | None, *usual: int) -> tuple[int, ...]:
    """The numbers of coordinates to try."""
    return usual if dim is None else (dim,)


def _answers(bound: Bound, dim: int | None) -> tuple[Norms, float]:
    """The norms that it declares, and the length of one message."""
    size = dim or 3
    row = torch.full((1, size), 1e3)
    return bound.norms(size), float(_by_itself(bound, row).double().norm())


def _over_rounds(bound: Bound) -> list[Bound]:
    """The bound itself; of one that adapts also those after many long or short updates."""
    if not bound.adapts:
        return [bound]
    courses = ((0.0, 40), (0.0, 400), (1.0, 40), (1.0, 400))
    return [bound, *(bound.at(driven(bound, *course)) for course in courses)]


def _check(bound: Bound, rows: Tensor) -> None:
    """What the loop sends is within the norms, and so is what the bound itself computes."""
    _check_norms(bound, bounded(bound, rows), 1.0, "sent")
    finite = rows[torch.isfinite(rows).all(dim=1)]
    _check_norms(bound, _by_itself(bound, finite), ROUNDING, "computed")


def _by_itself(bound: Bound, rows: Tensor) -> Tensor:
    """b of finite rows, by the bound alone: nothing is shortened afterwards."""
    if not bound.radial:
        return bound.rows(rows)
    scales = bound.scale(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    return rows * scales.float()[:, None]


def _check_norms(bound: Bound, messages: Tensor, slack: float, verb: str) -> None:
    norms = bound.norms(messages.shape[1])
    assert torch.isfinite(messages).all(), f"{bound} {verb} a number that is not finite"
    for order, allowed in ((1, norms.l1), (2, norms.l2), (math.inf, norms.linf)):
        lengths = torch.linalg.vector_norm(messages.double(), ord=order, dim=1)
        for row in messages[lengths > allowed * slack * (1 - 1e-9)]:
            found = _exact(row, order)
            assert found <= allowed * slack, (
                f"{bound} {verb} an L{order} norm of {found!r}, above its declared {allowed!r}"
            )


def _exact(row: Tensor, order: float) -> float:
    values = [abs(value) for value in row.double().tolist()]
    if order == 2:
        return math.hypot(*values)
    return math.fsum(values) if order == 1 else max(values)


def _random_bits(bound: Bound, dim: int | None) -> None:
    """Numbers of all magnitudes side by side, as likely large as small."""
    rng = np.random.default_rng(5)
    for size in _sizes(dim, *range(1, 7)):
        bits = rng.integers(2**32, size=(500, size), dtype=np.uint32)
        _check(bound, torch.from_numpy(bits.view(np.float32)))


def _arbitrary_rows(bound: Bound, dim: int | None) -> None:
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(row=ROWS)
    def holds(row: list[float]) -> None:
        repeated = np.resize(np.array(row, dtype=np.float32), dim or len(row))
        _check(bound, torch.from_numpy(repeated)[None])

    holds()


def _special_values(bound: Bound, dim: int | None) -> None:
    """In every coordinate, and in one."""
    for value in SPECIAL:
        for size in _sizes(dim, 1, 2, 1000):
            rows = torch.stack([torch.full((size,), value), torch.ones(size)])
            rows[1, -1] = value
            _check(bound, rows)


def _rows_of_many_lengths(bound: Bound, dim: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in _sizes(dim, 1, 3, 100, 5000):
        rows = torch.randn(50, size, generator=generator)
        _check(bound, rows * torch.logspace(-20, 20, 50)[:, None])


def _one_update_at_a_time(bound: Bound, size: int) -> None:
    """An update gives the same message alone, among others, and a second time."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, size, generator=generator) * torch.logspace(-3, 3, 12)[:, None]
    together = _by_itself(bound, rows)
    assert together.shape == rows.shape, (
        f"{bound} gave {tuple(together.shape)} for 12 × {size} numbers"
    )
    for again in (
        torch.cat([_by_itself(bound, row[None]) for row in rows]),
        _by_itself(bound, rows),
    ):
        apart = (again - together).abs().amax(dim=1)
        allowed = 1e-6 * together.abs().amax(dim=1) + 1e-40
        assert (apart <= allowed).all(), (
            f"{bound}: a message depends on other updates, so one client moves others"
        )


def _keeps_directions(bound: Bound, size: int) -> None:
    """b = s·w with one s ≥ 0 for all coordinates of a row."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(20, size, generator=generator) * torch.logspace(-3, 3, 20)[:, None]
    messages = bounded(bound, rows).double()
    for row, message in zip(rows.double(), messages, strict=True):
        scale = float(message @ row / (row @ row))
        assert scale >= 0, f"{bound} reversed the direction of a row"
        off = float((message - scale * row).norm())
        assert off <= 1e-6 * float(message.norm()) + 1e-40, f"{bound} changed a direction by {off}"


def _norms_fit_together(bound: Bound, only: int | None) -> None:
    """They are for the dimension asked; a radial bound allows all that its L2 norm implies."""
    for dim in _sizes(only, 1, 5, 1000):
        norms = bound.norms(dim)
        assert norms.dim == dim, f"{bound} declares {norms.dim} coordinates, not {dim}"
        smallest = min(norms.l1, norms.l2, norms.linf)
        assert smallest > 0, f"{bound} declares a norm of {smallest}"
        if not bound.radial:
            continue
        assert norms.linf >= norms.l2, (
            f"{bound}: an axis is longer than its L∞ norm of {norms.linf}"
        )
        assert norms.l1 >= norms.l2 * math.sqrt(dim) * (1 - 1e-12), f"{bound}: L1 is {norms.l1}"


def _threshold_is_where_clipping_begins(bound: Bound, size: int) -> None:
    """Diagnosis advises on it: shorter updates pass as they are, longer ones are shortened."""
    limit = bound.threshold
    if limit is None:
        return
    generator = torch.Generator().manual_seed(4)
    unit = torch.nn.functional.normalize(torch.randn(1, size, generator=generator))
    short, long = unit * (limit / 2), unit * (limit * 2)
    assert torch.equal(_by_itself(bound, short), short), (
        f"{bound} changes an update of half its threshold of {limit:g}"
    )
    assert not torch.equal(_by_itself(bound, long), long), (
        f"{bound} does not shorten an update of twice its threshold of {limit:g}"
    )


def _stretches(bound: Bound, size: int) -> None:
    """A plan varies C by it."""
    if (wider := bound.stretched(2.0)) is None:
        return
    for before, after in zip(_of(bound, size), _of(wider, size), strict=True):
        assert math.isclose(after, 2 * before), f"{bound} stretched twofold declares {after}"


def _of(bound: Bound, size: int) -> tuple[float, float, float]:
    norms = bound.norms(size)
    return norms.l1, norms.l2, norms.linf
