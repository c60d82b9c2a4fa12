"""Wide residual networks with group norm and weight standardization, as De et al. 2022 use them."""

from __future__ import annotations

from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.models.layers import conv, group_norm


class WideBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), Zagoruyko and Komodakis 2016.

    Where the shape changes, a 1×1 convolution of relu(norm(x)) replaces x.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs)
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.norm2 = group_norm(outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        changes = stride != 1 or inputs != outputs
        self.shortcut = _conv(inputs, outputs, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, in, h, w] → [n, out, h/stride, w/stride]."""
        active = self.norm1(x).relu()
        kept: Tensor = x if self.shortcut is None else self.shortcut(active)
        inner: Tensor = self.conv2(self.norm2(self.conv1(active)).relu())
        return kept + inner


class WideResNet(nn.Module):
    """WRN-depth-width over images of any size; WRN-40-4 has 8.9 million parameters."""

    def __init__(self, channels: int, classes: int, depth: int = 40, width: int = 4) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise UserError(f"A wide ResNet has depth 6·n + 4, but depth is {depth}. Use 40.")
        self.stem = _conv(channels, 16, 3)
        self.blocks = nn.Sequential(*_stages(width, (depth - 4) // 6))
        self.norm = group_norm(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] → [n, classes]."""
        x = self.norm(self.blocks(self.stem(x))).relu()
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return conv(inputs, outputs, kernel, stride, standardized=True)


def _stages(width: int, repeats: int) -> list[WideBlock]:
    blocks: list[WideBlock] = []
    inputs = 16
    for outputs, first in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        for position in range(repeats):
            blocks.append(WideBlock(inputs, outputs, first if position == 0 else 1))
            inputs = outputs
    return blocks
