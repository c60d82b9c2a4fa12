"""Data as contiguous columns: a `Dataset` before it is split, a `Federated` one after."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import Column, digest, span
from fedveil.data.origin import REAL, Origin
from fedveil.data.partition import ByKey
from fedveil.data.sketch import sketched
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.data.partition import Partitioner

SMALL = 2**30  # numbers that are read to know the same examples again: 4 GB, a few seconds
BLOCK = 2**24  # numbers that are read at once


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and labels side by side: `inputs[j]` belongs to `labels[j]`."""

    inputs: Column  # [n, ...]: float32, or int64 for token ids
    labels: Column  # [n]: int64 classes or float32 targets; [n, length] for sequences

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise UserError(
                f"{len(self.inputs)} inputs came with {len(self.labels)} labels; "
                "every example needs exactly one label."
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set as its source gives it: train and test examples, not yet split over clients."""

    name: str
    train: Examples
    test: Examples
    classes: int
    loss: str = "cross_entropy"
    class_names: tuple[str, ...] = ()
    keys: np.ndarray | None = None  # for each training example: to which client it belongs
    notes: tuple[str, ...] = ()  # what the user should know, a line each
    encoder: str | None = None  # how a table's rows became inputs, as JSON
    origin: Origin = REAL
    sketch: tuple[str, ...] = ()  # of a table's rows as they are in its file

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            _check_labels(self.name, part.labels, self.classes, self.loss)

    def __repr__(self) -> str:
        counts = f"{len(self.train)} training and {len(self.test)} test examples"
        return f"<Dataset {self.name}: {counts}, {self.classes} classes>"

    def split(self, partitioner: Partitioner, seed: int = 0) -> Federated:
        """Give every client its examples; the same seed gives the same split."""
        rng = np.random.default_rng(seed)
        assignment = partitioner.assign(self.train.labels[:].numpy(), self.keys, rng)
        order = torch.from_numpy(assignment.order)
        return Federated(
            name=self.name,
            inputs=self.train.inputs[order],
            labels=self.train.labels[order],
            offsets=torch.from_numpy(assignment.offsets),
            test=self.test,
            classes=self.classes,
            loss=self.loss,
            notes=self.notes,
            encoder=self.encoder,
            class_names=self.class_names,
            tested_on_clients=isinstance(partitioner, ByKey) and len(self.test) > 0,
            origin=self.origin if isinstance(partitioner, ByKey) else self.origin.split(),
            sketch=self.sketch,
        )

    def by_example(self) -> Federated:
        """Every example a population member of its own, where nobody knows whose it is."""
        return Federated(
            name=self.name,
            inputs=self.train.inputs,
            labels=self.train.labels,
            offsets=torch.arange(len(self.train) + 1),
            test=self.test,
            classes=self.classes,
            loss=self.loss,
            unit="example",
            notes=self.notes,
            encoder=self.encoder,
            class_names=self.class_names,
            origin=self.origin,
            sketch=self.sketch,
        )


@dataclass(frozen=True, eq=False)
class Optimum:
    """x*, the minimizer of the mean client loss, and Δ_i* = f_i(x*) − min f_i of each client.

    Das et al. 2022, Definition 1. Known for constructed problems (problems.py).
    """

    x: Tensor  # [d], float64
    gaps: Tensor  # [clients], float64


@dataclass(frozen=True, eq=False, repr=False)
class Federated:
    """Training examples lying client after client; client i owns [offsets[i], offsets[i+1])."""

    name: str
    inputs: Column
    labels: Column
    offsets: Tensor
    test: Examples
    classes: int
    loss: str = "cross_entropy"
    unit: str = "client"
    notes: tuple[str, ...] = ()
    encoder: str | None = None
    optimum: Optimum | None = None
    class_names: tuple[str, ...] = ()
    tested_on_clients: bool = False  # whether test examples were held out of the clients' own
    origin: Origin = REAL
    sketch: tuple[str, ...] = ()  # of a table's rows as they are in its file

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise UserError(f"'{self.name}' has no clients; at least one is needed to train.")
        if bool((self.sizes < 1).any()):
            empty = int((self.sizes < 1).nonzero()[0])
            raise UserError(
                f"Client {empty} of '{self.name}' has no examples; "
                "drop empty clients or use fewer clients."
            )
        _check_labels(self.name, self.labels, self.classes, self.loss)

    def __repr__(self) -> str:
        counts = f"{self.clients} {self.unit}s, {len(self.labels)} examples"
        return f"<Federated {self.name}: {counts}, {self.classes} classes>"

    @property
    def clients(self) -> int:
        """How many clients there are: the population, a public number."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """Examples of each client, [clients]."""
        return self.offsets[1:] - self.offsets[:-1]

    def refuse_by_example(self, recipe: str) -> None:
        """Data whose clients nobody knows cannot be used to protect clients."""
        if self.unit == "example":
            raise UserError(
                f"{recipe} protects clients, but '{self.name}' is by example: nobody says whose an "
                "example is. Use an example-level recipe such as dp_sgd or dp_lsgd, or, for a "
                "simulation, --simulate-clients N."
            )

    def client(self, index: int) -> Examples:
        """The examples of one client."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return Examples(self.inputs[start:stop], self.labels[start:stop])

    def fingerprint(self) -> str:
        """SHA-256 of who owns which examples; the same for the same data in the same order.

        Data on demand are not read for it: their columns say what they are (`OnDemand.digest`).
        """
        whole = hashlib.sha256(self.unit.encode())
        for part in (self.offsets, self.inputs, self.labels):
            whole.update(f"{part.dtype} {tuple(part.shape)} {digest(part)}\n".encode())
        return whole.hexdigest()

    def contents(self) -> str:
        """Σ SHA-256(example) mod 2²⁵⁶: the same for the same examples in any order and split.

        Read block by block. Columns of more than `SMALL` numbers are known by their digests, which
        are the same for any split, but not for another order.
        """
        if self.inputs.shape.numel() > SMALL:
            whole = "".join(map(digest, (self.inputs, self.labels)))
            return hashlib.sha256(whole.encode()).hexdigest()
        total = sum(int.from_bytes(each, "big") for each in self._digests())
        return f"{total % 2**256:064x}"

    def resemblance(self) -> tuple[str, ...]:
        """The sketch of a table's rows, else of the examples; none of columns above `SMALL`."""
        if self.sketch or self.inputs.shape.numel() > SMALL:
            return self.sketch
        first = b"".join(each[:8] for each in self._digests())
        return sketched(np.frombuffer(first, dtype=">u8").astype(np.uint64))

    def _digests(self) -> Iterator[bytes]:
        """SHA-256 of each example, read block by block."""
        step = max(1, BLOCK * len(self.inputs) // max(self.inputs.shape.numel(), 1))
        for start in range(0, len(self.labels), step):
            some = slice(start, start + step)
            for x, y in zip(_plain(self.inputs[some]), _plain(self.labels[some]), strict=True):
                yield hashlib.sha256(x.tobytes() + y.tobytes()).digest()

    def by_example(self) -> Federated:
        """The same data with every example a population member of its own (unit: example)."""
        offsets = torch.arange(len(self.labels) + 1)
        origin = self.origin.by_example()
        return replace(self, offsets=offsets, unit="example", optimum=None, origin=origin)


def blocks(offsets: np.ndarray, examples: int) -> Iterator[tuple[int, int]]:
    """(first, last) of whole clients first … last−1 with at most so many examples, or one client.

    >>> list(blocks(np.array([0, 2, 4, 9, 10]), 4))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = 0
    while first < len(offsets) - 1:
        fit = int(np.searchsorted(offsets, offsets[first] + examples, side="right")) - 1
        last = max(first + 1, fit)
        yield first, last
        first = last


def _plain(column: Tensor) -> np.ndarray:
    return column.contiguous().numpy()


def _check_labels(name: str, labels: Column, classes: int, loss: str) -> None:
    if loss != "cross_entropy" or 0 in labels.shape:
        return
    low, high = span(labels)
    if low < 0 or high >= classes:
        raise UserError(
            f"'{name}' has labels from {low} to {high}, but {classes} classes mean "
            f"labels from 0 to {classes - 1}; recode the label column."
        )
