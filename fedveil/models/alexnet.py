"""AlexNet for small images."""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil.errors import UserError

_HIDDEN = 800  # gives the 3.3 million parameters of Zhang et al. 2022, Table 2


class AlexNet(nn.Module):
    """Five convolutions and two linear layers (Krizhevsky et al. 2012, scaled to small images).

    3.3 million parameters and 7 layers, as Zhang et al. 2022 report, on 3×32×32 and on 1×28×28.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.fc1 = nn.Linear(256 * _side(size) ** 2, _HIDDEN)
        self.fc2 = nn.Linear(_HIDDEN, classes)

    def start_weights(self) -> None:
        """Scale U(±1/√fan_in) up to U(±√(6/fan_in)), He et al. 2015, before every ReLU.

        Without a norm the smaller weights lose a factor √6 of the signal in each layer, and
        training stays for hundreds of steps at the loss of a constant output.
        """
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv5, self.fc1):
            layer.weight.mul_(math.sqrt(6))

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, size, size] → [n, classes]."""
        x = _pool(self.conv1(x).relu())
        x = _pool(self.conv2(x).relu())
        x = self.conv4(self.conv3(x).relu()).relu()
        x = _pool(self.conv5(x).relu())
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def _pool(x: Tensor) -> Tensor:
    # Rounding up reduces 28 pixels to the same 2×2 as 32 pixels, so both sizes have equal weights.
    return F.max_pool2d(x, 2, ceil_mode=True)


def _side(size: int) -> int:
    """The side after one convolution of stride 2 and three pools, each halving and rounding up."""
    if size < 16:
        raise UserError(
            f"AlexNet needs images of at least 16×16 pixels, but these have {size}×{size}. "
            "Use the model 'softmax' or 'mlp'."
        )
    return -(-size // 16)
