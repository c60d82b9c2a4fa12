"""One client after the other, as one would write it in torch first."""

from __future__ import annotations

import common
import numpy as np
import torch
import torch_side


def main() -> None:
    """Play and report."""
    one = common.setting()
    data = common.arrays(one)
    net, rng = torch_side.model(one.model), np.random.default_rng(1)
    inputs, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
    noise = torch.Generator().manual_seed(1)
    x = torch.from_numpy(data.start)

    def play(k: int) -> None:
        nonlocal x
        total = torch.zeros_like(x)
        for client in data.cohort(k):
            place = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
            torch_side.load(net, x)
            torch_side.walk(net, inputs[place], labels[place], one, rng)
            update = torch_side.vector(net) - x
            total += update * min(1.0, one.clip / float(update.norm()))
        x = x + total / one.per_round
        x = x + one.deviation * torch.randn(len(x), generator=noise)

    def evaluate() -> tuple[float, float]:
        torch_side.load(net, x)
        return torch_side.evaluate(net, data)

    common.race(one, play, evaluate, "torch")


if __name__ == "__main__":
    main()
