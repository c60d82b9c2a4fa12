from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedveil.data.sources.svhn import load_svhn
from fedveil.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
LABELS = np.array([[1], [10], [9], [10]], dtype=np.uint8)


def write(folder: Path, **changes: np.ndarray) -> None:
    for part in ("train", "test"):
        savemat(folder / f"{part}_32x32.mat", {"X": PIXELS, "y": LABELS} | changes)


def test_ten_means_zero_and_channels_come_first(tmp_path: Path) -> None:
    write(tmp_path)
    dataset = load_svhn(tmp_path)
    assert dataset.train.labels.tolist() == [1, 0, 9, 0]
    assert dataset.test.inputs.shape == (4, 3, 32, 32)
    pixel = float(dataset.train.inputs[2, 1, 5, 7])
    assert round(pixel * 255) == PIXELS[5, 7, 1, 2]


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_svhn(tmp_path)
    write(tmp_path, X=PIXELS[..., :2])
    with pytest.raises(UserError, match="one label each"):
        load_svhn(tmp_path)
    (tmp_path / "train_32x32.mat").write_bytes(b"no matrix at all" * 20)
    with pytest.raises(UserError, match="not a readable SVHN"):
        load_svhn(tmp_path)
