from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data.catalog import load
from fedveil.data.sources.mnist import EMNIST_CLASSES, load_emnist, load_mnist
from fedveil.errors import UserError
from tests.unit.data.paths import MNIST, needs_fashion, needs_mnist
from tests.unit.data.sources.idxbytes import idx_bytes

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)


def write_mnist(folder: Path) -> None:
    for prefix, end in (("train", ""), ("t10k", ".gz")):
        images, labels = idx_bytes(IMAGES), idx_bytes(np.array([3, 1, 4, 9], dtype=np.uint8))
        pack = gzip.compress if end else bytes
        (folder / f"{prefix}-images-idx3-ubyte{end}").write_bytes(pack(images))
        (folder / f"{prefix}-labels-idx1-ubyte{end}").write_bytes(pack(labels))


def emnist_files(part: str, labels: list[int]) -> dict[str, bytes]:
    stored = IMAGES.swapaxes(1, 2)  # as NIST publishes them
    files = {}
    for half in ("train", "test"):
        files[f"emnist-{part}-{half}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(stored))
        numbers = idx_bytes(np.array(labels, dtype=np.uint8))
        files[f"emnist-{part}-{half}-labels-idx1-ubyte.gz"] = gzip.compress(numbers)
    return files


def test_mnist_layout(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    dataset = load_mnist(tmp_path)
    for part in (dataset.train, dataset.test):
        assert part.inputs.shape == (4, 1, 28, 28)
        assert part.inputs.dtype == torch.float32
        np.testing.assert_array_equal((part.inputs[:, 0] * 255).round().numpy(), IMAGES)
        assert part.labels.tolist() == [3, 1, 4, 9]
    assert dataset.classes == 10


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte"):
        load_mnist(tmp_path)


def test_images_and_labels_swapped(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros(4, dtype=np.uint8)))
    with pytest.raises(UserError, match="three dimensions"):
        load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("part", "stored", "labels"),
    [("digits", [0, 9, 1, 2], [0, 9, 1, 2]), ("letters", [1, 26, 2, 3], [0, 25, 1, 2])],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_emnist_is_upright_and_counts_from_zero(
    tmp_path: Path, part: str, stored: list[int], labels: list[int], zipped: bool
) -> None:
    source = tmp_path / "gzip.zip" if zipped else tmp_path
    if zipped:
        with zipfile.ZipFile(source, "w") as archive:
            for name, content in emnist_files(part, stored).items():
                archive.writestr(f"gzip/{name}", content)
    else:
        for name, content in emnist_files(part, stored).items():
            (tmp_path / name).write_bytes(content)
    dataset = load_emnist(source, part)
    np.testing.assert_array_equal((dataset.train.inputs[:, 0] * 255).round().numpy(), IMAGES)
    assert dataset.test.labels.tolist() == labels


def test_emnist_class_counts() -> None:
    counts = {part: len(set(names)) for part, names in EMNIST_CLASSES.items()}
    assert counts == {"digits": 10, "letters": 26, "balanced": 47, "byclass": 62}


def test_emnist_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'digits'"):
        load_emnist(tmp_path, "digit")
    (tmp_path / "gzip.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match="not a readable zip"):
        load_emnist(tmp_path / "gzip.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(UserError, match=r"Use EMNIST's gzip\.zip"):
        load_emnist(tmp_path / "other.zip")


@needs_fashion
def test_the_real_fashion_mnist() -> None:
    dataset = load("fashion-mnist", download=False)
    assert dataset.train.inputs.shape == (60000, 1, 28, 28)
    assert dataset.test.inputs.shape == (10000, 1, 28, 28)
    assert dataset.train.labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert torch.bincount(dataset.test.labels).tolist() == [1000] * 10
    assert (float(dataset.train.inputs.min()), float(dataset.train.inputs.max())) == (0.0, 1.0)
    assert float(dataset.train.inputs.mean()) == pytest.approx(0.2860, abs=1e-4)
    assert dataset.class_names[9] == "Boot"


@needs_mnist
def test_the_real_mnist() -> None:
    dataset = load("mnist", MNIST, download=False)
    assert dataset.name == "mnist"
    assert dataset.train.inputs.shape == (60000, 1, 28, 28)
    assert dataset.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert float(dataset.train.inputs.mean()) == pytest.approx(0.1307, abs=1e-4)
