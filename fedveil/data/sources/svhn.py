"""SVHN (Netzer et al. 2011) from its cropped .mat files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.data.federated import Dataset, Examples
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError


def load_svhn(folder: Path) -> Dataset:
    """`train_32x32.mat` and `test_32x32.mat` as float32 [n, 3, 32, 32]; the label of '0' is 0.

    The files store the digit 0 as class 10.
    """
    names = tuple("0123456789")
    train, test = (read_svhn(folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return Dataset("svhn", train, test, 10, class_names=names)


def read_svhn(path: Path) -> Examples:
    """One .mat file: X uint8 [32, 32, 3, n], y [n, 1] in 1…10."""
    pixels, labels = _variables(path)
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or labels.size != pixels.shape[3]:
        raise UserError(
            f"'{path}' holds X {pixels.shape} and y {labels.shape}, not bytes of shape "
            "(32, 32, 3, n) and one label each. Download it again."
        )
    classes = labels.astype(np.int64)
    return Examples(to_inputs(pixels.transpose(3, 2, 0, 1)), to_labels(classes * (classes != 10)))


def _variables(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat

    if not path.is_file():
        raise UserError(f"No such file: '{path}'. Put SVHN's cropped .mat files there.")
    try:
        found = loadmat(path, variable_names=["X", "y"])
        return found["X"], found["y"]
    except Exception as error:  # scipy raises many types for damaged files
        raise UserError(f"'{path}' is not a readable SVHN .mat file ({error}).") from None
