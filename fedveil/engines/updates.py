"""What the loop needs of a group of clients: norms, one weighted sum, rows only when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import Column
from fedveil.data.federated import Federated
from fedveil.parts.local import Plan

CACHED = 2**16  # numbers that stay in a core's cache in float64


class Updates(Protocol):
    """The reports u_i of a group of clients."""

    def norms(self) -> Tensor:
        """‖u_i‖₂ in float64, [clients]; not finite where a report is not."""

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """Σ scale_i·u_i, [dim]; a report of scale 0 is left out, whatever it holds."""

    def dots(self, vector: Tensor) -> Tensor:
        """⟨u_i, vector⟩ in float64, [clients]; as exact as products of float32 numbers are."""

    def rows(self) -> Tensor:
        """The reports themselves, [clients, dim]."""

    def affine(self, scale: float, share: float, x: Tensor) -> Updates:
        """scale·u_i + share·x."""


def lengths(rows: Tensor) -> Tensor:
    """‖row‖₂ along the last axis in float64; some rows at a time, as many as a cache holds."""
    some = max(1, CACHED // max(1, rows[:1].numel()))
    parts: list[Tensor] = [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
        for part in torch.split(rows, some)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class DenseUpdates:
    """Reports held as rows."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def of(cls, messages: Sequence[Tensor], dim: int) -> DenseUpdates:
        """Messages from outside; one of another shape becomes a row of NaN, which is rejected."""
        rows = torch.full((len(messages), dim), torch.nan)
        for row, message in zip(rows, messages, strict=True):
            if message.shape == (dim,) and message.is_floating_point():
                row.copy_(message)
        return cls(rows)

    def norms(self) -> Tensor:
        """In float64, where no float32 row overflows."""
        return lengths(self._rows)

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """One matrix-vector product over the rows that count."""
        used = scale != 0
        if bool(used.all()):
            return scale.float() @ self._rows
        return scale[used].float() @ self._rows[used]

    def dots(self, vector: Tensor) -> Tensor:
        """One matrix-vector product."""
        return (self._rows @ vector).double()

    def rows(self) -> Tensor:
        """As held."""
        return self._rows

    def affine(self, scale: float, share: float, x: Tensor) -> DenseUpdates:
        """In place: the rows belong to this object alone."""
        if scale != 1.0:
            self._rows.mul_(scale)
        if share != 0.0:
            self._rows.add_(x, alpha=share)
        return self


@dataclass(frozen=True, eq=False)
class Group:
    """Some clients of a population, and the plan of their local work."""

    data: Federated
    clients: np.ndarray
    plan: Plan

    @property
    def sizes(self) -> Tensor:
        """Examples of each of them."""
        return self.data.sizes[torch.from_numpy(self.clients)]

    def steps(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each step: inputs [clients, width, …], labels [clients, width, …], weights.

        The weights of a client's batch add up to 1.
        """
        starts = self.data.offsets[torch.from_numpy(self.clients)]
        rows, weights = self.plan.positions(starts)
        times = self.plan.steps if self.plan.repeated else 1
        for mine, shares in zip(rows, weights, strict=True):
            batch = taken(self.data.inputs, mine), taken(self.data.labels, mine), shares
            yield from repeat(batch, times)

    def together(self) -> tuple[Tensor, Tensor, Tensor]:
        """All examples of these clients: inputs [n, …], labels [n, …], and where each begins."""
        clients = torch.from_numpy(self.clients)
        sizes, starts = self.sizes, self.data.offsets[clients]
        ends = sizes.cumsum(0)
        rows = torch.arange(int(ends[-1])) + (starts - ends + sizes).repeat_interleave(sizes)
        return taken(self.data.inputs, rows), taken(self.data.labels, rows), ends - sizes


def taken(examples: Column, rows: Tensor) -> Tensor:
    """examples[rows], each example copied as one piece of memory."""
    if not isinstance(examples, Tensor):
        return examples[rows]
    flat = examples.reshape(len(examples), -1).index_select(0, rows.flatten())
    return flat.view(*rows.shape, *examples.shape[1:])


class Engine(Protocol):
    """Computes the differences y_i − x of a group."""

    @property
    def name(self) -> str:
        """As in a run's record."""

    @property
    def group_size(self) -> int:
        """How many clients it takes at once."""

    def updates(self, x: Tensor, group: Group) -> Updates:
        """y_i − x after each client's local steps from x."""
