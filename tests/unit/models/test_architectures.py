from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedveil.errors import UserError
from fedveil.models.alexnet import AlexNet
from fedveil.models.cnn import SmallCNN
from fedveil.models.gpt import GPT, rotated
from fedveil.models.layers import StandardizedConv2d, group_count
from fedveil.models.linear import LinearRegression, SoftmaxRegression
from fedveil.models.losses import LOSSES
from fedveil.models.lstm import CharLSTM, LSTMLayer
from fedveil.models.mlp import MLP
from fedveil.models.mobilenet import MobileNetV2
from fedveil.models.resnet import ResNet18, ResNet20
from fedveil.models.start import construct, initialise
from fedveil.models.wideresnet import WideResNet


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    model = construct(make)
    initialise(model, torch.Generator().manual_seed(seed))
    return model


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


SIZES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "softmax": (lambda: SoftmaxRegression(784, 10), 7_850),
    "linear": (lambda: LinearRegression(200), 200),
    # Das et al. 2021 state both of these dimensions.
    "mlp on Fashion-MNIST": (lambda: MLP(784, (300, 300), 10), 328_810),
    "mlp on CIFAR-10": (lambda: MLP(3072, (600, 600), 10), 2_210_410),
    "mlp of W5": (lambda: MLP(784, (256, 128), 10), 235_146),
    "cnn": (lambda: SmallCNN(1, 28, 10), 26_010),
    "resnet20": (lambda: ResNet20(3, 10), 269_722),
    "resnet20, standardized": (lambda: ResNet20(3, 10, standardized=True), 269_722),
    "resnet18": (lambda: ResNet18(3, 10), 11_173_962),
    "lstm of Reddi et al. 2021": (lambda: CharLSTM(90), 820_522),
    "gpt on Shakespeare": (lambda: GPT(90), 793_344 + 90 * 128),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count_is_the_published_one(name: str) -> None:
    make, expected = SIZES[name]
    assert sum(p.numel() for p in construct(make).parameters()) == expected


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda: AlexNet(3, 32, 10), 3.25e6, 3.35e6),
        (lambda: AlexNet(1, 28, 10), 3.25e6, 3.35e6),
        (lambda: MobileNetV2(3, 10), 2.2e6, 2.4e6),
        (lambda: WideResNet(3, 10, 40, 4), 8.9e6 * 0.97, 8.9e6 * 1.03),
    ],
)
def test_parameter_count_is_about_the_published_one(
    make: Callable[[], nn.Module], low: float, high: float
) -> None:
    assert low <= sum(p.numel() for p in construct(make).parameters()) <= high


def test_alexnet_has_the_seven_layers_of_the_paper() -> None:
    layers = construct(lambda: AlexNet(3, 32, 10)).modules()
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in layers) == 7


def test_alexnet_keeps_the_signal_alive_through_its_layers() -> None:
    model = made(lambda: AlexNet(3, 32, 10))
    assert float(model(random(8, 3, 32, 32)).detach().std(0).mean()) > 0.01


FORWARDS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: SoftmaxRegression(784, 10), (1, 28, 28)),
    (lambda: MLP(784, (30, 30), 10), (1, 28, 28)),
    (lambda: MLP(12, (), 10), (12,)),
    (lambda: SmallCNN(1, 28, 10), (1, 28, 28)),
    (lambda: SmallCNN(3, 32, 10), (3, 32, 32)),
    (lambda: SmallCNN(2, 14, 10), (2, 14, 14)),
    (lambda: AlexNet(3, 32, 10), (3, 32, 32)),
    (lambda: AlexNet(1, 28, 10), (1, 28, 28)),
    (lambda: AlexNet(1, 17, 10), (1, 17, 17)),
    (lambda: MobileNetV2(1, 10), (1, 28, 28)),
    (lambda: ResNet18(1, 10), (1, 28, 20)),
    (lambda: ResNet20(3, 10), (3, 32, 32)),
    (lambda: ResNet20(1, 10), (1, 7, 9)),
    (lambda: ResNet20(1, 10, standardized=True), (1, 7, 9)),
    (lambda: WideResNet(3, 10, 16, 2), (3, 32, 32)),
]


@pytest.mark.parametrize(("make", "shape"), FORWARDS)
def test_logits_have_a_column_for_every_class(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    logits = made(make)(random(2, *shape))
    assert logits.shape == (2, 10)
    assert bool(logits.isfinite().all())


def test_lstm_gives_logits_at_every_position() -> None:
    model = made(lambda: CharLSTM(11, hidden=16))
    assert model(integers(11, 3, 5)).shape == (3, 5, 11)


def test_gpt_predicts_from_the_past_only_and_knows_the_order() -> None:
    model, tokens = made(lambda: GPT(11, 2, 16)), integers(11, 1, 6)
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-4)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(swapped)[:, 5], before[:, 5], atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = random(8), random(8, seed=2)
    turned = [rotated(part.expand(1, 1, 12, 8))[0, 0] for part in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in range(1, 6):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_linear_regression_gives_a_number_for_every_example() -> None:
    model = LinearRegression(3)
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    assert model(torch.eye(3)).tolist() == [1.0, 2.0, 3.0]


SMALL: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]] = {
    "softmax": (lambda: SoftmaxRegression(6, 3), random(2, 4, 6), integers(3, 2, 4)),
    "linear": (lambda: LinearRegression(6), random(2, 4, 6), random(2, 4, seed=3)),
    "mlp": (lambda: MLP(6, (5, 4), 3), random(2, 4, 6), integers(3, 2, 4)),
    "cnn": (lambda: SmallCNN(1, 28, 3), random(2, 4, 1, 28, 28), integers(3, 2, 4)),
    "alexnet": (lambda: AlexNet(1, 16, 3), random(2, 2, 1, 16, 16), integers(3, 2, 2)),
    "resnet20": (lambda: ResNet20(1, 3), random(2, 2, 1, 8, 8), integers(3, 2, 2)),
    "wideresnet": (lambda: WideResNet(1, 3, 10, 1), random(2, 2, 1, 8, 8), integers(3, 2, 2)),
    "lstm": (lambda: CharLSTM(7, 3, 8), integers(7, 2, 4, 5, seed=4), integers(7, 2, 4, 5)),
}


@pytest.mark.parametrize("name", SMALL)
def test_mapped_gradients_equal_those_of_each_client(name: str) -> None:
    make, inputs, labels = SMALL[name]
    models = [made(make, seed) for seed in range(2)]
    loss = LOSSES["half_squared" if name == "linear" else "cross_entropy"]

    def total(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(models[0], parameters, (x,)), y).mean()

    stacked = {k: v.detach() for k, v in stack_module_state(models)[0].items()}
    mapped = vmap(grad(total))(stacked, inputs, labels)
    for client, model in enumerate(models):
        loss(model(inputs[client]), labels[client]).mean().backward()  # type: ignore[no-untyped-call]
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(mapped[key][client], parameter.grad, rtol=1e-3, atol=1e-5)


BIG: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: MobileNetV2(1, 10), 8),
    (lambda: ResNet18(1, 10), 8),
    (lambda: WideResNet(3, 10, 40, 4), 8),
]


@pytest.mark.parametrize(("make", "size"), BIG)
def test_big_models_can_be_mapped_over_stacked_weights(
    make: Callable[[], nn.Module], size: int
) -> None:
    models = [made(make, seed) for seed in range(2)]
    stacked = {k: v.detach() for k, v in stack_module_state(models)[0].items()}
    channels = next(models[0].parameters()).shape[1]
    inputs = random(2, 1, channels, size, size)
    mapped = vmap(lambda p, x: functional_call(models[0], p, (x,)))(stacked, inputs)
    for client, model in enumerate(models):
        torch.testing.assert_close(mapped[client], model(inputs[client]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("make", "shape"), [f for f in FORWARDS if len(f[1]) == 3])
def test_no_example_sees_another_one(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, batch = made(make), random(3, *shape)
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]), rtol=1e-3, atol=1e-4)


def test_lstm_layers_equal_torchs_own() -> None:
    reference = construct(lambda: nn.LSTM(3, 6, num_layers=2, batch_first=True), seed=5)
    layers = [LSTMLayer(3, 6), LSTMLayer(6, 6)]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.input.weight.copy_(getattr(reference, f"weight_ih_l{index}"))
            layer.recurrent.weight.copy_(getattr(reference, f"weight_hh_l{index}"))
            biases = [getattr(reference, f"bias_{kind}_l{index}") for kind in ("ih", "hh")]
            layer.input.bias.copy_(biases[0] + biases[1])
    x = random(4, 7, 3)
    torch.testing.assert_close(layers[1](layers[0](x)), reference(x)[0])


def test_standardized_filters_have_mean_zero_and_norm_one() -> None:
    layer = made(lambda: StandardizedConv2d(3, 4, 3))
    assert isinstance(layer, StandardizedConv2d)
    weight = layer.standardized().flatten(1)
    torch.testing.assert_close(weight.mean(1), torch.zeros(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(4), rtol=1e-5, atol=0)
    before = layer(random(1, 3, 5, 5))
    with torch.no_grad():
        layer.weight.mul_(3).add_(1)
    assert layer.bias is not None
    torch.testing.assert_close(layer(random(1, 3, 5, 5)), before, rtol=1e-4, atol=1e-5)


def test_a_standardized_resnet20_does_not_change_with_the_scale_of_its_filters() -> None:
    model, images = made(lambda: ResNet20(1, 3, standardized=True)), random(2, 1, 8, 8)
    filters = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(filters) == 19
    before = model(images)
    with torch.no_grad():
        for layer in filters:
            layer.weight.mul_(3).add_(1)
    torch.testing.assert_close(model(images), before, rtol=1e-3, atol=1e-4)


def test_standardized_filter_of_equal_weights_is_finite_with_its_gradient() -> None:
    layer = construct(lambda: StandardizedConv2d(1, 1, 3))
    nn.init.constant_(layer.weight, 0.5)
    layer(random(1, 1, 3, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


def test_group_count_divides_every_number_of_channels() -> None:
    for channels in range(1, 600):
        groups = group_count(channels)
        assert channels % groups == 0
        assert 1 <= groups <= 32
        assert groups == 1 or channels // groups >= 4


@pytest.mark.parametrize("make", [lambda: SmallCNN(1, 13, 10), lambda: AlexNet(1, 15, 10)])
def test_too_small_an_image_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UserError, match="at least 1"):
        make()


def test_a_depth_no_wide_resnet_has_is_refused() -> None:
    with pytest.raises(UserError, match="depth 6·n"):
        WideResNet(3, 10, depth=41)
