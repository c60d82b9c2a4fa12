"""A folder or zip of class folders: [train|test]/<class>/<image>."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from fedveil.data.federated import Dataset, Examples
from fedveil.data.sources.archives import read_member
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
SPLITS = ("train", "test")
MAX_FILE = 2**26  # bytes of one image file
MAX_TOTAL = 2**31  # bytes of all image files, and of all decoded pixels
MAX_PIXELS = 2**24  # of one image


@dataclass(frozen=True)
class _Entry:
    name: str  # as it is found in the folder or the zip
    bytes: int
    split: str = ""
    label: str = ""


def load_images(
    path: Path, size: tuple[int, int] | None = None, limit: int | None = None, seed: int = 0
) -> Dataset:
    """Images as float32 [n, c, h, w]; classes are the folder names, sorted.

    Other sizes are resized to `size` (h, w), or to the most common one. `limit` images per class
    are read. Without a test part, a random tenth is held out, the same for the same seed.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be 1 or more images per class, not {limit}.")
    entries = _limited(_placed(_listed(path), path), limit)
    pixels, notes = _uniform(list(_decoded(path, entries, size)), size)
    names = tuple(sorted({e.label for e in entries}))
    number = {name: i for i, name in enumerate(names)}
    every = Examples(to_inputs(pixels), to_labels(np.array([number[e.label] for e in entries])))
    held, more = _testing(entries, seed)
    testing = torch.from_numpy(held)
    train, test = (Examples(every.inputs[w], every.labels[w]) for w in (~testing, testing))
    return Dataset(path.stem, train, test, len(names), class_names=names, notes=notes + more)


def _listed(path: Path) -> list[_Entry]:
    """All image files with their sizes; hidden files and other types are passed over."""
    try:
        found = _from_folder(path) if path.is_dir() else _from_zip(path)
    except FileNotFoundError:
        raise UserError(f"There is no folder or file '{path}'.") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"'{path}' is not a readable zip of images ({error}).") from None
    if sum(e.bytes for e in found) > MAX_TOTAL:
        raise UserError(f"The images in '{path}' declare more than {MAX_TOTAL} bytes; use fewer.")
    for entry in found:
        if entry.bytes > MAX_FILE:
            raise UserError(f"'{entry.name}' in '{path}' declares {entry.bytes} bytes; remove it.")
    return found


def _from_folder(path: Path) -> list[_Entry]:
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    names = [(f, f.relative_to(path).as_posix()) for f in files]
    return [_Entry(name, f.stat().st_size) for f, name in names if _visible(name)]


def _from_zip(path: Path) -> list[_Entry]:
    with zipfile.ZipFile(path) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.filename)
    for info in infos:
        _check_name(info.filename, path)
    images = [i for i in infos if PurePosixPath(i.filename).suffix.lower() in SUFFIXES]
    return [_Entry(i.filename, i.file_size) for i in images if _visible(i.filename)]


def _visible(name: str) -> bool:
    return not any(p.startswith((".", "__MACOSX")) for p in PurePosixPath(name).parts)


def _check_name(name: str, path: Path) -> None:
    if name.startswith("/") or "\\" in name or ":" in name or ".." in PurePosixPath(name).parts:
        raise UserError(f"The zip '{path}' holds the unsafe name '{name}'; pack it again.")


def _placed(entries: list[_Entry], path: Path) -> list[_Entry]:
    """Each entry with its split and class, after the folders that wrap all of them."""
    wrapped = len(_wrapper([PurePosixPath(e.name).parts[:-2] for e in entries]))
    placed = []
    for entry in entries:
        *split, label, _ = ("", "", *PurePosixPath(entry.name).parts[wrapped:])[-4:]
        where = [s for s in split if s]
        if not label or len(where) > 1 or (where and where[0] not in SPLITS):
            raise UserError(
                f"'{entry.name}' in '{path}' does not lie in a class folder; "
                "use <class>/<image> or train/<class>/<image> and test/<class>/<image>."
            )
        placed.append(_Entry(entry.name, entry.bytes, where[0] if where else "train", label))
    if not any(e.split == "train" for e in placed):
        raise UserError(f"'{path}' has no training images in class folders.")
    return placed


def _wrapper(folders: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The folders that all paths begin with; `train` or `test` alone is a split, not a wrapper."""
    levels = zip(*folders, strict=False)
    common = [level[0] for level in itertools.takewhile(lambda x: len(set(x)) == 1, levels)]
    return tuple(common[:-1] if common and common[-1] in SPLITS else common)


def _limited(entries: list[_Entry], limit: int | None) -> list[_Entry]:
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for entry in entries:
        seen[entry.split, entry.label] += 1
        if limit is None or seen[entry.split, entry.label] <= limit:
            kept.append(entry)
    return kept


def _decoded(
    path: Path, entries: list[_Entry], size: tuple[int, int] | None
) -> Iterator[np.ndarray]:
    """Decode one after the other: for small images threads lose more than they win."""
    total = 0
    for name, content in _contents(path, entries):
        pixels = _decode(name, content, size)
        total += pixels.size
        if total > MAX_TOTAL:
            raise UserError(f"The images in '{path}' are too large together; give a size.")
        yield pixels


def _contents(path: Path, entries: list[_Entry]) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        yield from ((e.name, (path / e.name).read_bytes()) for e in entries)
        return
    with zipfile.ZipFile(path) as archive:
        yield from ((e.name, _member(archive, e.name)) for e in entries)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return read_member(archive, name)
    except Exception as error:  # damaged members raise zlib, zip, key and runtime errors
        raise UserError(f"'{name}' in '{archive.filename}' is damaged ({error}).") from None


def _decode(name: str, content: bytes, size: tuple[int, int] | None) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}×{image.height} pixels are too many")
            plain = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except Exception as error:  # Pillow raises many kinds for broken bytes
        raise UserError(f"The image '{name}' could not be read ({error}); remove it.") from None
    return np.asarray(plain.resize(size[::-1]) if size else plain)


def _uniform(
    images: list[np.ndarray], size: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """uint8 [n, c, h, w] of one size and one number of channels, and what was done for it."""
    from PIL import Image

    sizes = Counter(image.shape[:2] for image in images)
    height, width = size or sizes.most_common(1)[0][0]
    color = any(image.ndim == 3 for image in images)
    pixels = np.empty((len(images), height, width, 3 if color else 1), np.uint8)
    for i, image in enumerate(images):
        if image.shape[:2] != (height, width):
            image = np.asarray(Image.fromarray(image).resize((width, height)))
        pixels[i] = image if image.ndim == 3 else image[..., None]
    other = len(images) - sizes[height, width]
    note = f"{other} images of other sizes were resized to {width}×{height} pixels."
    return pixels.transpose(0, 3, 1, 2), (note,) if other else ()


def _testing(entries: list[_Entry], seed: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which entries are for testing."""
    testing = np.array([e.split == "test" for e in entries])
    if testing.any():
        return testing, ()
    if len(entries) < 2:
        raise UserError("One image cannot be split into training and testing; add more.")
    held = max(1, len(entries) // 10)
    testing[np.random.default_rng(seed).permutation(len(entries))[:held]] = True
    return testing, (f"There is no test folder; {held} random images are held out for testing.",)
