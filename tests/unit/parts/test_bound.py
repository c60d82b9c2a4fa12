"""Every bound holds its contract for arbitrary floats, against rounding too."""

from __future__ import annotations

import math

import pytest
import torch

from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Clip, Normalize, SmoothNormalize, Unbounded
from fedveil.testing.bounds import bounded, check_bound

BOUNDS: list[Bound] = [
    Clip(1.0),
    Clip(1e-6),
    Clip(31.25),
    Clip(1e30),
    Normalize(1.0),
    Normalize(1e-6),
    Normalize(62.5),
    SmoothNormalize(0.01),
    SmoothNormalize(1e-30),
    SmoothNormalize(1e6),
]


@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_every_bound_keeps_its_contract(bound: Bound) -> None:
    check_bound(bound)


def test_a_clip_without_its_margin_would_exceed_the_bound() -> None:
    """The contract test has power: plain C/‖w‖ rounds above C for some of these rows."""
    rows = torch.randn(200, 100, generator=torch.Generator().manual_seed(0)) * 100
    naive = rows * (1.0 / rows.norm(dim=1, keepdim=True))
    assert any(exact_norm(row) > 1.0 for row in naive)


def exact_norm(row: torch.Tensor) -> float:
    """‖row‖₂ with no more than one rounding."""
    return math.hypot(*row.double().tolist())


def test_clip_leaves_small_updates_alone_and_keeps_directions() -> None:
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0]])
    messages = bounded(Clip(1.0), rows)
    assert torch.equal(messages[0], rows[0])
    assert torch.allclose(messages[1], torch.tensor([0.6, 0.8]), rtol=2e-6)


def test_normalize_sends_the_scaled_direction_and_zero_for_zero() -> None:
    messages = bounded(Normalize(5.0), torch.tensor([[0.0, 0.0], [3e-3, 4e-3]]))
    assert torch.equal(messages[0], torch.zeros(2))
    assert torch.allclose(messages[1], torch.tensor([3.0, 4.0]), rtol=2e-6)


def test_smooth_normalize_is_the_paper_s_formula() -> None:
    message = bounded(SmoothNormalize(1.0), torch.tensor([[3.0, 4.0]]))[0]
    assert torch.allclose(message, torch.tensor([0.5, 4 / 6]), rtol=2e-6)


def test_unbounded_is_honest_about_it() -> None:
    assert not Unbounded().norms(3).bounded


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", [Clip, Normalize, SmoothNormalize])
def test_a_bound_must_be_a_positive_number(kind: type, wrong: float) -> None:
    with pytest.raises(UserError, match="must be a number above 0"):
        kind(wrong)
