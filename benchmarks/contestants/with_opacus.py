"""Opacus: DP-SGD by per-example gradients (hooks) or by ghost clipping."""

from __future__ import annotations

import common
import torch
import torch_side
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Play and report."""
    one = common.setting()
    data = common.arrays(one)
    net = torch_side.model(one.model)
    torch_side.load(net, torch.from_numpy(data.start))
    inputs, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
    # clip(η·g, C) = η·clip(g, C/η): Opacus clips gradients where the workload clips steps.
    made = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), one.learning_rate),
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(inputs, labels), one.per_round),
        noise_multiplier=one.noise,
        max_grad_norm=one.clip / one.learning_rate,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(1),
        grad_sample_mode=one.variant,
    )
    wrapped, optimizer = made[:2]
    criterion = made[2] if one.variant == "ghost" else torch.nn.CrossEntropyLoss()
    optimizer.expected_batch_size = one.per_round  # the loader's length would round it

    def play(k: int) -> None:
        examples = torch.from_numpy(data.cohort(k))
        optimizer.zero_grad()
        criterion(wrapped(inputs[examples]), labels[examples]).backward()
        optimizer.step()

    def evaluate() -> tuple[float, float]:
        fresh = torch_side.model(one.model)
        torch_side.load(fresh, torch_side.vector(net))
        return torch_side.evaluate(fresh, data)

    common.race(one, play, evaluate, "opacus", "torch")


if __name__ == "__main__":
    main()
