"""MNIST, Fashion-MNIST and EMNIST from their IDX files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from fedveil.data.federated import Dataset, Examples
from fedveil.data.sources.archives import read_member
from fedveil.data.sources.idx import MAX_BYTES, read_idx
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError, unknown

FASHION = tuple(
    "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot".split()  # noqa: SIM905
)
EMNIST_CLASSES = {
    "digits": digits,
    "letters": ascii_uppercase,  # upper and lower case share a class
    "balanced": digits + ascii_uppercase + "abdefghnqrt",
    "byclass": digits + ascii_uppercase + ascii_lowercase,
}
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def load_mnist(folder: Path, name: str = "mnist", class_names: tuple[str, ...] = ()) -> Dataset:
    """The four IDX files of MNIST's layout (`train-…`, `t10k-…`), gzipped or not, as [n, 1, h, w].

    Pixels are value/255, without any constant computed from the data.
    """

    def part(prefix: str) -> Examples:
        images, labels = (read_idx(_find(folder, f"{prefix}-{kind}")) for kind in _KINDS)
        return _examples(images, labels, name)

    classes = class_names or tuple(digits)
    return Dataset(name, part("train"), part("t10k"), len(classes), class_names=classes)


def load_emnist(source: Path, part: str = "digits") -> Dataset:
    """One part of EMNIST (Cohen et al. 2017) from a folder of its files or from `gzip.zip`.

    Images are stored transposed and are rotated upright; labels start at 0 in every part.
    """
    if part not in EMNIST_CLASSES:
        raise unknown("part of EMNIST", part, EMNIST_CLASSES)
    read = _zip_reader(source) if source.is_file() else lambda n: read_idx(_find(source, n))
    shift = 1 if part == "letters" else 0  # only the labels of this part start at 1

    def half(which: str) -> Examples:
        images, labels = (read(f"emnist-{part}-{which}-{kind}") for kind in _KINDS)
        upright = images.swapaxes(1, 2) if images.ndim == 3 else images
        return _examples(upright, labels.astype(np.int64) - shift, f"emnist-{part}")

    names = tuple(EMNIST_CLASSES[part])
    return Dataset(f"emnist-{part}", half("train"), half("test"), len(names), class_names=names)


def _examples(images: np.ndarray, labels: np.ndarray, name: str) -> Examples:
    if images.ndim != 3 or labels.ndim != 1 or images.dtype != np.uint8:
        raise UserError(
            f"The IDX files of '{name}' hold shapes {images.shape} and {labels.shape}, not "
            "three dimensions of bytes for images and one for labels. Download them again."
        )
    return Examples(to_inputs(images), to_labels(labels))


def _find(folder: Path, name: str) -> Path:
    for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
        if (folder / candidate).is_file():
            return folder / candidate
    raise UserError(f"'{folder}' has no file '{name}' or '{name}.gz'. Put it there.")


def _zip_reader(path: Path) -> Callable[[str], np.ndarray]:
    def read(name: str) -> np.ndarray:
        try:
            with zipfile.ZipFile(path) as archive:
                return read_idx(_member(archive, f"{name}.gz"))
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"'{path}' is not a readable zip file ({error}).") from None

    return read


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    for info in archive.infolist():
        if Path(info.filename).name == name and info.file_size <= MAX_BYTES:
            return read_member(archive, info)
    raise UserError(f"'{archive.filename}' does not contain '{name}'. Use EMNIST's gzip.zip.")
