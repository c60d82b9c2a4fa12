"""The small convolutional network of the differential privacy literature."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil.errors import UserError


class SmallCNN(nn.Module):
    """conv 16 8×8 /2, pool, conv 32 4×4 /2, pool, fc 32, fc classes (Papernot et al. 2021).

    26,010 parameters on 1×28×28 with 10 classes; `size` is the side of a square image.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.fc1 = nn.Linear(32 * _side(size) ** 2, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, size, size] → [n, classes]."""
        x = F.max_pool2d(self.conv1(x).relu(), 2, 1)
        x = F.max_pool2d(self.conv2(x).relu(), 2, 1)
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def _side(size: int) -> int:
    """The side of the second pool's output."""
    if size < 14:
        raise UserError(
            f"The small CNN needs images of at least 14×14 pixels, but these have {size}×{size}. "
            "Use the model 'softmax' or 'mlp'."
        )
    pooled = (size - 2) // 2 + 1 - 1
    return (pooled - 4) // 2 + 1 - 1
