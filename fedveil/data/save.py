"""Writes data to files in chunks, so that data larger than memory can be saved."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import DataColumn
from fedveil.data.federated import Examples, Federated, blocks
from fedveil.data.fields import Layout
from fedveil.data.origin import UNSAID, Origin
from fedveil.data.partition import codes
from fedveil.data.saved import (
    ABOUT,
    CHUNK,
    HEADER,
    OWNERS,
    ColumnFacts,
    FieldFacts,
    Header,
    open_federated,
    seal,
)
from fedveil.errors import UserError, told
from fedveil.serialization.arguments import for_python

PLAIN, PACKED = ("float32", "int64"), ("uint8",)  # types of one input, and of several


@for_python
def save_federated(data: Federated, path: Path | str) -> None:
    """Save a population to a new directory `path`, in blocks of clients; `open_federated` opens it.

    The directory appears once it is complete. The opened data have the same fingerprint as the data
    in memory.

    >>> import fedveil as fv, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_federated(fv.load("digits").split(fv.Iid(20)), f"{folder}/digits")
    ...     fv.open_federated(f"{folder}/digits").clients
    20
    """
    about = {name: getattr(data, name) for name in ABOUT} | {"origin": asdict(data.origin)}
    _save(Path(path), _pieces(data), data.test, about)


@for_python
def save_clients(
    path: Path | str,
    clients: Iterable[Examples],
    test: Examples,
    name: str,
    classes: int,
    loss: str = "cross_entropy",
    class_names: tuple[str, ...] = (),
    tested_on_clients: bool = True,
    origin: Origin = UNSAID,
) -> None:
    """Save clients from an iterator, one at a time.

    Args:
        path: New directory.
        clients: The examples of one client after another.
        test: Test examples.
        name: Name of the data set.
        classes: Number of classes.
        loss: Loss of the data.
        class_names: Names of the classes, if they have any.
        tested_on_clients: False only if no test example belongs to a client: private selection
            accepts only such data.
        origin: That of the data the clients come from (`Federated.origin`), or `Origin()` for real
            clients of whom nothing was computed jointly, such as an encoder. Without it, every
            privacy statement opens with this gap.

    >>> import fedveil as fv, tempfile, torch
    >>> each = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_clients(f"{folder}/a", (each for _ in range(5)), each, "zeros", classes=2)
    ...     fv.open_federated(f"{folder}/a")
    <Federated zeros: 5 clients, 15 examples, 2 classes>
    """
    pieces = ((client, np.array([len(client)])) for client in map(_examples, clients))
    about = {
        "name": name,
        "classes": classes,
        "loss": loss,
        "unit": "client",
        "notes": (),
        "encoder": None,
        "class_names": class_names,
        "tested_on_clients": tested_on_clients,
        "sketch": (),
        "rows": "",
        "origin": asdict(origin),
    }
    _save(Path(path), pieces, test, about)


def _save(
    path: Path, pieces: Iterable[tuple[Examples, np.ndarray]], test: Examples, about: dict[str, Any]
) -> None:
    layout = test.layout
    kinds = PLAIN if layout is None else PACKED
    with _making(path) as folder:
        sizes = [np.zeros(1, dtype=np.int64)]
        with _Sink(folder / "inputs.npy", kinds) as inputs, _Sink(folder / "labels.npy") as labels:
            for examples, count in pieces:
                layout = _joined(layout, examples.layout)
                inputs.add(examples.inputs[:])
                labels.add(examples.labels[:])
                sizes.append(count)
        offsets = torch.from_numpy(np.cumsum(np.concatenate(sizes)))
        header = Header(
            **about,
            inputs=inputs.facts(),
            labels=labels.facts(),
            offsets=_save_column(folder / "offsets.npy", offsets),
            test_inputs=_save_column(folder / "test_inputs.npy", test.inputs, kinds),
            test_labels=_save_column(folder / "test_labels.npy", test.labels),
            test_owners=_save_owners(folder / f"{OWNERS}.npy", test),
            fields=None if layout is None else FieldFacts.listed(layout),
        )
        later = {OWNERS, "fields", "rows"}  # left out where they say nothing, as earlier versions
        unsaid = {name for name in later if not getattr(header, name)}
        plain = header.model_dump(mode="json", exclude=unsaid)
        plain["sha256"] = seal(plain)
        (folder / HEADER).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        open_federated(folder)  # refuses data that cannot be trained on, such as an unknown class


def _joined(one: Layout | None, other: Layout | None) -> Layout | None:
    if one is None or other is None:
        if one is not other:
            raise UserError(
                "Some examples have several inputs, and others have one tensor. Give all the same."
            )
        return None
    return one.joined(other)


def _pieces(data: Federated) -> Iterator[tuple[Examples, np.ndarray]]:
    """Blocks of whole clients, each about one chunk."""
    offsets, sizes = data.offsets.numpy(), data.sizes.numpy()
    for first, last in blocks(offsets, _fitting(data.inputs)):
        start, stop = int(offsets[first]), int(offsets[last])
        some = Examples(data.inputs[start:stop], data.labels[start:stop], data.layout)
        yield some, sizes[first:last]


def _save_column(path: Path, column: DataColumn, kinds: tuple[str, ...] = PLAIN) -> ColumnFacts:
    step = _fitting(column)
    with _Sink(path, kinds) as sink:
        for start in range(0, max(1, len(column)), step):  # once if empty: it still has a shape
            sink.add(column[start : start + step])
    return sink.facts()


def _save_owners(path: Path, test: Examples) -> ColumnFacts | None:
    """The clients of test examples as numbers, without their names."""
    if test.owners is None:
        return None
    return _save_column(path, torch.from_numpy(codes(test.owners)))


def _fitting(column: DataColumn) -> int:
    """Number of entries in a chunk."""
    return max(1, CHUNK // max(1, math.prod(column.shape[1:])))


class _Sink:
    """Writes a column in chunks; the number of entries is known at the end."""

    def __init__(self, path: Path, kinds: tuple[str, ...] = PLAIN) -> None:
        self._name, self._file, self._kinds = path.stem, path.open("wb"), kinds
        self._digest = hashlib.sha256()
        self._like: np.ndarray | None = None  # an empty array like the first chunk
        self._length = 0
        self._span: tuple[int, int] | None = None

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, kind: type | None, *problem: object) -> None:
        with self._file:
            if kind is None:
                self._write_head()
                self._file.flush()
                os.fsync(self._file.fileno())

    def add(self, entries: Tensor) -> None:
        """Append entries of the same type and shape as the previous ones."""
        plain = entries.contiguous().numpy()
        if self._like is None:
            self._like = plain[:0]
            self._write_head()
        if plain.dtype != self._like.dtype or plain.shape[1:] != self._like.shape[1:]:
            raise UserError(
                f"{self._name} of type {plain.dtype} and shape {plain.shape[1:]} follow "
                f"{self._name} of type {self._like.dtype} and shape {self._like.shape[1:]}. Give "
                "all the same."
            )
        if plain.size:
            self._take(plain)

    def _take(self, plain: np.ndarray) -> None:
        self._file.write(plain.data.cast("B"))
        self._digest.update(plain.data.cast("B"))
        self._length += len(plain)
        if np.issubdtype(plain.dtype, np.integer):
            ends = (int(plain.min()), int(plain.max()), *(self._span or ()))
            self._span = min(ends), max(ends)

    def facts(self) -> ColumnFacts:
        """Facts about everything written so far."""
        head = self._head()
        known = {"kind": self._known().dtype.name, "shape": head["shape"], "span": self._span}
        return ColumnFacts.model_validate({**known, "sha256": self._digest.hexdigest()})

    def _write_head(self) -> None:
        """The .npy header, whose length does not depend on the number of entries."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, self._head())

    def _head(self) -> dict[str, Any]:
        like = self._known()
        shape = (self._length, *like.shape[1:])
        return {"descr": like.dtype.str, "fortran_order": False, "shape": shape}

    def _known(self) -> np.ndarray:
        if self._like is None:
            raise UserError("There are no clients to save. Give at least one.")
        if self._like.dtype.name not in self._kinds:
            raise UserError(
                f"{self._name} of type {self._like.dtype} cannot be saved. "
                f"Convert them to {' or '.join(PLAIN)}."
            )
        return self._like


def _examples(client: object) -> Examples:
    if not isinstance(client, Examples):
        raise UserError(f"save_clients: a client is {told(client)}. Give the Examples of each.")
    return client


@contextmanager
def _making(path: Path) -> Iterator[Path]:
    """A directory that gets its final name when complete, and is removed on any error."""
    if path.exists():
        raise UserError(f"{path} already exists. Choose another directory for the data.")
    folder = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        folder.mkdir(mode=0o700, parents=True)  # only the owner may read training data
        yield folder
        folder.rename(path)
    except OSError as problem:
        raise UserError(f"Could not save data to {path}: {problem.strerror or problem}.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
