"""Linear models: softmax regression and least squares."""

from __future__ import annotations

from torch import Tensor, nn


class SoftmaxRegression(nn.Module):
    """logits = W·flatten(x) + b.  Starts at W = 0, b = 0, so convexity makes it deterministic."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)

    def start_weights(self) -> None:
        """Set every weight to zero: the loss is convex and needs no broken symmetry."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] → [n, classes]."""
        logits: Tensor = self.linear(x.flatten(1))
        return logits


class LinearRegression(nn.Module):
    """output = w·x, without bias: its parameter vector is w itself.  Starts at w = 0."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 1, bias=False)

    def start_weights(self) -> None:
        """Set w to zero."""
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] → [n]."""
        outputs: Tensor = self.linear(x.flatten(1))
        return outputs.squeeze(-1)
