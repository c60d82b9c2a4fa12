"""Plain SGD without privacy on the participants' examples together: the reference of W4 and W5."""

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
    torch_side.load(net, torch.from_numpy(data.start))
    inputs, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)

    def play(k: int) -> None:
        examples = torch.from_numpy(data.cohort(k))
        torch_side.walk(net, inputs[examples], labels[examples], one, rng)

    common.race(one, play, lambda: torch_side.evaluate(net, data), "torch")


if __name__ == "__main__":
    main()
