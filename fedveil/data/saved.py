"""Data in files: a directory of .npy columns of which only what is asked for is read.

Each column's SHA-256 is computed while it is written and kept in `federated.json`. Opening checks
that file, all client offsets, and the kind, shape and length of every column; it trusts the rest.
Bytes that were altered within inputs or labels are found by `verify_federated` only, which reads
everything; until then they have the fingerprint, and a seeded run the noise, of what was written.
Neither guards against one who rewrites a column and `federated.json` together. The files must not
change while the data are in use. Pages that were read stay in memory for as long as nothing else
needs it; the operating system counts them to the process all the same.
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
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from fedveil.data.columns import Index, digest, positions
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import Origin
from fedveil.errors import UserError

HEADER = "federated.json"
MAX_HEADER = 2**26  # bytes
CHUNK = 2**24  # numbers that are written at once: 64 MB
COLUMNS = ("inputs", "labels", "offsets", "test_inputs", "test_labels")
ABOUT = (
    "name", "classes", "loss", "unit", "notes", "encoder", "class_names", "tested_on_clients",
    "sketch",
)  # fmt: skip


class Facts(BaseModel):
    """What is kept of a column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["float32", "int64"]
    shape: tuple[int, ...]
    sha256: str
    span: tuple[int, int] | None = None  # the least and the greatest, of whole numbers


class Provenance(BaseModel):
    """An `Origin` as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    simulated: bool
    exclusions: tuple[str, ...]


class Header(BaseModel):
    """`federated.json`, but for the SHA-256 of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["fedveil data 1", "fedveil data 2"] = "fedveil data 2"
    name: str
    classes: int
    loss: str
    unit: Literal["client", "example"]
    notes: tuple[str, ...]
    encoder: str | None
    inputs: Facts
    labels: Facts
    offsets: Facts
    test_inputs: Facts
    test_labels: Facts
    # Format 1 does not say the following: then test examples may be the clients' own, and an
    # encoder may have been fitted.
    class_names: tuple[str, ...] = ()
    tested_on_clients: bool = True
    sketch: tuple[str, ...] = ()
    origin: Provenance | None = None

    @model_validator(mode="after")
    def _complete(self) -> Header:
        """A header of format 2 that lost its origin is not taken for one of format 1."""
        if (self.format == "fedveil data 2") != (self.origin is not None):
            raise ValueError("its origin is missing")
        return self


def seal(plain: dict[str, Any]) -> str:
    """SHA-256 of a header's plain values."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Mapped:
    """A column in a file.  What is asked for is a copy: nothing done to it reaches the file."""

    entries: Tensor
    facts: Facts

    @property
    def shape(self) -> torch.Size:
        """As it was saved."""
        return self.entries.shape

    @property
    def dtype(self) -> torch.dtype:
        """As it was saved."""
        return self.entries.dtype

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Index) -> Tensor:
        wanted = positions(index, len(self))
        return self.entries[wanted.reshape(-1)].reshape(*wanted.shape, *self.shape[1:])

    def digest(self) -> str:
        """The SHA-256 of its bytes, as computed when they were written."""
        return self.facts.sha256

    def span(self) -> tuple[float, float]:
        """The least and the greatest whole number, as found when they were written."""
        return self.facts.span or (-math.inf, math.inf)


def is_saved(path: Path) -> bool:
    """Whether a directory holds what `save_federated` made, or some of it."""
    return any((path / name).is_file() for name in (HEADER, "offsets.npy"))


def open_federated(path: Path | str) -> Federated:
    """The population saved in a directory; the head of this file says what is checked."""
    path = Path(path)
    header = read_header(path)
    columns = {name: _mapped(path, name, header) for name in COLUMNS}
    return Federated(
        inputs=columns["inputs"],
        labels=columns["labels"],
        offsets=_offsets(columns["offsets"], len(columns["labels"]), path),
        test=Examples(columns["test_inputs"], columns["test_labels"]),
        origin=Origin.from_plain(None if header.origin is None else header.origin.model_dump()),
        **{name: getattr(header, name) for name in ABOUT},
    )


def verify_federated(path: Path | str) -> None:
    """Read everything in a saved directory; what is not as it was written is refused by name."""
    path = Path(path)
    open_federated(path)
    header = read_header(path)
    for name in COLUMNS:
        file, column = path / f"{name}.npy", _mapped(path, name, header)
        whole = hashlib.sha256()
        with file.open("rb") as source:
            source.seek(file.stat().st_size - column.entries.nbytes)
            while piece := source.read(CHUNK):
                whole.update(piece)
        if whole.hexdigest() != column.digest():
            raise _altered(file, "its bytes are not those that were written")


def read_header(path: Path) -> Header:
    """`federated.json`, as it was written."""
    file = path / HEADER
    if not file.is_file():
        raise UserError(
            f"{path} has no {HEADER}, so it is not a whole directory of saved data; "
            "save the data anew."
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
        raise _altered(file, "it was changed after it was written")
    return header


def _mapped(path: Path, name: str, header: Header) -> Mapped:
    """A column of the right kind, shape and length."""
    file, facts = path / f"{name}.npy", getattr(header, name)
    try:
        array = np.lib.format.open_memmap(file, mode="r")
        fits = (array.dtype, array.shape) == (np.dtype(facts.kind), facts.shape)
        ends = array.offset + array.nbytes == file.stat().st_size
    except (OSError, ValueError, EOFError) as problem:
        why = str(problem).partition("\n")[0].rstrip(".")
        raise _altered(file, f"it cannot be read ({why})") from None
    if not (fits and ends and array.flags.c_contiguous):
        raise _altered(file, f"it does not hold just {facts.shape} of {facts.kind}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the file cannot be written to
        return Mapped(torch.from_numpy(array), facts)


def _offsets(column: Mapped, examples: int, path: Path) -> Tensor:
    """All of them, in memory and checked: everything else is found by them."""
    offsets = column[:]
    sound = offsets.dim() == 1 and len(offsets) > 1 and offsets.dtype == torch.int64
    if not (sound and digest(offsets) == column.digest() and int(offsets[-1]) == examples):
        raise _altered(path / "offsets.npy", "its bytes are not those that were written")
    return offsets


def _altered(file: Path, what: str) -> UserError:
    return UserError(
        f"{file} is not as it was saved: {what}; restore it from a copy, or save the data anew."
    )
