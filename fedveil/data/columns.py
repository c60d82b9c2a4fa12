"""Columns: the inputs or labels of all examples, held in memory or had when they are asked for."""

from __future__ import annotations

import hashlib
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Index = int | slice | Tensor


class Column(Protocol):
    """One entry for each example, read by position.  A `Tensor` is a column."""

    @property
    def shape(self) -> torch.Size:
        """[examples, …]."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its entries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Tensor:
        """The entries at these positions, as a tensor of [*index.shape, …]."""


@runtime_checkable
class OnDemand(Column, Protocol):
    """A column that is not in memory, and says of itself what reading all of it would tell."""

    def digest(self) -> str:
        """A text that is another one for other content."""

    def span(self) -> tuple[float, float]:
        """Two numbers between which all entries lie."""


def digest(column: Column) -> str:
    """SHA-256 of a tensor's bytes; what a column on demand says of itself, without reading it."""
    if isinstance(column, OnDemand):
        return column.digest()
    return hashlib.sha256(column[:].contiguous().numpy().data).hexdigest()


def span(column: Column) -> tuple[float, float]:
    """The least and the greatest entry, or bounds that a column on demand states."""
    if isinstance(column, OnDemand):
        return column.span()
    low, high = column[:].aminmax()
    return low.item(), high.item()


def positions(index: Index, length: int) -> Tensor:
    """An index as int64 positions from 0 to length − 1; outside of these it is an IndexError.

    >>> positions(slice(-2, None), 5)
    tensor([3, 4])
    """
    if isinstance(index, slice):
        return torch.from_numpy(np.arange(*index.indices(length)))
    wanted = torch.as_tensor(index)
    if wanted.dtype != torch.int64:
        raise IndexError(f"positions are int64, not {wanted.dtype}")
    if wanted.numel():
        low, high = (int(end) for end in wanted.aminmax())
        if low < -length or high >= length:
            raise IndexError(f"positions from {low} to {high} of {length} examples")
        if low < 0:
            wanted = torch.where(wanted < 0, wanted + length, wanted)
    return wanted
