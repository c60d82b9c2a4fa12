"""A folder or zip of class folders: [train|test]/<class>/<image>."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from fedveil.data.federated import Dataset, Examples
from fedveil.data.origin import Origin
from fedveil.data.sources.archives import read_member
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError
from fedveil.streams import stream

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
SPLITS = ("train", "test")
MAX_FILE = 2**26  # bytes of one image file
MAX_TOTAL = 2**31  # bytes of all image files, and of all decoded pixels
MAX_PIXELS = 2**24  # of one image
SIZE = (32, 32)  # height and width where none are given: no image decides them
HELD_OUT = 0.1  # of the images, where there is no test part


@dataclass(frozen=True)
class _Entry:
    name: str  # as it is found in the folder or the zip
    bytes: int
    split: str = ""
    label: str = ""


def load_images(
    path: Path,
    size: tuple[int, int] | None = None,
    color: bool = True,
    classes: tuple[str, ...] | None = None,
    seed: int = 0,
) -> Dataset:
    """Images as float32 [n, c, h, w] of a public size (h, w) and number of channels.

    `classes` are names of folders; images in others are left out. Where they are not given they
    are the folder names, sorted: these are read from the data (`Dataset.origin`). Without a test
    part each image is held out with a chance of one in ten, by the seed and its own name.
    """
    height, width = size or SIZE
    if not (height >= 1 and width >= 1 and height * width <= MAX_PIXELS):
        raise UserError(f"size is {height}×{width}; give a height and a width in pixels.")
    placed = _placed(_listed(path), path)
    names = classes or tuple(sorted({e.label for e in placed}))
    entries, notes = _of_classes(placed, names, path)
    parted = any(entry.split == "test" for entry in placed)
    held, more = _testing(entries, parted, seed)
    pixels = _decoded(path, entries, (height, width), color)
    number = {name: i for i, name in enumerate(names)}
    every = Examples(to_inputs(pixels), to_labels(np.array([number[e.label] for e in entries])))
    testing = torch.from_numpy(held)
    train, test = (Examples(every.inputs[w], every.labels[w]) for w in (~testing, testing))
    exclusions = () if classes else ("the classes (the names of the image folders)",)
    return Dataset(
        path.stem,
        train,
        test,
        len(names),
        class_names=names,
        notes=notes + more,
        origin=Origin(exclusions=exclusions),
    )


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


def _of_classes(
    entries: list[_Entry], names: tuple[str, ...], path: Path
) -> tuple[list[_Entry], tuple[str, ...]]:
    """The entries in folders of these names."""
    known = [entry for entry in entries if entry.label in names]
    if not any(entry.split == "train" for entry in known):
        raise UserError(f"'{path}' has no training images in folders {', '.join(names)}.")
    gone = len(entries) - len(known)
    return known, (f"{gone} images in folders of other names were left out.",) if gone else ()


def _decoded(path: Path, entries: list[_Entry], size: tuple[int, int], color: bool) -> np.ndarray:
    """uint8 [n, c, h, w]; one after the other: for small images threads lose more than they win."""
    channels = 3 if color else 1
    if len(entries) * size[0] * size[1] * channels > MAX_TOTAL:
        raise UserError(f"The images in '{path}' are too large together; give a smaller size.")
    pixels = np.empty((len(entries), *size, channels), np.uint8)
    for i, (name, content) in enumerate(_contents(path, entries)):
        pixels[i] = _decode(name, content, size, color).reshape(*size, channels)
    return pixels.transpose(0, 3, 1, 2)


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


def _decode(name: str, content: bytes, size: tuple[int, int], color: bool) -> np.ndarray:
    from PIL import Image

    height, width = size
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}×{image.height} pixels are too many")
            plain = image.convert("RGB" if color else "L")
    except Exception as error:  # Pillow raises many kinds for broken bytes
        raise UserError(f"The image '{name}' could not be read ({error}); remove it.") from None
    return np.asarray(plain if plain.size == (width, height) else plain.resize((width, height)))


def _testing(entries: list[_Entry], parted: bool, seed: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which entries are for testing: the test part if there is one, else each by its own stream.

    Were they drawn together, one image more or less would change what the others are used for.
    """
    if parted:
        return np.array([e.split == "test" for e in entries]), ()
    own = ("/".join(PurePosixPath(e.name).parts[-2:]) for e in entries)
    testing = np.array([stream(seed, 0, f"held out {o}").random() < HELD_OUT for o in own])
    if testing.all():
        raise UserError("There is no image left to train on; add some, or a test folder.")
    return testing, (
        f"There is no test folder; {int(testing.sum())} images, drawn one by one, are held out "
        "for testing.",
    )
