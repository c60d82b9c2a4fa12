"""MobileNetV2 for small images, with group norm."""

from __future__ import annotations

from torch import Tensor, nn

from fedveil.models.layers import conv, group_norm

# Expansion, channels, repeats, first stride: Sandler et al. 2018, Table 2, without the first
# two halvings, as suits images of about 32 pixels.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """x + project(depthwise(expand(x))), the sum only if the shape is kept (Sandler et al. 2018).

    The projection has no ReLU: the narrow ends of a block are linear.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        expand = _conv_norm_relu(inputs, wide, 1) if expansion > 1 else []
        depthwise = _conv_norm_relu(wide, wide, 3, stride, groups=wide)
        self.layers = nn.Sequential(
            *expand, *depthwise, conv(wide, outputs, 1), group_norm(outputs)
        )
        self.keeps_shape = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """[n, in, h, w] → [n, out, h/stride, w/stride]."""
        y: Tensor = self.layers(x)
        return x + y if self.keeps_shape else y


class MobileNetV2(nn.Module):
    """Sandler et al. 2018 at width 1: 2.2 million parameters at 10 classes, any image size."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv_norm_relu(channels, 32, 3))
        self.blocks = nn.Sequential(*_blocks(32))
        self.head = nn.Sequential(*_conv_norm_relu(320, 1280, 1))
        self.fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] → [n, classes]."""
        x = self.head(self.blocks(self.stem(x)))
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits


def _conv_norm_relu(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [conv(inputs, outputs, kernel, stride, groups), group_norm(outputs), nn.ReLU6()]


def _blocks(inputs: int) -> list[InvertedResidual]:
    blocks: list[InvertedResidual] = []
    for expansion, outputs, repeats, first in _STAGES:
        for position in range(repeats):
            stride = first if position == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, stride, expansion))
            inputs = outputs
    return blocks
