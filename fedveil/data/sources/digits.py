"""The 8×8 digits included in scikit-learn: always available, no download."""

from __future__ import annotations

import numpy as np

from fedveil.data.federated import Dataset, Examples
from fedveil.data.sources.pixels import to_labels

TEST = 360  # a fifth of the 1797 images


def load_digits() -> Dataset:
    """1437 training and 360 test images, float32 [n, 1, 8, 8] in [0, 1]; the split is fixed."""
    import torch
    from sklearn.datasets import load_digits as bundled

    pixels, labels = bundled(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs = torch.from_numpy((pixels[order] / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    targets = to_labels(labels[order])
    train = Examples(inputs[TEST:], targets[TEST:])
    test = Examples(inputs[:TEST], targets[:TEST])
    return Dataset("digits", train, test, 10, class_names=tuple("0123456789"))
