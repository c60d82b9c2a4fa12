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
from fedveil.data.sources.decoded import remembered, sha256_of
from fedveil.data.sources.pixels import to_inputs, to_labels
from fedveil.errors import UserError
from fedveil.random.streams import stream

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
SPLITS = ("train", "test")
MAX_FILE = 2**26  # bytes of one image file
MAX_TOTAL = 2**31  # bytes of all image files, and of all decoded pixels
MAX_PIXELS = 2**24  # per image
WORTH_CACHING = 5000  # images: about two seconds of decoding
SIZE = (32, 32)  # default height and width: no image decides them
HELD_OUT = 0.1  # fraction of images, if there is no test folder


@dataclass(frozen=True)
class _Entry:
    name: str  # path within the folder or zip
    bytes: int
    split: str = ""
    label: str = ""
    user: str = ""  # in <user>/<class>/<image>


def load_images(
    path: Path,
    size: tuple[int, int] | None = None,
    color: bool = True,
    classes: tuple[str, ...] | None = None,
    seed: int = 0,
) -> Dataset:
    """Images as float32 [n, c, h, w] of a public size (h, w) and number of channels.

    `classes` are names of folders; images in other folders are left out. By default they are the
    sorted folder names, which are read from the data (`Dataset.origin`). Without a test folder each
    image is held out with probability 0.1, decided by the seed and its own name.
    """
    height, width = size or SIZE
    if not (height >= 1 and width >= 1 and height * width <= MAX_PIXELS):
        raise UserError(f"size is {height}×{width}. Give a height and a width in pixels.")
    found = _listed(path)
    _refuse_described(path, found)
    placed = _placed(found, path)
    names = classes or tuple(sorted({e.label for e in placed}))
    entries, notes = _of_classes(placed, names, path)
    parted = any(entry.split == "test" for entry in placed)
    held, more = _testing(entries, parted, seed)
    pixels = _pixels(path, entries, (height, width), color)
    number = {name: i for i, name in enumerate(names)}
    every = Examples(to_inputs(pixels), to_labels(np.array([number[e.label] for e in entries])))
    testing = torch.from_numpy(held)
    train, test = (
        Examples(every.inputs[part], every.labels[part], owners=_users(entries, part.numpy()))
        for part in (~testing, testing)
    )
    exclusions = () if classes else ("the classes (the names of the image folders)",)
    return Dataset(
        path.stem,
        train,
        test,
        len(names),
        class_names=names,
        notes=notes + more,
        origin=Origin(exclusions=exclusions),
        keys=train.owners,
    )


def _users(entries: list[_Entry], part: np.ndarray) -> np.ndarray | None:
    """The owner of each image of a part; None if the folders do not say."""
    users = np.array([entry.user for entry in entries], dtype=str)[part]
    return users if all(users) else None


def _listed(path: Path) -> list[_Entry]:
    """All image files with their sizes; hidden files and other types are skipped."""
    try:
        found = _from_folder(path) if path.is_dir() else _from_zip(path)
    except FileNotFoundError:
        raise UserError(f"No such folder or file: '{path}'.") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"'{path}' is not a readable zip of images ({error}).") from None
    if sum(e.bytes for e in found) > MAX_TOTAL:
        raise UserError(f"The images in '{path}' declare more than {MAX_TOTAL} bytes. Use fewer.")
    for entry in found:
        if entry.bytes > MAX_FILE:
            raise UserError(f"'{entry.name}' in '{path}' declares {entry.bytes} bytes. Remove it.")
    return found


def _refuse_described(path: Path, entries: list[_Entry]) -> None:
    """Refuse a folder whose images a table beside them lists: folders are then no classes."""
    import polars as pl

    names = {entry.name for entry in entries}
    tables = (
        (f for f in path.glob("*") if f.suffix in (".csv", ".parquet")) if path.is_dir() else ()
    )
    for table in sorted(tables):
        scan = pl.scan_parquet if table.suffix == ".parquet" else pl.scan_csv
        try:
            first = scan(table).head(1).collect()
        except Exception:  # polars raises many kinds; it is not such a table
            continue
        for column in first.columns if first.height else ():
            if str(first[column][0]) in names:
                raise UserError(
                    f"'{table}' lists these images in its column '{column}'. Load it instead of "
                    f"the folder: --path {table} --data image={column}, with --client and --label."
                )


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
        raise UserError(f"The zip '{path}' holds the unsafe name '{name}'. Create it again.")


def _placed(entries: list[_Entry], path: Path) -> list[_Entry]:
    """Each entry with its split and class, relative to the common parent folders."""
    wrapped = len(_wrapper([PurePosixPath(e.name).parts[:-2] for e in entries]))
    owned, placed = _owned(entries), []
    for entry in entries:
        *split, label, _ = ("", "", *PurePosixPath(entry.name).parts[wrapped:])[-4:]
        where = [s for s in split if s]
        if owned and label and len(where) == 1:
            placed.append(_Entry(entry.name, entry.bytes, "train", label, where[0]))
            continue
        if not label or len(where) > 1 or (where and where[0] not in SPLITS):
            raise UserError(
                f"'{entry.name}' in '{path}' is not in a class folder. "
                "Use <class>/<image>, <user>/<class>/<image>, or train/<class>/<image> and "
                "test/<class>/<image>."
            )
        placed.append(_Entry(entry.name, entry.bytes, where[0] if where else "train", label))
    if not any(e.split == "train" for e in placed):
        raise UserError(f"'{path}' has no training images in class folders.")
    return placed


def _owned(entries: list[_Entry]) -> bool:
    """Whether all images are in <user>/<class>/<image>: two folders, the first not a split."""
    parts = [PurePosixPath(entry.name).parts for entry in entries]
    depth = {len(each) for each in parts}
    users = {each[-3] for each in parts if len(each) >= 3}
    return len(depth) == 1 and len(users) > 1 and not users & {*SPLITS}


def _wrapper(folders: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The folders that all paths start with; `train` or `test` alone is a split, not a parent."""
    levels = zip(*folders, strict=False)
    common = [level[0] for level in itertools.takewhile(lambda x: len(set(x)) == 1, levels)]
    return tuple(common[:-1] if common and common[-1] in SPLITS else common)


def _of_classes(
    entries: list[_Entry], names: tuple[str, ...], path: Path
) -> tuple[list[_Entry], tuple[str, ...]]:
    """The entries in folders with these names."""
    known = [entry for entry in entries if entry.label in names]
    if not any(entry.split == "train" for entry in known):
        raise UserError(f"'{path}' has no training images in folders {', '.join(names)}.")
    gone = len(entries) - len(known)
    return known, (f"Left out {gone} images in other folders.",) if gone else ()


def _pixels(path: Path, entries: list[_Entry], size: tuple[int, int], color: bool) -> np.ndarray:
    """The decoded images, from the cache if the same zip was decoded before."""
    if path.is_dir() or len(entries) < WORTH_CACHING:
        return _decoded(path, entries, size, color)
    shape = (len(entries), 3 if color else 1, *size)
    key = [sha256_of(path), *map(str, shape), *(entry.name for entry in entries)]
    return remembered(key, shape, lambda: _decoded(path, entries, size, color))


def _decoded(path: Path, entries: list[_Entry], size: tuple[int, int], color: bool) -> np.ndarray:
    """uint8 [n, c, h, w], decoded one by one: for small images threads cost more than they gain."""
    channels = 3 if color else 1
    if len(entries) * size[0] * size[1] * channels > MAX_TOTAL:
        raise UserError(f"The images in '{path}' do not fit in memory. Give a smaller size.")
    pixels = np.empty((len(entries), *size, channels), np.uint8)
    for i, (name, content) in enumerate(_contents(path, entries)):
        pixels[i] = decoded(name, content, size, color).reshape(*size, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


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


def decoded(name: str, content: bytes, size: tuple[int, int], color: bool) -> np.ndarray:
    """One image as uint8 [h, w] or [h, w, 3]; `name` is for errors."""
    from PIL import Image

    height, width = size
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}×{image.height} is more than {MAX_PIXELS} pixels")
            plain = image.convert("RGB" if color else "L")
    except Exception as error:  # Pillow raises many types for damaged files
        raise UserError(f"Cannot read the image '{name}' ({error}). Remove it.") from None
    return np.asarray(plain if plain.size == (width, height) else plain.resize((width, height)))


def _testing(entries: list[_Entry], parted: bool, seed: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which entries are for testing: the test folder if there is one, else each by its own stream.

    A joint draw would let one image more or less change the use of the others.
    """
    if parted:
        return np.array([e.split == "test" for e in entries]), ()
    own = ("/".join(PurePosixPath(e.name).parts[-3 if e.user else -2 :]) for e in entries)
    testing = np.array([stream(seed, 0, f"held out {o}").random() < HELD_OUT for o in own])
    if testing.all():
        raise UserError("No image is left to train on. Add images, or a test folder.")
    return testing, (
        f"There is no test folder. {int(testing.sum())} images, drawn independently, are held out "
        "for testing.",
    )
