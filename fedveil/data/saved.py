"""Data in files: a directory of .npy columns, read only where needed.

Each column's SHA-256 is computed while it is written and stored in `federated.json`. Opening checks
that file, all client offsets, and the type, shape and length of every column. It trusts the rest:
only `verify_federated`, which reads everything, detects altered bytes within inputs or labels.
Until then altered data have the fingerprint of the original, and a seeded run draws the same noise
for them. Neither check detects someone who rewrites a column and `federated.json` together. The
files must not change while the data are in use. Pages that were read stay in memory until other
memory needs the space; the operating system counts them towards the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator
from torch import Tensor

from fedveil.data.columns import Index, digest, positions
from fedveil.data.federated import Examples, Federated
from fedveil.data.fields import Field, Layout
from fedveil.data.origin import Origin
from fedveil.errors import UserError
from fedveil.serialization.arguments import for_python

HEADER = "federated.json"
MAX_HEADER = 2**26  # bytes
CHUNK = 2**24  # numbers written at a time: 64 MB
COLUMNS = ("inputs", "labels", "offsets", "test_inputs", "test_labels")
OWNERS = "test_owners"  # the column of the test examples' clients, if they are known
ABOUT = (
    "name", "classes", "loss", "unit", "notes", "encoder", "class_names", "tested_on_clients",
    "sketch", "rows",
)  # fmt: skip


class ColumnFacts(BaseModel):
    """What the header stores about a column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["float32", "int64", "uint8"]
    shape: tuple[int, ...]
    sha256: str
    span: tuple[int, int] | None = None  # smallest and largest value, for whole numbers


class FieldFacts(BaseModel):
    """One of several inputs, as stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    shape: tuple[NonNegativeInt, ...]
    kind: Literal[
        "float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32",
        "int64",
    ]  # fmt: skip
    high: int

    @classmethod
    def listed(cls, layout: Layout) -> tuple[FieldFacts, ...]:
        """The inputs of a layout."""
        try:
            return tuple(
                cls(name=one.name, shape=one.shape, kind=str(one.dtype)[6:], high=one.high)  # type: ignore[arg-type]
                for one in layout.fields
            )
        except ValueError:
            raise UserError(
                f"The inputs {layout} cannot be saved. Convert them to floats, integers or bool."
            ) from None

    def field(self) -> Field:
        """As it was."""
        return Field(self.name, self.shape, getattr(torch, self.kind), self.high)


class Provenance(BaseModel):
    """An `Origin` as stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    simulated: bool
    exclusions: tuple[str, ...]
    repeats: bool = False
    statistics: dict[str, float | bool] | None = None
    released: tuple[str, ...] = ()


class Header(BaseModel):
    """`federated.json`, without its own SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["fedveil data 1", "fedveil data 2"] = "fedveil data 2"
    name: str
    classes: int
    loss: str
    unit: Literal["client", "example"]
    notes: tuple[str, ...]
    encoder: str | None
    inputs: ColumnFacts
    labels: ColumnFacts
    offsets: ColumnFacts
    test_inputs: ColumnFacts
    test_labels: ColumnFacts
    # Format 1 lacks the following fields: test examples may be the clients' own, and an encoder
    # may have been fitted.
    class_names: tuple[str, ...] = ()
    tested_on_clients: bool = True
    sketch: tuple[str, ...] = ()
    origin: Provenance | None = None
    test_owners: ColumnFacts | None = None
    fields: tuple[FieldFacts, ...] | None = None  # of several inputs, which are packed
    rows: str = ""  # of a table

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns in files."""
        return COLUMNS if self.test_owners is None else (*COLUMNS, OWNERS)

    @model_validator(mode="after")
    def _complete(self) -> Header:
        """Refuse a header of format 2 without its origin, rather than read it as format 1."""
        if (self.format == "fedveil data 2") != (self.origin is not None):
            raise ValueError("its origin is missing")
        packed = {self.inputs.kind, self.test_inputs.kind} == {"uint8"}
        if packed != bool(self.fields) or (packed and self.inputs.shape[1:] != (self.width,)):
            raise ValueError("its inputs do not fit their layout")
        return self

    @property
    def layout(self) -> Layout | None:
        """Of several inputs; None for one tensor."""
        return Layout(tuple(each.field() for each in self.fields)) if self.fields else None

    @property
    def width(self) -> int:
        """Bytes of an example of several inputs."""
        return 0 if self.layout is None else self.layout.width


def seal(plain: dict[str, Any]) -> str:
    """SHA-256 of a header's plain values."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Mapped:
    """A column in a file.  Reading returns a copy, so that nothing writes to the file."""

    entries: Tensor
    facts: ColumnFacts

    @property
    def shape(self) -> torch.Size:
        """Shape as saved."""
        return self.entries.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type as saved."""
        return self.entries.dtype

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Index) -> Tensor:
        wanted = positions(index, len(self))
        return self.entries[wanted.reshape(-1)].reshape(*wanted.shape, *self.shape[1:])

    def digest(self) -> str:
        """SHA-256 of its bytes, computed when they were written."""
        return self.facts.sha256

    def span(self) -> tuple[float, float]:
        """Smallest and largest whole number, found when they were written."""
        return self.facts.span or (-math.inf, math.inf)


def is_saved(path: Path) -> bool:
    """Whether a directory holds data that `save_federated` wrote, complete or not."""
    return any((path / name).is_file() for name in (HEADER, "offsets.npy"))


@for_python
def open_federated(path: Path | str) -> Federated:
    """Open the population saved at `path`; the module's docstring says what is checked.

    >>> open_federated("digits")  # doctest: +SKIP
    <Federated digits: 20 clients, 1437 examples, 10 classes>
    """
    path = Path(path)
    header = read_header(path)
    columns = {name: _mapped(path, name, header) for name in header.columns}
    owners = _checked(columns[OWNERS], path / f"{OWNERS}.npy") if OWNERS in columns else None
    return Federated(
        inputs=columns["inputs"],
        labels=columns["labels"],
        offsets=_offsets(columns["offsets"], len(columns["labels"]), path),
        test=Examples(columns["test_inputs"], columns["test_labels"], header.layout, owners=owners),
        layout=header.layout,
        origin=Origin.from_plain(None if header.origin is None else header.origin.model_dump()),
        **{name: getattr(header, name) for name in ABOUT},
    )


@for_python
def verify_federated(path: Path | str) -> None:
    """Read everything in the saved directory `path` and refuse any file that has changed.

    >>> verify_federated("digits")  # doctest: +SKIP
    """
    path = Path(path)
    open_federated(path)
    header = read_header(path)
    for name in header.columns:
        file, column = path / f"{name}.npy", _mapped(path, name, header)
        whole = hashlib.sha256()
        with file.open("rb") as source:
            source.seek(file.stat().st_size - column.entries.nbytes)
            while piece := source.read(CHUNK):
                whole.update(piece)
        if whole.hexdigest() != column.digest():
            raise _altered(file, "its content differs from what was written")


def read_header(path: Path) -> Header:
    """Read and verify `federated.json`."""
    file = path / HEADER
    if not file.is_file():
        raise UserError(
            f"{path} has no {HEADER}, so it is not a complete directory of saved data. "
            "Save the data again."
        )
    try:
        if file.stat().st_size > MAX_HEADER:
            raise ValueError("it is too large")
        plain = json.loads(file.read_text(encoding="utf-8"))
        sealed = plain.pop("sha256")
        header = Header.model_validate(plain)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _altered(file, f"it is not the {HEADER} of saved data") from None
    if seal(plain) != sealed:
        raise _altered(file, "it was modified after it was written")
    return header


def _mapped(path: Path, name: str, header: Header) -> Mapped:
    """A column after a check of its type, shape and length."""
    file, facts = path / f"{name}.npy", getattr(header, name)
    try:
        array = np.lib.format.open_memmap(file, mode="r")
        fits = (array.dtype, array.shape) == (np.dtype(facts.kind), facts.shape)
        ends = array.offset + array.nbytes == file.stat().st_size
    except (OSError, ValueError, EOFError) as problem:
        why = str(problem).partition("\n")[0].rstrip(".")
        raise _altered(file, f"it cannot be read ({why})") from None
    if not (fits and ends and array.flags.c_contiguous):
        raise _altered(file, f"it is not exactly an array of {facts.kind} with shape {facts.shape}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the file is read-only
        return Mapped(torch.from_numpy(array), facts)


def _offsets(column: Mapped, examples: int, path: Path) -> Tensor:
    """All offsets, in memory and checked: they locate everything else."""
    offsets = column[:]
    sound = offsets.dim() == 1 and len(offsets) > 1 and offsets.dtype == torch.int64
    if not (sound and digest(offsets) == column.digest() and int(offsets[-1]) == examples):
        raise _altered(path / "offsets.npy", "its content differs from what was written")
    return offsets


def _checked(column: Mapped, file: Path) -> np.ndarray:
    """The clients of all test examples, in memory and checked: they decide who counts once."""
    owners = column[:]
    if owners.dim() != 1 or digest(owners) != column.digest():
        raise _altered(file, "its content differs from what was written")
    return owners.numpy()


def _altered(file: Path, what: str) -> UserError:
    return UserError(
        f"{file} has changed since it was saved: {what}. Restore a copy, or save the data again."
    )
