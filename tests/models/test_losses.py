from __future__ import annotations

import math

import pytest
import torch

from fedveil.models.losses import LOSSES, SLOPES, correct


def test_cross_entropy_of_equal_logits_is_the_log_of_the_classes() -> None:
    losses = LOSSES["cross_entropy"](torch.zeros(3, 5), torch.tensor([0, 2, 4]))
    torch.testing.assert_close(losses, torch.full((3,), math.log(5)))


def test_cross_entropy_of_a_sequence_is_the_mean_over_its_positions() -> None:
    outputs = torch.tensor([[[0.0, 0.0], [100.0, 0.0]], [[0.0, 100.0], [0.0, 0.0]]])
    losses = LOSSES["cross_entropy"](outputs, torch.tensor([[0, 0], [0, 1]]))
    expected = torch.tensor([math.log(2) / 2, (100 + math.log(2)) / 2])
    torch.testing.assert_close(losses, expected)


def test_half_squared_takes_columns_without_broadcasting() -> None:
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, 4.0])
    assert LOSSES["half_squared"](outputs, targets).tolist() == [2.0, 0.5]


def test_correct_counts_examples_and_positions() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    assert correct(outputs, torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    assert correct(outputs[None], torch.tensor([[1, 1]])).tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "length"), [("cross_entropy", None), ("cross_entropy", 4), ("half_squared", None)]
)
def test_slopes_are_the_gradients_of_weighted_losses(name: str, length: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (6,) if length is None else (6, length)
    classes = (5,) if name == "cross_entropy" else (1,)
    outputs = torch.randn(*shape, *classes, generator=generator, requires_grad=True)
    labels = torch.randint(5, shape, generator=generator)
    targets = labels if name == "cross_entropy" else labels.float()
    weights = torch.rand(6, generator=generator)
    (expected,) = torch.autograd.grad((LOSSES[name](outputs, targets) * weights).sum(), outputs)
    assert torch.allclose(SLOPES[name](outputs.detach(), targets, weights), expected, atol=1e-6)
