from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data.sources.cifar import (
    CIFAR10,
    load_cifar,
    read_binary_batch,
    read_python_batch,
)
from fedveil.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
LABELS = [3, 9, 0]
NAMES10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def python_batch(classes: int = 10) -> bytes:
    """As the official files: protocol 2, byte strings for keys."""
    key = b"labels" if classes == 10 else b"fine_labels"
    return pickle.dumps({b"data": PIXELS, key: LABELS, b"filenames": [b"a.png"]}, 2)


def binary_batch(classes: int = 10) -> bytes:
    head = [[label] if classes == 10 else [7, label] for label in LABELS]
    return np.concatenate([np.array(head, dtype=np.uint8), PIXELS], axis=1).tobytes()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("classes", [10, 100])
def test_both_formats_hold_the_same(classes: int) -> None:
    for pixels, labels in (
        read_python_batch(python_batch(classes), classes),
        read_binary_batch(binary_batch(classes), classes),
    ):
        np.testing.assert_array_equal(pixels, PIXELS.reshape(-1, 3, 32, 32))
        assert labels.tolist() == LABELS


def test_a_batch_written_by_python_2_is_read() -> None:
    """Python 2 wrote keys and array bytes as its plain strings (SHORT_BINSTRING, BINSTRING)."""
    raw = PIXELS.tobytes()
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b"
        b"\x87R(K\x01K\x03M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tbU\x06labels](K\x03K\x09K\x00eu."
    )
    pixels, labels = read_python_batch(content)
    np.testing.assert_array_equal(pixels.reshape(3, -1), PIXELS)
    assert labels.tolist() == LABELS


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar10_from_a_folder_and_an_archive(tmp_path: Path, kind: str) -> None:
    content, end = (python_batch(), "") if kind == "python" else (binary_batch(), ".bin")
    folder = tmp_path / "cifar-10-batches"
    folder.mkdir()
    for name in NAMES10:
        (folder / f"{name}{end}").write_bytes(content)
    archive = tmp_path / "cifar.tar.gz"
    write_tar(archive, {f"cifar-10-batches/{name}{end}": content for name in NAMES10})
    for source in (folder, tmp_path, archive):
        dataset = load_cifar(source)
        assert dataset.train.inputs.shape == (15, 3, 32, 32)
        assert dataset.train.inputs.dtype == torch.float32
        assert dataset.train.labels.tolist() == LABELS * 5
        assert dataset.test.labels.tolist() == LABELS
        assert dataset.class_names == CIFAR10
        restored = (dataset.test.inputs * 255).round().numpy().reshape(3, -1)
        np.testing.assert_array_equal(restored, PIXELS)


def test_cifar100_from_an_archive(tmp_path: Path) -> None:
    names = [f"class {i}".encode() for i in range(100)]
    meta = pickle.dumps({b"fine_label_names": names}, 2)
    files = {"train": python_batch(100), "test": python_batch(100), "meta": meta}
    write_tar(tmp_path / "c.tar.gz", {f"cifar-100-python/{n}": c for n, c in files.items()})
    dataset = load_cifar(tmp_path / "c.tar.gz", 100)
    assert dataset.classes == 100
    assert dataset.train.labels.tolist() == LABELS
    assert dataset.class_names[3] == "class 3"


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"it refers to .*mkdir"):
        read_python_batch(pickle.dumps({b"data": Evil()}, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is invalid"),
        (b"garbage", "is invalid"),
        (pickle.dumps([1], 2), "holds no dictionary"),
        (pickle.dumps({b"data": PIXELS}, 2), "lacks 'data' or labels"),
        (pickle.dumps({b"labels": LABELS}, 2), "lacks 'data'"),
        (pickle.dumps({b"data": PIXELS, b"labels": [1]}, 2), r"labels \(1,\)"),
        (pickle.dumps({b"data": PIXELS, b"labels": ["a", "b", "c"]}, 2), "are not integers"),
        (pickle.dumps({b"data": PIXELS[:, :9], b"labels": LABELS}, 2), r"pixels \(3, 9\)"),
        (pickle.dumps({b"data": PIXELS * 1.0, b"labels": LABELS}, 2), "arrays of type"),
    ],
)
def test_broken_python_batches(content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_python_batch(content)


def test_broken_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a multiple of 3073"):
        read_binary_batch(binary_batch()[:-1])
    with pytest.raises(UserError, match="no CIFAR batch 'data_batch_1'"):
        load_cifar(tmp_path)
    (tmp_path / "x.tar.gz").write_bytes(b"no tar")
    with pytest.raises(UserError, match="not a readable CIFAR archive"):
        load_cifar(tmp_path / "x.tar.gz")
    with pytest.raises(UserError, match="no CIFAR-11"):
        load_cifar(tmp_path, 11)
