from __future__ import annotations

import torch

from fedveil.data.sources.digits import load_digits


def test_digits() -> None:
    dataset, again = load_digits(), load_digits()
    assert dataset.train.inputs.shape == (1437, 1, 8, 8)
    assert dataset.test.inputs.shape == (360, 1, 8, 8)
    assert (float(dataset.train.inputs.min()), float(dataset.train.inputs.max())) == (0.0, 1.0)
    assert set(dataset.test.labels.tolist()) == set(range(10))
    assert torch.equal(dataset.train.inputs, again.train.inputs)
