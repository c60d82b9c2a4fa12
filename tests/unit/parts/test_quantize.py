"""Rounding: on the grid, within its norms, unbiased or never longer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts import quantize as module
from fedveil.parts.bound import Bound, Clip, Normalize, SmoothNormalize, within
from fedveil.parts.quantize import (
    ConditionalRound,
    NoQuantization,
    Quantize,
    StochasticRound,
    TowardZero,
)
from fedveil.testing.bounds import ROWS, SPECIAL, bounded

ROUNDED = [StochasticRound, ConditionalRound, TowardZero]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check_norms(quantize: Quantize, rows: Tensor, bound: Bound, seed: int = 0) -> None:
    """Whole numbers, and every norm of every row as stated, in grid steps."""
    before = bound.norms(rows.shape[1])
    steps = quantize(bounded(bound, rows), before, rng(seed))
    allowed = quantize.norms(before)
    assert steps.dtype == torch.int64
    assert allowed.grid is not None
    for row in steps.tolist():
        assert max(map(abs, row)) <= allowed.steps.linf
        assert sum(x * x for x in row) <= allowed.steps.l2**2 * (1 + 1e-12)
        assert sum(map(abs, row)) <= allowed.steps.l1 * (1 + 1e-12)


@pytest.mark.parametrize("kind", ROUNDED)
@settings(max_examples=150, deadline=None)
@given(
    row=ROWS,
    levels=st.integers(1, 300),
    bound=st.sampled_from([Clip(0.37), Normalize(62.5), SmoothNormalize(0.1)]),
    seed=st.integers(0, 10),
)
def test_messages_of_arbitrary_floats_lie_within_the_norms(kind, row, levels, bound, seed) -> None:
    check_norms(kind(levels), torch.tensor([row], dtype=torch.float32), bound, seed)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("levels", [1, 16, 2**24])
def test_special_values_in_every_coordinate_and_in_one(kind, value: float, levels: int) -> None:
    rows = torch.stack([torch.full((200,), value), torch.ones(200)])
    rows[1, -1] = value
    check_norms(kind(levels), rows, Normalize(0.7))


def test_sensitivities_of_a_rounded_unit_vector_in_grid_steps() -> None:
    """Δ₂ ≤ 2s + 2√d, Δ₁ ≤ 2s√d + 2d, Δ∞ ≤ 2s for any two inputs."""
    levels, dim = 64, 100
    change = StochasticRound(levels).norms(within(1.0, dim)).sensitivity("replace-one")
    assert change.grid == 1 / levels
    assert change.l2 * levels == pytest.approx(2 * levels + 2 * math.sqrt(dim))
    assert change.l1 * levels == pytest.approx(2 * levels * math.sqrt(dim) + 2 * dim)
    assert change.linf * levels == pytest.approx(2 * levels)


@pytest.mark.parametrize("kind", [StochasticRound, ConditionalRound])
def test_a_coordinate_beyond_the_bound_by_a_rounding_is_held_to_the_largest_level(kind) -> None:
    rows = torch.tensor([[1.0 + 2**-22, 0.0], [0.0, -1.0 - 2**-22]])
    steps = kind(2**24)(rows, within(1.0, 2), rng())
    assert int(steps.abs().max()) == 2**24


# ---- without bias


@pytest.mark.parametrize("kind", [StochasticRound, ConditionalRound])
def test_rounding_is_unbiased(kind) -> None:
    """Conditional rounding, too, while a row is short: then it is never drawn again."""
    values = torch.tensor([0.0, 0.1, 0.333, -0.377, 0.1234, -0.01, 0.2]).repeat(20_000, 1)
    steps = kind(4)(values, within(1.0, 7), rng())
    error = (steps.double().mean(dim=0) / 4 - values[0]).abs()
    # A grid step of 1/4 has a standard deviation of at most 1/8; five standard errors.
    assert (error < 5 * 0.125 / math.sqrt(20_000)).all()


def test_a_biased_rounding_would_be_noticed() -> None:
    values = torch.full((20_000, 1), 0.1)
    steps = TowardZero(4)(values, within(1.0, 1), rng())
    assert abs(float(steps.double().mean()) / 4 - 0.1) > 5 * 0.125 / math.sqrt(20_000)


# ---- ConditionalRound

LONG = torch.full((1, 16), 0.25)  # of norm 1: on a grid of 1, Bin(16, ¼) coordinates become 1


def test_long_draws_are_drawn_again_and_come_out_short() -> None:
    rows, bound = LONG.repeat(4000, 1), within(1.0, 16)
    quantize = ConditionalRound(1)
    longest = quantize.norms(bound).steps.l2
    assert longest == pytest.approx(math.sqrt(8))  # 1 + 16/4 + (1 + 4/2)
    first = StochasticRound(1)(rows, bound, rng(1))
    assert ((first * first).sum(dim=1) > 8).any()  # so some had to be drawn again
    steps = quantize(rows, bound, rng(1))
    lengths = (steps * steps).sum(dim=1)
    assert int(lengths.max()) == 8
    assert lengths.unique().tolist() == list(range(9))  # none was cut to zero for being long only


def test_what_was_short_enough_is_left_alone() -> None:
    rows, bound = LONG.repeat(4000, 1), within(1.0, 16)
    uniform = torch.from_numpy(rng(1).random((4000, 17)))
    once = torch.floor(rows.double() + uniform[:, :-1]).long()
    short = (once * once).sum(dim=1) <= 8
    steps = ConditionalRound(1)(rows, bound, rng(1))
    assert 0 < int((~short).sum()) < 200
    assert torch.equal(steps[short], once[short])


def test_the_chance_of_a_long_draw_is_below_the_theorem_s() -> None:
    """At most β = e^(−1/2), Kairouz et al. 2021: else drawing again could take long."""
    for levels, dim in [(1, 16), (4, 100), (16, 400)]:
        bound = within(1.0, dim)
        rows = torch.full((2000, dim), 1 / math.sqrt(dim))
        first = StochasticRound(levels)(rows, bound, rng(2))
        longest = ConditionalRound(levels).norms(bound).steps.l2
        assert ((first * first).sum(dim=1) > longest**2).double().mean() < math.exp(-0.5)


def test_after_too_many_draws_the_message_is_cut_towards_zero(monkeypatch) -> None:
    rows, bound = torch.cat([LONG * 0.99] * 4000), within(1.0, 16)
    again = ConditionalRound(1)(rows, bound, rng(1))
    monkeypatch.setattr(module, "RETRIES", 0)
    steps = ConditionalRound(1)(rows, bound, rng(1))
    changed = (steps != again).any(dim=1)
    assert 0 < int(changed.sum()) < 200
    assert not steps[changed].any()  # trunc(0.2475) = 0
    assert again[changed].any(dim=1).all()


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("sizes", [[4000], [1, 3999], [1500, 2500], [7, 1, 3992]])
def test_grouping_of_rows_is_no_matter(kind, sizes: list[int]) -> None:
    """Also where rows are drawn again: each from its own seed."""
    rows, bound = LONG.repeat(4000, 1), within(1.0, 16)
    whole = kind(1)(rows, bound, rng(5))
    stream = rng(5)
    parts = [kind(1)(part, bound, stream) for part in rows.split(sizes)]
    assert torch.equal(torch.cat(parts), whole)


def test_drawing_again_leaves_hardly_any_bias() -> None:
    """On a grid where about one draw in 130 is too long; E[q] = ¼ without the condition."""
    steps = ConditionalRound(1)(LONG.repeat(20_000, 1), within(1.0, 16), rng(3))
    mean = float(steps.double().mean())
    assert 0.245 < mean < 0.25
    cut = StochasticRound(1)(LONG.repeat(20_000, 1), within(1.0, 16), rng(3))
    assert abs(float(cut.double().mean()) - 0.25) < 0.002


@pytest.mark.parametrize(("levels", "dim"), [(1, 3), (16, 50), (64, 10_000)])
def test_a_conditional_rounding_s_norm_is_the_stated_formula(levels: int, dim: int) -> None:
    """√(C² + g²d/4 + g(C + g√d/2)), far below C + g√d in high dimension."""
    bound = within(2.0, dim)
    norms, g = ConditionalRound(levels).norms(bound), 2.0 / levels
    root = math.sqrt(dim)
    assert norms.l2**2 == pytest.approx(4 + g * g * dim / 4 + g * (2 + g * root / 2))
    assert norms.l1 == pytest.approx(norms.l2 * root)
    assert norms.linf == 2.0
    if dim == 10_000:
        assert norms.l2 < 0.6 * StochasticRound(levels).norms(bound).l2


# ---- TowardZero


@settings(max_examples=300, deadline=None)
@given(
    row=ROWS,
    levels=st.sampled_from([1, 3, 1000, 2**24]),
    bound=st.sampled_from([Clip(1.0), Clip(1e-7), Normalize(3.3), SmoothNormalize(1e-3)]),
)
def test_cutting_towards_zero_lets_no_norm_grow(row, levels: int, bound: Bound) -> None:
    """Real bounds leave room for the rounding of one product, so ‖q‖ ≤ C holds without any."""
    rows = bounded(bound, torch.tensor([row], dtype=torch.float32))
    before = bound.norms(len(row))
    steps = TowardZero(levels)(rows, before, rng())[0].tolist()
    grid = before.linf / levels
    for cut, exact in zip(steps, rows[0].tolist(), strict=True):
        assert abs(cut) * grid <= abs(exact) * (1 + 1e-15)
        assert abs(exact) - abs(cut) * grid <= grid * (1 + 1e-9)
        assert cut * exact >= 0
    assert math.sqrt(sum(cut * cut for cut in steps)) <= levels
    assert TowardZero(levels).norms(before) == before.__class__(
        before.dim, before.l1, before.l2, before.linf, grid
    )


def test_towards_zero_uses_no_randomness() -> None:
    stream = rng(7)
    rows = torch.tensor([[0.99, -0.99, 0.5]])
    assert TowardZero(2)(rows, within(1.0, 3), stream).tolist() == [[1, -1, 1]]
    assert stream.random() == rng(7).random()


# ---- Exact, and what is refused


def test_exact_changes_nothing() -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert NoQuantization()(rows, within(1.0, 4), rng()) is rows
    assert NoQuantization().norms(within(1.0, 4)) == within(1.0, 4)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("wrong", [0, -3, 1.5])
def test_levels_are_a_whole_number(kind, wrong: int) -> None:
    with pytest.raises(UserError, match="whole number"):
        kind(wrong)
