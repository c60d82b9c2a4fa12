"""Residual networks for small images, with group norm."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil.models.layers import conv, group_norm


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), He et al. 2016.

    Where the shape changes, the shortcut is a 1×1 convolution with `project`, else a strided copy
    padded with zero channels, which has no parameters.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, project: bool, standardized: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, stride, standardized=standardized)
        self.norm1 = group_norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, standardized=standardized)
        self.norm2 = group_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                nn.Sequential(conv(inputs, outputs, 1, stride), group_norm(outputs))
                if project
                else ZeroShortcut(outputs - inputs, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[n, in, h, w] → [n, out, h/stride, w/stride]."""
        inner = self.norm1(self.conv1(x)).relu()
        total: Tensor = self.norm2(self.conv2(inner)) + self.shortcut(x)
        return total.relu()


class ZeroShortcut(nn.Module):
    """Every stride-th pixel, followed by `extra` channels of zeros (He et al. 2016, option A)."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] → [n, c + extra, h/stride, w/stride]."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, 0, self.extra))


class ResNet(nn.Module):
    """3×3 stem, a stage of `depth` blocks per width, halving between stages, mean, linear."""

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        depth: int,
        project: bool,
        standardized: bool = False,
    ) -> None:
        super().__init__()
        self.stem = conv(channels, widths[0], 3, standardized=standardized)
        self.norm = group_norm(widths[0])
        self.blocks = nn.Sequential(*_stages(widths, depth, project, standardized))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] → [n, classes]."""
        x = self.blocks(self.norm(self.stem(x)).relu())
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits


def _stages(
    widths: tuple[int, ...], depth: int, project: bool, standardized: bool
) -> list[ResidualBlock]:
    blocks: list[ResidualBlock] = []
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            blocks.append(ResidualBlock(inputs, width, stride, project, standardized))
            inputs = width
    return blocks


class ResNet18(ResNet):
    """ResNet-18 with a 3×3 stem and no first pool: 11.2 million parameters at 10 classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(channels, classes, (64, 128, 256, 512), depth=2, project=True)


class ResNet20(ResNet):
    """The ResNet-20 of He et al. 2016, §4.2: 0.27 million parameters at 10 classes.

    With `standardized`, every convolution standardizes its filters (weight standardization).
    """

    def __init__(self, channels: int, classes: int, standardized: bool = False) -> None:
        super().__init__(channels, classes, (16, 32, 64), 3, False, standardized)
