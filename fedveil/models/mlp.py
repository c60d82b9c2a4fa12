"""Multilayer perceptrons."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, over the flattened input.

    784-300-300-10 has the 328,810 parameters of Das et al. 2021's Fashion-MNIST model.
    """

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise((inputs, *hidden)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] → [n, classes]."""
        logits: Tensor = self.layers(x)
        return logits
