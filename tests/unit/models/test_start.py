from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedveil.models.linear import LinearRegression, SoftmaxRegression
from fedveil.models.lstm import CharLSTM
from fedveil.models.resnet import ResNet20
from fedveil.models.start import construct, initialise


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_same_generator_state_gives_the_same_weights_whatever_they_were() -> None:
    for make in (lambda: ResNet20(3, 10), lambda: CharLSTM(12)):
        first, second, other = construct(make, 1), construct(make, 2), construct(make, 2)
        for model, seed in ((first, 7), (second, 7), (other, 8)):
            initialise(model, torch.Generator().manual_seed(seed))
        assert torch.equal(weights(first), weights(second))
        assert not torch.equal(weights(first), weights(other))


def test_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    initialise(construct(lambda: ResNet20(3, 10)), torch.Generator().manual_seed(0))
    construct(lambda: CharLSTM(12), seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_follow_the_stated_laws() -> None:
    linear = construct(lambda: nn.Linear(100, 500))
    embedding = construct(lambda: nn.Embedding(50, 200))
    initialise(nn.Sequential(linear, embedding), torch.Generator().manual_seed(0))
    assert 0.099 < float(linear.weight.detach().max()) <= 0.1
    assert abs(float(linear.weight.detach().std()) - 0.1 / math.sqrt(3)) < 0.001
    assert 0.09 < float(linear.bias.detach().abs().max()) <= 0.1
    assert abs(float(embedding.weight.detach().std()) - 1) < 0.03


def test_convolution_counts_its_kernel_in_the_fan_in() -> None:
    layer = construct(lambda: nn.Conv2d(4, 64, 5, groups=2))
    initialise(layer, torch.Generator().manual_seed(0))
    bound = 1 / math.sqrt(2 * 25)
    assert 0.98 * bound < float(layer.weight.detach().abs().max()) <= bound


def test_norms_start_as_the_identity_and_convex_models_at_zero() -> None:
    norm = nn.GroupNorm(2, 4)
    nn.init.constant_(norm.weight, 5)
    nn.init.constant_(norm.bias, 5)
    initialise(norm, torch.Generator())
    assert norm.weight.tolist() == [1] * 4
    assert norm.bias.tolist() == [0] * 4
    for model in (SoftmaxRegression(5, 3), LinearRegression(5)):
        initialise(model, torch.Generator())
        assert not weights(model).any()


def test_padding_row_of_an_embedding_is_zero() -> None:
    layer = construct(lambda: nn.Embedding(4, 3, padding_idx=2))
    initialise(layer, torch.Generator().manual_seed(0))
    assert (layer.weight == 0).all(1).tolist() == [False, False, True, False]
