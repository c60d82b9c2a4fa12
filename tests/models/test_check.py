from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedveil.errors import UserError
from fedveil.models.check import dropout_layers, refuse_batch_norm
from fedveil.models.resnet import ResNet20


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


def test_dropout_layers_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout2d()), nn.AlphaDropout())
    assert dropout_layers(model) == ["1.0", "2"]
    assert dropout_layers(ResNet20(3, 10)) == []
