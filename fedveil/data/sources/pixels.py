"""Pixel format of every image source: float32 in [0, 1], channels first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_inputs(pixels: np.ndarray) -> Tensor:
    """uint8 [n, h, w] or [n, c, h, w] → float32 [n, c, h, w] in [0, 1], exactly pixel/255.

    Each example is one block of memory, whatever the strides of the pixels: NumPy's `astype` alone
    would keep the strides of a transposed view.
    """
    shaped = pixels[:, None] if pixels.ndim == 3 else pixels
    return torch.from_numpy(shaped.astype(np.float32, order="C")).div_(255)


def to_labels(labels: np.ndarray) -> Tensor:
    """Any integers [n] or [n, 1] → int64 [n]."""
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))
