"""Columns: the inputs or labels of all examples, held in memory or loaded on demand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Index = int | slice | Tensor


class DataColumn(Protocol):
    """One entry for each example, read by position.  A `Tensor` is a column."""

    @property
    def shape(self) -> torch.Size:
        """[examples, …]."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Tensor:
        """The entries at these positions, as a tensor of [*index.shape, …]."""


@runtime_checkable
class OnDemand(DataColumn, Protocol):
    """A column outside memory, which states its own digest and span without being read."""

    def digest(self) -> str:
        """A text that differs whenever the content differs."""

    def span(self) -> tuple[float, float]:
        """Lower and upper bounds on all entries."""


@dataclass(frozen=True, eq=False)
class Repeated:
    """Entries of a tensor in an order in which they repeat: only the order takes more memory.

    >>> Repeated(torch.tensor([5.0, 7.0]), torch.tensor([1, 1, 0]))[1:]
    tensor([7., 5.])
    """

    of: Tensor
    order: Tensor  # int64 positions in `of`

    @property
    def shape(self) -> torch.Size:
        """[examples, …]."""
        return torch.Size((len(self.order), *self.of.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self.of.dtype

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Index, /) -> Tensor:
        """The entries at these positions."""
        wanted = self.order[positions(index, len(self))]
        flat = self.of.index_select(0, wanted.flatten())
        return flat.view(*wanted.shape, *self.of.shape[1:])

    def digest(self) -> str:
        """Of the entries and of their order."""
        order = hashlib.sha256(self.order.contiguous().numpy().data).hexdigest()
        return hashlib.sha256(f"{digest(self.of)} {order}".encode()).hexdigest()

    def span(self) -> tuple[float, float]:
        """The smallest and largest entry, also of entries that nobody has."""
        return span(self.of)


def readable(column: DataColumn) -> bool:
    """Whether a column's entries can be read here; those of a federation are with its clients."""
    return not getattr(column, "elsewhere", False)


def digest(column: DataColumn) -> str:
    """SHA-256 of a tensor's bytes, or the digest that a column on demand states."""
    if isinstance(column, OnDemand):
        return column.digest()
    return hashlib.sha256(column[:].contiguous().numpy().data).hexdigest()


def span(column: DataColumn) -> tuple[float, float]:
    """The smallest and largest entry, or the bounds that a column on demand states."""
    if isinstance(column, OnDemand):
        return column.span()
    low, high = column[:].aminmax()
    return low.item(), high.item()


def positions(index: Index, length: int) -> Tensor:
    """An index as int64 positions from 0 to length − 1; raises IndexError outside this range.

    >>> positions(slice(-2, None), 5)
    tensor([3, 4])
    """
    if isinstance(index, slice):
        return torch.from_numpy(np.arange(*index.indices(length)))
    wanted = torch.as_tensor(index)
    if wanted.dtype != torch.int64:
        raise IndexError(f"positions must be int64, not {wanted.dtype}")
    if wanted.numel():
        low, high = (int(end) for end in wanted.aminmax())
        if low < -length or high >= length:
            raise IndexError(f"positions {low} to {high} are out of range for {length} examples")
        if low < 0:
            wanted = torch.where(wanted < 0, wanted + length, wanted)
    return wanted
