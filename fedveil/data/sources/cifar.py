"""CIFAR-10 and CIFAR-100 from the official Python or binary batches."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.federated import Dataset, Examples
from fedveil.data.sources.batches import Array, read_batch
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError

CIFAR10 = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905
MAX_MEMBER = 2**29  # the largest official file, CIFAR-100's train, has 1.6e8 bytes
_PIXELS = 3 * 32 * 32
_PARTS = {
    10: ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]),
    100: (["train"], ["test"]),
}


def load_cifar(path: Path, classes: int = 10) -> Dataset:
    """CIFAR-10 or -100 (Krizhevsky 2009) from a folder or a .tar.gz, as float32 [n, 3, 32, 32].

    Python's unpickler is not used: `batches` parses the files and runs no code from them.
    """
    if classes not in _PARTS:
        raise UserError(f"There is no CIFAR-{classes}. Use CIFAR-10 or CIFAR-100.")
    files = _contents(path, classes)
    train, test = (_join(files, names, classes, path) for names in _PARTS[classes])
    names = CIFAR10 if classes == 10 else _fine_names(files)
    return Dataset(f"cifar{classes}", train, test, classes, class_names=names)


def read_python_batch(content: bytes, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3, 32, 32] and labels [n] of one Python batch; runs no code from it."""
    batch = _batch(content)
    pixels = batch.get(b"data")
    labels = batch.get(b"labels" if classes == 10 else b"fine_labels")
    if not isinstance(pixels, Array) or not isinstance(labels, list):
        raise UserError("A CIFAR batch lacks 'data' or labels. Download the archive again.")
    return _checked(pixels.values, _whole(labels))


def read_binary_batch(content: bytes, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a binary batch: per example a label (CIFAR-100: two) and 3072 pixels."""
    heads = 1 if classes == 10 else 2
    if not content or len(content) % (heads + _PIXELS):
        raise UserError(
            f"A binary CIFAR batch has {len(content)} bytes, not a multiple of {heads + _PIXELS}. "
            "Download the archive again."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, heads + _PIXELS)
    return _checked(rows[:, heads:], rows[:, heads - 1])


def _whole(labels: list[Any]) -> np.ndarray:
    """Labels as an array; refuses anything but small whole numbers."""
    if not all(isinstance(label, int) and 0 <= label < 2**31 for label in labels):
        raise UserError("A CIFAR batch has labels that are not integers. Download it again.")
    return np.array(labels, dtype=np.int64)


def _checked(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    good = pixels.ndim == 2 and pixels.shape[1] == _PIXELS and labels.shape == pixels.shape[:1]
    if not good or labels.dtype.kind not in "iu":
        raise UserError(
            f"A CIFAR batch holds pixels {pixels.shape} and labels {labels.shape}, not "
            f"(n, {_PIXELS}) and (n,) integers. Download it again."
        )
    return pixels.reshape(-1, 3, 32, 32), labels


def _join(files: Mapping[str, bytes], names: list[str], classes: int, path: Path) -> Examples:
    batches = []
    for name in names:
        if name in files:
            batches.append(read_python_batch(files[name], classes))
        elif f"{name}.bin" in files:
            batches.append(read_binary_batch(files[f"{name}.bin"], classes))
        else:
            raise UserError(
                f"'{path}' has no CIFAR batch '{name}'. Download the official archive again."
            )
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Examples(to_inputs(pixels), to_labels(labels))


def _contents(path: Path, classes: int) -> dict[str, bytes]:
    """The requested files by base name; nothing is unpacked to disk."""
    train, test = _PARTS[classes]
    wanted = {f"{name}{end}" for name in (*train, *test) for end in ("", ".bin")}
    wanted |= {"meta", "fine_label_names.txt"}
    try:
        return _from_folder(path, wanted) if path.is_dir() else _from_tar(path, wanted)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"'{path}' is not a readable CIFAR archive ({error}).") from None


def _from_folder(path: Path, wanted: set[str]) -> dict[str, bytes]:
    files = [f for f in (*path.glob("*"), *path.glob("*/*")) if f.name in wanted and f.is_file()]
    return {f.name: f.read_bytes() for f in files if f.stat().st_size <= MAX_MEMBER}


def _from_tar(path: Path, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            name = Path(member.name).name
            if member.size > MAX_MEMBER:  # even skipping it would unpack it
                raise tarfile.TarError(f"'{name}' declares {member.size} bytes")
            if name in wanted and member.isfile():
                stream = archive.extractfile(member)
                found[name] = stream.read() if stream else b""
    return found


def _fine_names(files: Mapping[str, bytes]) -> tuple[str, ...]:
    try:
        if "meta" in files:
            return tuple(n.decode() for n in _batch(files["meta"]).get(b"fine_label_names", []))
        return tuple(files.get("fine_label_names.txt", b"").decode().split())
    except (AttributeError, TypeError, UnicodeDecodeError):
        raise UserError(
            "CIFAR-100's class names are not text. Download the archive again."
        ) from None


def _batch(content: bytes) -> dict[bytes, Any]:
    try:
        loaded = read_batch(content)
    except Exception as error:  # the stack can hold objects of any type
        raise UserError(f"A CIFAR batch is invalid ({error}). Get the official archive.") from None
    if not isinstance(loaded, dict):
        raise UserError("A CIFAR batch holds no dictionary. Download the official archive.")
    return {k.encode() if isinstance(k, str) else k: v for k, v in loaded.items()}
