"""Write data into files, piece by piece, so that data larger than memory can be written."""

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
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import Column
from fedveil.data.federated import Examples, Federated, blocks
from fedveil.data.origin import UNSAID, Origin
from fedveil.data.saved import ABOUT, CHUNK, HEADER, Facts, Header, open_federated, seal
from fedveil.errors import UserError

KINDS = get_args(Facts.model_fields["kind"].annotation)


def save_federated(data: Federated, path: Path | str) -> None:
    """Write a population into a new directory, some clients at a time; `open_federated` opens it.

    The directory appears when it is complete. What is opened has the fingerprint of the same data
    in memory.
    """
    about = {name: getattr(data, name) for name in ABOUT} | {"origin": asdict(data.origin)}
    _save(Path(path), _pieces(data), data.test, about)


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
    """Write clients as they come, one after the other; no two need be in memory at once.

    `tested_on_clients` is false only where no test example is one of a client's own: with such
    data, and no others, runs can be selected privately. `origin` is that of the data the clients
    come from (`Federated.origin`), or `Origin()` for real clients of whom nothing was computed
    together, such as an encoder; where it is not given, every statement says so first.
    """
    pieces = ((client, np.array([len(client)])) for client in clients)
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
        "origin": asdict(origin),
    }
    _save(Path(path), pieces, test, about)


def _save(
    path: Path, pieces: Iterable[tuple[Examples, np.ndarray]], test: Examples, about: dict[str, Any]
) -> None:
    with _making(path) as folder:
        sizes = [np.zeros(1, dtype=np.int64)]
        with _Sink(folder / "inputs.npy") as inputs, _Sink(folder / "labels.npy") as labels:
            for examples, count in pieces:
                inputs.add(examples.inputs[:])
                labels.add(examples.labels[:])
                sizes.append(count)
        offsets = torch.from_numpy(np.cumsum(np.concatenate(sizes)))
        header = Header(
            **about,
            inputs=inputs.facts(),
            labels=labels.facts(),
            offsets=_save_column(folder / "offsets.npy", offsets),
            test_inputs=_save_column(folder / "test_inputs.npy", test.inputs),
            test_labels=_save_column(folder / "test_labels.npy", test.labels),
        )
        plain = header.model_dump(mode="json")
        plain["sha256"] = seal(plain)
        (folder / HEADER).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        open_federated(folder)  # refuses what could not be trained on, such as an unknown class


def _pieces(data: Federated) -> Iterator[tuple[Examples, np.ndarray]]:
    """Whole clients, as many as make a chunk."""
    offsets, sizes = data.offsets.numpy(), data.sizes.numpy()
    for first, last in blocks(offsets, _fitting(data.inputs)):
        start, stop = int(offsets[first]), int(offsets[last])
        yield Examples(data.inputs[start:stop], data.labels[start:stop]), sizes[first:last]


def _save_column(path: Path, column: Column) -> Facts:
    step = _fitting(column)
    with _Sink(path) as sink:
        for start in range(0, max(1, len(column)), step):  # once for none: even that has a shape
            sink.add(column[start : start + step])
    return sink.facts()


def _fitting(column: Column) -> int:
    """How many entries make a chunk."""
    return max(1, CHUNK // max(1, math.prod(column.shape[1:])))


class _Sink:
    """Writes a column piece by piece; how many entries it has is known at the end."""

    def __init__(self, path: Path) -> None:
        self._name, self._file = path.stem, path.open("wb")
        self._digest = hashlib.sha256()
        self._like: np.ndarray | None = None  # the first piece without its entries
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
        """More entries, of the kind and shape of those before."""
        plain = entries.contiguous().numpy()
        if self._like is None:
            self._like = plain[:0]
            self._write_head()
        if plain.dtype != self._like.dtype or plain.shape[1:] != self._like.shape[1:]:
            raise UserError(
                f"{self._name} of kind {plain.dtype} and shape {plain.shape[1:]} came after some "
                f"of kind {self._like.dtype} and shape {self._like.shape[1:]}; make them alike."
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

    def facts(self) -> Facts:
        """Of all that was written."""
        head = self._head()
        known = {"kind": self._known().dtype.name, "shape": head["shape"], "span": self._span}
        return Facts.model_validate({**known, "sha256": self._digest.hexdigest()})

    def _write_head(self) -> None:
        """The .npy header, which is as long for any number of entries."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, self._head())

    def _head(self) -> dict[str, Any]:
        like = self._known()
        shape = (self._length, *like.shape[1:])
        return {"descr": like.dtype.str, "fortran_order": False, "shape": shape}

    def _known(self) -> np.ndarray:
        if self._like is None:
            raise UserError("There are no clients to save; at least one is needed.")
        if self._like.dtype.name not in KINDS:
            raise UserError(
                f"{self._name} of kind {self._like.dtype} cannot be saved; "
                f"convert them to {' or '.join(KINDS)}."
            )
        return self._like


@contextmanager
def _making(path: Path) -> Iterator[Path]:
    """A directory that gets its name when all is in it, and is gone if anything goes wrong."""
    if path.exists():
        raise UserError(f"{path} is already there; choose another place for the data.")
    folder = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        folder.mkdir(mode=0o700, parents=True)  # training data are for their owner alone
        yield folder
        folder.rename(path)
    except OSError as problem:
        raise UserError(f"Could not save data to {path}: {problem.strerror or problem}.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
