"""torch.func: vmap over clients with stacked parameters, group after group."""

from __future__ import annotations

import common
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import torch_side
from torch import Tensor
from torch.func import functional_call, grad, vmap

NUMBERS = 2**22  # stacked parameters of a group
Leaves = dict[str, Tensor]


def main() -> None:
    """Play and report."""
    one = common.setting()
    data = common.arrays(one)
    net, rng = torch_side.model(one.model), np.random.default_rng(1)
    noise = torch.Generator().manual_seed(1)
    x = torch.from_numpy(data.start)
    group = max(1, min(256, NUMBERS // len(x)))

    def play(k: int) -> None:
        nonlocal x
        total = torch.zeros_like(x)
        for clients in np.split(data.cohort(k), range(group, one.per_round, group)):
            rows = updates(x, clients)
            scales = (one.clip / rows.norm(dim=1)).clamp_max(1.0)
            total += scales @ rows
        x = x + total / one.per_round
        x = x + one.deviation * torch.randn(len(x), generator=noise)

    def loss(leaves: Leaves, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, leaves, (inputs,)), labels)

    def updates(x: Tensor, clients: np.ndarray) -> Tensor:
        torch_side.load(net, x)
        start = {name: leaf.detach() for name, leaf in net.named_parameters()}
        index = np.stack([chosen(client) for client in clients], axis=1)
        leaves: Leaves = {}
        velocity: Leaves = {}
        for positions in torch.from_numpy(index):
            slope = vmap(grad(loss), in_dims=(0 if leaves else None, 0, 0))
            inputs, labels = all_inputs[positions], all_labels[positions]
            gradients = slope(leaves or start, inputs, labels)
            if one.momentum:
                velocity = {
                    name: one.momentum * velocity[name] + step if velocity else step
                    for name, step in gradients.items()
                }
                gradients = velocity
            leaves = {
                name: (leaves or start)[name] - one.learning_rate * step
                for name, step in gradients.items()
            }
        rows = [(leaves[name] - leaf).reshape(len(clients), -1) for name, leaf in start.items()]
        return torch.cat(rows, dim=1)

    def chosen(client: int) -> np.ndarray:
        first, last = int(data.offsets[client]), int(data.offsets[client + 1])
        return np.asarray(first + common.batches(last - first, one, rng))

    def evaluate() -> tuple[float, float]:
        torch_side.load(net, x)
        return torch_side.evaluate(net, data)

    all_inputs, all_labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
    common.race(one, play, evaluate, "torch")


if __name__ == "__main__":
    main()
