"""The models in plain torch, a parameter vector's way in and out, and the test accuracy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from common import Arrays, Setting, batches
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class CNN(nn.Module):
    """conv 16 8×8 /2, pool, conv 32 4×4 /2, pool, fc 32, fc 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.fc1 = nn.Linear(512, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1, 28, 28] → [n, 10]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


def model(name: str) -> nn.Module:
    """A model of workloads.py."""
    if name == "cnn":
        return CNN()
    hidden = {"softmax": (), "mlp": (300, 300), "mlp-256-128": (256, 128)}[name]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((784, *hidden, 10)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def load(net: nn.Module, x: Tensor) -> None:
    """Set the parameters to a copy of x."""
    with torch.no_grad():
        vector_to_parameters(x.clone(), net.parameters())


def vector(net: nn.Module) -> Tensor:
    """A copy of the parameters."""
    return parameters_to_vector(net.parameters()).detach().clone()


@torch.no_grad()
def evaluate(net: nn.Module, data: Arrays) -> tuple[float, float]:
    """(mean loss, accuracy) on the test examples."""
    inputs, labels = torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)
    outputs = torch.cat([net(part) for part in torch.split(inputs, 2000)])
    right = (outputs.argmax(1) == labels).float().mean()
    return float(F.cross_entropy(outputs, labels)), float(right)


def walk(
    net: nn.Module, inputs: Tensor, labels: Tensor, one: Setting, rng: np.random.Generator
) -> None:
    """A client's local steps, as one writes them in torch."""
    optimizer = torch.optim.SGD(net.parameters(), one.learning_rate, one.momentum)
    whole = one.batch is None or one.batch >= len(labels)
    for index in torch.from_numpy(np.array(batches(len(labels), one, rng))):
        x, y = (inputs, labels) if whole else (inputs[index], labels[index])
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
