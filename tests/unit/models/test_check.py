from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.models.check import fix, refuse_batch_norm
from fedveil.models.resnet import ResNet20
from fedveil.models.start import construct
from fedveil.training.prepare import prepare


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_is_refused_with_its_name_and_a_replacement(
    kind: Callable[[int], nn.Module],
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(kind(24)))
    with pytest.raises(UserError) as caught:
        refuse_batch_norm(model)
    message = str(caught.value)
    assert "'1.0'" in message
    assert kind.__name__ in message
    assert "torch.nn.GroupNorm(6, 24)" in message
    nn.GroupNorm(6, 24)(torch.zeros(2, 24, 3, 3))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_batch_norm_is_refused_without_invented_numbers() -> None:
    with pytest.raises(UserError, match=r"GroupNorm\(groups, channels\)"):
        refuse_batch_norm(nn.LazyBatchNorm2d())


def test_instance_norm_is_refused_only_with_running_statistics() -> None:
    refuse_batch_norm(nn.Sequential(nn.InstanceNorm2d(8)))
    with pytest.raises(UserError, match="running statistics"):
        refuse_batch_norm(nn.Sequential(nn.InstanceNorm2d(8, track_running_stats=True)))


def test_group_norm_passes() -> None:
    refuse_batch_norm(ResNet20(3, 10))


def normed() -> nn.Module:
    norm = nn.BatchNorm2d(8)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm, nn.Sequential(nn.InstanceNorm2d(8, track_running_stats=True)),
        norm, nn.Flatten(), nn.Linear(128, 4), nn.BatchNorm1d(4, affine=False),
    )  # fmt: skip


def test_fix_replaces_every_refused_layer_in_a_copy() -> None:
    model = normed()
    model(torch.randn(2, 3, 6, 6))
    nn.init.constant_(model[1].weight, 2.0)
    fixed = fix(model)
    refuse_batch_norm(fixed)
    fixed(torch.randn(1, 3, 6, 6))
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1] is fixed[3], "a layer that is used twice stays one layer"
    assert fixed[1].weight[0] == 2.0
    assert fixed[6].weight is None
    assert isinstance(model[1], nn.BatchNorm2d), "the given model is unchanged"


def test_fix_replaces_a_model_that_is_a_norm_itself_and_keeps_the_mode() -> None:
    assert isinstance(fix(nn.BatchNorm2d(4)), nn.GroupNorm)
    assert not fix(nn.Sequential(nn.BatchNorm2d(4)).eval())[0].training


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_fix_refuses_a_norm_without_channels() -> None:
    with pytest.raises(UserError, match="Call the module once"):
        fix(nn.Sequential(nn.LazyBatchNorm2d()))


def test_the_refusal_names_fix() -> None:
    with pytest.raises(UserError, match=r"fedveil\.models\.fix\(model\)"):
        refuse_batch_norm(nn.Sequential(nn.BatchNorm2d(4)))


class Basic(nn.Module):
    """Two convolutions around a shortcut, as in torchvision's ResNet-18."""

    def __init__(self, size: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(size, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1:
            shorter = nn.Conv2d(size, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shorter, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def test_a_residual_network_as_torchvision_s_trains_after_fix_on_every_engine() -> None:
    """In-place sums and activations, strided shortcuts, overlapping and adaptive pooling."""
    model = construct(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1), Basic(8, 8, 1), Basic(8, 16, 2),
            nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, 3),
        ),
        seed=0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(size=(6, 3, 16, 16)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 6))
    data = Federated(
        "images", images, labels, torch.tensor([0, 1, 4, 6]), Examples(images, labels), 3
    )
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    with pytest.raises(UserError, match=r"fedveil\.models\.fix\(model\)"):
        prepare(recipe, data, model, 1)
    ends = []
    for engine in ("loop", "dense", "factored"):
        training = prepare(recipe, data, fix(model), 1, engine=engine)
        training.step()
        ends.append(training.state.x)
    assert torch.allclose(ends[0], ends[1], atol=1e-5)
    assert torch.allclose(ends[0], ends[2], atol=1e-5)
