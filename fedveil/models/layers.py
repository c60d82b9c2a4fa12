"""Layers shared by models: group norm with a valid group count, standardized convolution."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (the name every torch reader expects)
from torch import Tensor, nn


def group_count(channels: int) -> int:
    """The largest divisor g ≤ 32 of `channels` that leaves at least 4 channels to a group.

    Always ≥ 1, so `GroupNorm(group_count(c), c)` exists for every c ≥ 1.

    >>> [group_count(c) for c in (3, 16, 24, 64, 512)]
    [1, 4, 6, 16, 32]
    """
    limit = max(1, min(32, channels // 4))
    return max(g for g in range(1, limit + 1) if channels % g == 0)


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm over `channels` (Wu and He 2018): examples do not affect each other."""
    return nn.GroupNorm(group_count(channels), channels)


class StandardizedConv2d(nn.Conv2d):
    """Convolves with (W − mean W) / √(fan_in · var W), taken per output channel.

    Each filter has mean 0 and norm 1 whatever W is, so it keeps the variance of its input
    (weight standardization, Qiao et al. 2019, with the fan-in scale of Brock et al. 2021).
    """

    def standardized(self) -> Tensor:
        """The standardized weight, in the shape of `weight`."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        squares = centred.square().sum((1, 2, 3), keepdim=True)
        return centred * (squares + 1e-8).rsqrt()

    def forward(self, x: Tensor) -> Tensor:
        """[n, in, h, w] → [n, out, h', w']."""
        return F.conv2d(
            x, self.standardized(), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    standardized: bool = False,
) -> nn.Conv2d:
    """A convolution without bias that keeps the size at stride 1; the norm after it has a bias."""
    kind = StandardizedConv2d if standardized else nn.Conv2d
    return kind(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
