"""Data as contiguous columns: `Dataset` before the split over clients, `Federated` after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Size, Tensor

from fedveil.data.columns import DataColumn, Repeated, digest, readable, span
from fedveil.data.fields import Inputs, Layout
from fedveil.data.origin import REAL, Origin
from fedveil.data.partition import ByKey, codes
from fedveil.data.sketch import sketched
from fedveil.errors import UserError, told
from fedveil.serialization import markup
from fedveil.serialization.arguments import check_fields

if TYPE_CHECKING:
    from polars import DataFrame

    from fedveil.data.partition import Assignment, Partitioner

SMALL = 2**30  # numbers read to recognise the same examples: 4 GB, a few seconds
BLOCK = 2**24  # numbers read at a time
IGNORED = -100  # the label of positions without a loss, as in torch


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and labels side by side: `inputs[j]` belongs to `labels[j]`.

    `layout` describes several inputs per example, which `Examples.of` packs. `owners` names the
    client of each test example, if it is known.

    >>> len(Examples(torch.zeros(3, 2), torch.tensor([0, 1, 0])))
    3
    """

    inputs: DataColumn  # [n, ...]: float32, or int64 for token ids
    labels: DataColumn  # [n]: int64 classes or float32 targets; [n, length] for sequences
    layout: Layout | None = None  # of several inputs, which are packed
    owners: np.ndarray | None = None  # of test examples: the client of each, if known; private

    @classmethod
    def of(cls, inputs: Inputs, labels: Tensor) -> Examples:
        """Examples with several inputs: tensors by name, or in the order of the module's arguments.

        A label of −100 is not trained or evaluated on, such as that of a padded position.
        """
        layout = Layout.of(inputs)
        return cls(layout.pack(inputs), labels, layout)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_columns(self, "inputs", "labels")
        if len(self.inputs) != len(self.labels):
            raise UserError(
                f"There are {len(self.inputs)} inputs but {len(self.labels)} labels. "
                "Give every example exactly one label."
            )
        if self.owners is not None and len(self.owners) != len(self.labels):
            raise UserError(
                f"There are {len(self.labels)} labels but {len(self.owners)} clients. Give the "
                "client of every example."
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set as loaded: training and test examples, not yet split over clients.

    Args:
        name: Name of the data set.
        train: Training examples.
        test: Test examples.
        classes: Number of classes.
        loss: Loss of the data.
        class_names: Names of the classes, if they have any.
        keys: The client of each training example, for `ByKey`.
        notes: Messages for the user.
        encoder: The encoder of a table, as JSON.
        origin: Whether clients are real, and what was computed from their data.
        sketch: Sketch of a table's rows.
        source: Identifies a table's rows and the column of its clients.
        tested_on_clients: Whether test examples may belong to clients.
        keyed_by: The column that names the clients, if it is one.
        rows: Identifies a table's rows, whoever's they are.

    >>> part = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    >>> Dataset("zeros", part, part, classes=2)
    <Dataset zeros: 3 training and 3 test examples, 2 classes>
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    loss: str = "cross_entropy"
    class_names: tuple[str, ...] = ()
    keys: np.ndarray | None = None  # the client of each training example
    notes: tuple[str, ...] = ()  # messages for the user, one line each
    encoder: str | None = None  # the table encoder, as JSON
    origin: Origin = REAL
    sketch: tuple[str, ...] = ()  # of a table's rows as stored in its file
    source: str = ""  # identifies a table's rows, in any order and however they are encoded
    tested_on_clients: bool = True  # whether test examples may belong to clients
    keyed_by: str = ""  # the column of `keys`, if it is one
    rows: str = ""  # identifies a table's rows, whoever's they are

    def __post_init__(self) -> None:
        if isinstance(self.keys, list | tuple):
            object.__setattr__(self, "keys", np.asarray(self.keys, dtype=object))
        check_fields(self)
        if self.train.layout != self.test.layout:
            raise UserError(
                f"'{self.name}' has training inputs {self.train.layout} but test inputs "
                f"{self.test.layout}. Give both the same inputs."
            )
        for part in (self.train, self.test):
            _check_labels(self.name, part.labels, self.classes, self.loss)

    def __repr__(self) -> str:
        counts = f"{len(self.train)} training and {len(self.test)} test examples"
        return f"<Dataset {self.name}: {counts}, {self.classes} classes>"

    def split(self, partitioner: Partitioner, seed: int = 0) -> Federated:
        """Assign every client its examples; the same seed gives the same split."""
        if isinstance(partitioner, type) or not hasattr(partitioner, "assign"):
            raise UserError(
                f"split: partitioner is {told(partitioner)}. Give one such as Iid(100), "
                "Dirichlet(100, 0.5) or ByKey()."
            )
        if not isinstance(seed, int | np.integer) or seed < 0:
            raise UserError(f"split: seed is {told(seed)}. Give a whole number, at least 0.")
        rng = np.random.default_rng(seed)
        assignment = partitioner.assign(self.train.labels[:].numpy(), self.keys, rng)
        order = torch.from_numpy(assignment.order)
        keyed = isinstance(partitioner, ByKey) and self.keys is not None
        return Federated(
            name=self.name,
            inputs=_in_order(self.train.inputs, order, assignment.repeats),
            labels=self.train.labels[order].contiguous(),
            offsets=torch.from_numpy(assignment.offsets),
            test=self.test if keyed else replace(self.test, owners=None),
            classes=self.classes,
            loss=self.loss,
            notes=self.notes,
            encoder=self.encoder,
            class_names=self.class_names,
            tested_on_clients=keyed and len(self.test) > 0 and self.tested_on_clients,
            origin=self.origin if keyed else self.origin.split(assignment.repeats),
            sketch=self.sketch,
            source=self.source if keyed else "",
            names=_first_of_each(self.keys, assignment) if keyed else None,
            keyed_by=self.keyed_by if keyed else "",
            layout=self.train.layout,
            rows=self.rows,
        )

    def held_out(self, share: float, seed: int = 0) -> Dataset:
        """Test on a random share of the training examples; the test examples are left out.

        Choose settings on such data: a choice by the test examples makes their score too good.
        """
        if not 0 < share < 1:
            raise UserError(f"held_out is {share}. Give a share between 0 and 1, such as 0.1.")
        if self.keys is not None:
            raise UserError(
                f"'{self.name}' says which client owns each example, so held_out would test on "
                "clients' own examples. Remove held_out."
            )
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.train)))
        count = round(share * len(order))
        parts = order[count:].sort().values, order[:count].sort().values
        train, test = (Examples(self.train.inputs[p], self.train.labels[p]) for p in parts)
        return replace(self, train=train, test=test)

    def by_example(self) -> Federated:
        """Make every example a unit of its own, for data whose owners are unknown."""
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
            origin=self.origin.by_example(),
            sketch=self.sketch,
            source=self.source,
            layout=self.train.layout,
            rows=self.rows,
        )


@dataclass(frozen=True, eq=False)
class Optimum:
    """x*, the minimizer of the mean client loss, and Δ_i* = f_i(x*) − min f_i of each client.

    Das et al. 2022, Definition 1. Known for constructed problems (problems.py).
    """

    x: Tensor  # [d], float64
    gaps: Tensor  # [clients], float64
    start: Tensor | None = None  # where the problem says that training starts, [d], float32

    def projected(self, x: Tensor) -> tuple[float | None, float | None]:
        """x − x* in two dimensions: along the line from x* to the start, and away from that line.

        a² + b² = ‖x − x*‖², so x* is the origin and no distance from it is lost.

        >>> at = Optimum(torch.zeros(3).double(), torch.zeros(1), torch.tensor([2.0, 0.0, 0.0]))
        >>> at.projected(torch.tensor([1.0, 3.0, 4.0]))
        (1.0, 5.0)
        """
        if self.start is None or not (length := float((self.start - self.x).norm())):
            return None, None
        moved, line = x.double() - self.x, (self.start - self.x) / length
        along = moved @ line
        return float(along), float((moved - along * line).norm())


@dataclass(frozen=True, eq=False, repr=False)
class Federated:
    """Training examples stored client by client; client i owns [offsets[i], offsets[i+1]).

    Build one with `Dataset.split`, `from_arrays`, `from_torch`, `from_frames`, `from_hf` or
    `from_parquet`.

    Args:
        name: Name of the data set.
        inputs: All inputs, [examples, …].
        labels: All labels, [examples].
        offsets: Where the examples of each client start, and the number of examples.
        test: Test examples.
        classes: Number of classes.
        loss: Loss of the data.
        unit: What is protected: client or example.
        notes: Messages for the user.
        encoder: The encoder of a table, as JSON.
        optimum: The minimizer, if it is known.
        class_names: Names of the classes, if they have any.
        tested_on_clients: Whether test examples were held out from the clients' own.
        origin: Whether clients are real, and what was computed from their data.
        sketch: Sketch of a table's rows.
        source: Identifies a table's rows and the column of its clients.
        names: Names of the clients. They are private.
        layout: Describes several inputs per example.
        keyed_by: The column that names the clients, if it is one.
        rows: Identifies a table's rows, whoever's they are.

    >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    >>> Federated("zeros", x, y, torch.tensor([0, 2, 3]), Examples(x, y), classes=2)
    <Federated zeros: 2 clients, 3 examples, 2 classes>
    """

    name: str
    inputs: DataColumn
    labels: DataColumn
    offsets: Tensor
    test: Examples
    classes: int
    loss: str = "cross_entropy"
    unit: str = "client"
    notes: tuple[str, ...] = ()
    encoder: str | None = None
    optimum: Optimum | None = None
    class_names: tuple[str, ...] = ()
    tested_on_clients: bool = False  # whether test examples were held out from the clients' own
    origin: Origin = REAL
    sketch: tuple[str, ...] = ()  # of a table's rows as stored in its file
    source: str = ""  # identifies a table's rows, in any order and however they are encoded
    names: np.ndarray | None = None  # of the clients, if the data name them; private
    layout: Layout | None = None  # of several inputs, which are packed
    keyed_by: str = ""  # the column that names the clients, if it is one
    rows: str = ""  # identifies a table's rows, however they are encoded, held out and split

    def __post_init__(self) -> None:
        check_fields(self)
        _check_columns(self, "inputs", "labels")
        if self.clients < 1:
            raise UserError(f"'{self.name}' has no clients. Training needs at least one.")
        if bool((self.sizes < 1).any()):
            empty = int((self.sizes < 1).nonzero()[0])
            raise UserError(
                f"Client {empty} of '{self.name}' has no examples. "
                "Remove empty clients or use fewer clients."
            )
        _check_labels(self.name, self.labels, self.classes, self.loss)

    def __repr__(self) -> str:
        held = f"{len(self.labels)} examples" if readable(self.inputs) else "examples elsewhere"
        counts = f"{self.clients} {self.unit}s, {held}"
        return f"<Federated {self.name}: {counts}, {self.classes} classes>"

    def _repr_html_(self) -> str:
        """Public facts as a table, for notebooks: nothing is counted in the clients' examples."""
        facts = {
            f"{self.unit}s": f"{self.clients:,}",
            "shape of an input": list(self.inputs.shape[1:]),
            "classes": ", ".join(self.class_names[:10]) or self.classes,
            "loss": self.loss,
            "test examples": f"{len(self.test):,}",
        }
        return markup.table(facts.items(), caption=self.name)

    def to_frame(self) -> DataFrame:
        """One row per client with its number of examples, as a polars DataFrame. Private data."""
        from polars import DataFrame

        return DataFrame({"client": np.arange(self.clients), "examples": self.sizes.numpy()})

    def plot(self, chart: str | None = None) -> Any:
        """Clients by their number of examples, or 'Classes of clients', as a Plotly figure.

        Counts of private data: no ε covers them.
        """
        import fedveil

        return fedveil.plot(self, chart)

    @staticmethod
    def from_arrays(*given: Any, **options: Any) -> Federated:
        """From arrays of inputs, labels and clients: see `data.building.from_arrays`."""
        from fedveil.data import building

        return building.from_arrays(*given, **options)

    @staticmethod
    def from_torch(*given: Any, **options: Any) -> Federated:
        """From one torch Dataset per client: see `data.building.from_torch`."""
        from fedveil.data import building

        return building.from_torch(*given, **options)

    @staticmethod
    def from_frames(*given: Any, **options: Any) -> Federated:
        """From one table per client: see `data.building.from_frames`."""
        from fedveil.data import building

        return building.from_frames(*given, **options)

    @staticmethod
    def from_hf(*given: Any, **options: Any) -> Federated:
        """From a Hugging Face data set: see `data.building.from_hf`."""
        from fedveil.data import building

        return building.from_hf(*given, **options)

    @staticmethod
    def from_parquet(*given: Any, **options: Any) -> Federated:
        """From a Parquet file, streamed to disk: see `data.building.from_parquet`."""
        from fedveil.data import building

        return building.from_parquet(*given, **options)

    @property
    def clients(self) -> int:
        """Number of clients: the population size, a public number."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """Number of examples of each client, [clients]."""
        return self.offsets[1:] - self.offsets[:-1]

    def refuse_by_example(self, recipe: str) -> None:
        """Refuse to protect clients with data that does not say who owns which example."""
        if self.unit == "example":
            raise UserError(
                f"{recipe} protects clients, but '{self.name}' does not say which client owns "
                "which example. Use an example-level recipe such as dp_sgd or dp_lsgd, or, for a "
                "simulation, --simulate-clients N."
            )

    def client(self, index: int) -> Examples:
        """The examples of one client."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return Examples(self.inputs[start:stop], self.labels[start:stop], self.layout)

    def fingerprint(self) -> str:
        """SHA-256 of the examples and their owners; equal for the same data in the same order.

        Columns on demand are not read: they state their own digest (`OnDemand.digest`).
        """
        whole = hashlib.sha256(self.unit.encode())
        for part in (self.offsets, self.inputs, self.labels):
            whole.update(f"{part.dtype} {tuple(part.shape)} {digest(part)}\n".encode())
        if self.layout is not None:  # the same bytes may be other inputs
            whole.update(f"{self.layout}".encode())
        return whole.hexdigest()

    def contents(self) -> str:
        """Hashes of the contents in any order and split: of a table's rows, and of the examples.

        Data with one of them in common have the same contents (`same_contents`).
        """
        return f"{self.rows} {self._examples()}".strip()

    def _examples(self) -> str:
        """Σ SHA-256(example) mod 2²⁵⁶: equal for the same examples in any order and split.

        Reads block by block. Columns of more than `SMALL` numbers, or whose examples are with the
        clients, are identified by their digests, which are equal for any split, but not for
        another order.
        """
        if not self._small:
            whole = "".join(map(digest, (self.inputs, self.labels)))
            return hashlib.sha256(whole.encode()).hexdigest()
        total = sum(int.from_bytes(each, "big") for each in self._digests())
        return f"{total % 2**256:064x}"

    def resemblance(self) -> tuple[str, ...]:
        """Sketch of the table's rows, or of the examples; empty for columns above `SMALL`."""
        if self.sketch or not self._small:
            return self.sketch
        first = b"".join(each[:8] for each in self._digests())
        return sketched(np.frombuffer(first, dtype=">u8").astype(np.uint64))

    @property
    def _small(self) -> bool:
        return self.inputs.shape.numel() <= SMALL and readable(self.inputs)

    def _digests(self) -> Iterator[bytes]:
        """SHA-256 of each example, read block by block."""
        step = max(1, BLOCK * len(self.inputs) // max(self.inputs.shape.numel(), 1))
        for start in range(0, len(self.labels), step):
            some = slice(start, start + step)
            for x, y in zip(_plain(self.inputs[some]), _plain(self.labels[some]), strict=True):
                yield hashlib.sha256(x.tobytes() + y.tobytes()).digest()

    def test_units(self) -> np.ndarray:
        """The unit that each test example belongs to, as a code from 0, int64.

        For units `example`, every test example is one. Made-up clients own the test examples in
        turn. Test examples of unknown owners are refused.
        """
        count = len(self.test)
        if self.unit == "example":
            return np.arange(count)
        if self.test.owners is not None:
            return codes(self.test.owners)
        if not self.origin.simulated:
            raise UserError(
                f"'{self.name}' does not say which client each test example belongs to, so no "
                "noise can hide a client in its evaluation. Hold examples of clients out, name "
                "the clients of the test examples, or use an example-level recipe such as dp_sgd."
            )
        return np.arange(count) % self.clients

    def by_example(self) -> Federated:
        """The same data with every example as a unit of its own (unit: example)."""
        offsets = torch.arange(len(self.labels) + 1)
        origin = self.origin.by_example()
        return replace(
            self, offsets=offsets, unit="example", optimum=None, origin=origin, names=None
        )

    def records_of(self, client: int) -> Federated:
        """One client's examples, each as a unit of its own."""
        own = self.client(client)
        offsets = torch.arange(len(own) + 1)
        return replace(
            self, inputs=own.inputs, labels=own.labels, offsets=offsets, unit="example",
            optimum=None, names=None, rows="",
        )  # fmt: skip


def same_contents(one: str, other: str) -> bool:
    """Whether two data sets have a hash of their contents in common.

    >>> same_contents("rows examples", "examples"), same_contents("rows", "examples")
    (True, False)
    """
    return not set(one.split()).isdisjoint(other.split())


def _in_order(column: DataColumn, order: Tensor, repeats: bool) -> DataColumn:
    """The entries in this order; those that several clients own are kept once."""
    if repeats and isinstance(column, Tensor) and len(order) > len(column):
        return Repeated(column.contiguous(), order)
    return column[order].contiguous()


def _first_of_each(keys: np.ndarray | None, assignment: Assignment) -> np.ndarray | None:
    """The name of each client, by its first example."""
    return None if keys is None else keys[assignment.order[assignment.offsets[:-1]]]


def blocks(offsets: np.ndarray, examples: int) -> Iterator[tuple[int, int]]:
    """(first, last) of runs of whole clients with at most `examples` examples, or one client.

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


def _check_columns(made: Examples | Federated, *names: str) -> None:
    """Refuse anything but tensors, and columns that are read on demand."""
    for name in names:
        given = getattr(made, name)
        if isinstance(given, np.ndarray) or not isinstance(getattr(given, "shape", None), Size):
            raise UserError(
                f"{type(made).__name__}: {name} is {told(given)}. Give a tensor, such as "
                "torch.as_tensor(…), or use Federated.from_arrays."
            )
        if not given.shape:
            raise UserError(f"{type(made).__name__}: {name} is one number. Give one per example.")


def _check_labels(name: str, labels: DataColumn, classes: int, loss: str) -> None:
    from fedveil.models.losses import loss_named

    compared = loss_named(loss)
    if compared.target != "class" or 0 in labels.shape:
        return
    if isinstance(labels, Tensor):
        labels = labels[compared.counted(labels)]
    low, high = (0, 0) if 0 in labels.shape else span(labels)
    if low < 0 or high >= classes:
        raise UserError(
            f"'{name}' has labels from {low} to {high}, but {classes} classes need "
            f"labels from 0 to {classes - 1}. Recode the label column."
        )
