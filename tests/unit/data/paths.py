"""Real data that some machines have; tests that need it skip with a reason elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
FASHION = Path("/usr/share/datasets/fashion-mnist")
MNIST = Path(os.environ.get("FEDVEIL_MNIST", "no-such-folder"))

needs_fashion = pytest.mark.skipif(not FASHION.is_dir(), reason="dataset-fashion-mnist is absent")
needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason="FEDVEIL_MNIST names no folder")
needs_photos = pytest.mark.skipif(not (SHARED / "cifar10.zip").is_file(), reason="no cifar10.zip")
needs_plays = pytest.mark.skipif(not (SHARED / "shakespeare.txt").is_file(), reason="no plays")
