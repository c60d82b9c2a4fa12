"""A cache of decoded images: a large zip is decoded once, not in every process."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedveil.data.download import data_directory

KEPT = 4  # decoded sets; older ones are deleted


def remembered(
    key: Sequence[str], shape: tuple[int, ...], decode: Callable[[], np.ndarray]
) -> np.ndarray:
    """uint8 pixels of a shape: those stored under the key, or decoded now and then stored.

    The key must identify the content. A file that cannot be read or written is no error: images
    are then decoded. Files are readable by their owner only, as copies of what may be private.
    """
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    file = data_directory() / "decoded" / f"{name}.npy"
    known = _read(file, shape)
    if known is not None:
        return known
    pixels = decode()
    with contextlib.suppress(OSError):
        _write(file, pixels)
    return pixels


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _read(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        pixels: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.dtype == np.uint8 and pixels.shape == shape else None


def _write(file: Path, pixels: np.ndarray) -> None:
    """Write to a temporary file first, so that a crash leaves no half of one."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".decoding-") as scratch:
        partial = Path(scratch) / file.name
        np.save(partial, pixels, allow_pickle=False)
        partial.chmod(0o600)
        partial.replace(file)
    for old in sorted(file.parent.glob("*.npy"), key=lambda one: -one.stat().st_mtime)[KEPT:]:
        old.unlink(missing_ok=True)
