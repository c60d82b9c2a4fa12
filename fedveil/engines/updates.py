"""What the loop needs from a group of clients: norms, one weighted sum, and rows on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import DataColumn
from fedveil.data.federated import Federated
from fedveil.engines.dropout import DropoutStreams, example_seeds
from fedveil.parts.local import LocalPlan

CACHED = 2**16  # float64 numbers that fit in a core's cache


class Updates(Protocol):
    """The updates u_i of a group of clients."""

    def norms(self) -> Tensor:
        """‖u_i‖₂ in float64, [clients]; not finite where an update is not."""

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """Σ scale_i·u_i, [dim]; an update of scale 0 is left out, whatever it holds."""

    def dots(self, vector: Tensor) -> Tensor:
        """⟨u_i, vector⟩ in float64, [clients]; as precise as products of float32 numbers."""

    def rows(self) -> Tensor:
        """The updates as rows, [clients, dim]."""

    def affine(self, scale: float, share: float, x: Tensor) -> Updates:
        """scale·u_i + share·x."""


def lengths(rows: Tensor) -> Tensor:
    """‖row‖₂ along the last axis in float64, computed in blocks of rows that fit the cache."""
    some = max(1, CACHED // max(1, rows[:1].numel()))
    parts: list[Tensor] = [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
        for part in torch.split(rows, some)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class DenseUpdates:
    """Updates stored as rows."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def of(cls, messages: Sequence[Tensor], dim: int) -> DenseUpdates:
        """Received updates; one of another shape becomes a row of NaN, which is rejected."""
        rows = torch.full((len(messages), dim), torch.nan)
        for row, message in zip(rows, messages, strict=True):
            if message.shape == (dim,) and message.is_floating_point():
                row.copy_(message)
        return cls(rows)

    def norms(self) -> Tensor:
        """In float64, where no float32 row overflows."""
        return lengths(self._rows)

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """One matrix-vector product over the rows with a scale other than 0."""
        used = scale != 0
        if bool(used.all()):
            return scale.float() @ self._rows
        return scale[used].float() @ self._rows[used]

    def dots(self, vector: Tensor) -> Tensor:
        """One matrix-vector product."""
        return (self._rows @ vector).double()

    def rows(self) -> Tensor:
        """The stored rows."""
        return self._rows

    def affine(self, scale: float, share: float, x: Tensor) -> DenseUpdates:
        """In place: no other object uses these rows."""
        if scale != 1.0:
            self._rows.mul_(scale)
        if share != 0.0:
            self._rows.add_(x, alpha=share)
        return self


@dataclass(frozen=True, eq=False)
class Group:
    """A group of clients of a population, and the plan of their local training."""

    data: Federated
    clients: np.ndarray
    plan: LocalPlan
    coins: DropoutStreams | None = None  # for dropout; None for synthetic clients
    device: torch.device | None = None  # where batches are needed; None for the CPU

    def part(self, start: int, stop: int, plan: LocalPlan) -> Group:
        """Clients start..stop−1, with their plan."""
        coins = None if self.coins is None else self.coins.part(start, stop)
        return Group(self.data, self.clients[start:stop], plan, coins, self.device)

    def seeds(self, step: int, width: int) -> Tensor:
        """int32 [clients, width, 2]: a dropout seed for each example of a step."""
        return self._placed(example_seeds(self._seeds, step, width))

    def _placed(self, part: Tensor) -> Tensor:
        """A copy on the device, from pinned memory where that helps; on the CPU, the tensor."""
        if self.device is None:
            return part
        if self.device.type != "cuda":
            return part.to(self.device)
        return part.pin_memory().to(self.device, non_blocking=True)

    @cached_property
    def _seeds(self) -> np.ndarray:
        return (self.coins or DropoutStreams(0, 0, self.clients)).seeds()

    @property
    def sizes(self) -> Tensor:
        """Number of examples of each client."""
        return self.data.sizes[torch.from_numpy(self.clients)]

    def steps(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step: inputs [clients, width, …], labels [clients, width, …], weights.

        The weights of a client's batch sum to 1.
        """
        starts = self.data.offsets[torch.from_numpy(self.clients)]
        rows, weights = self.plan.positions(starts)
        times = self.plan.steps if self.plan.repeated else 1
        for mine, shares in zip(rows, weights, strict=True):
            batch, version = None, 0
            for _ in range(times):
                if batch is None or batch[0]._version != version:  # a module has written to it
                    batch = self._batch(mine, shares)
                    version = batch[0]._version
                yield batch

    def _batch(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The examples of a step, where they are needed."""
        parts = taken(self.data.inputs, rows), taken(self.data.labels, rows), weights
        inputs, labels, shares = (self._placed(part) for part in parts)
        return inputs, labels, shares

    def together(self) -> tuple[Tensor, Tensor, Tensor]:
        """All examples of these clients: inputs [n, …], labels [n, …], and each client's start."""
        clients = torch.from_numpy(self.clients)
        sizes, starts = self.sizes, self.data.offsets[clients]
        ends = sizes.cumsum(0)
        rows = torch.arange(int(ends[-1])) + (starts - ends + sizes).repeat_interleave(sizes)
        parts = (taken(column, rows) for column in (self.data.inputs, self.data.labels))
        inputs, labels = (self._placed(part) for part in parts)
        return inputs, labels, ends - sizes

    def positions(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The examples of each step and their weights, where batches are needed."""
        rows, weights = self.plan.positions(starts)
        return self._placed(rows), self._placed(weights)


def taken(examples: DataColumn, rows: Tensor) -> Tensor:
    """examples[rows]: each example is copied as one block of memory, and nothing else is.

    Examples with other strides are gathered element by element. To flatten them would copy the
    whole column.
    """
    if not (isinstance(examples, Tensor) and examples.is_contiguous()):
        return examples[rows].contiguous()
    flat = examples.reshape(len(examples), -1).index_select(0, rows.flatten())
    return flat.view(*rows.shape, *examples.shape[1:])


class Engine(Protocol):
    """Computes the differences y_i − x of a group."""

    @property
    def name(self) -> str:
        """The name stored in a run's record."""

    @property
    def group_size(self) -> int:
        """Number of clients processed at once."""

    @property
    def least_group(self) -> int:
        """Number of clients below which a second group costs more than a second core gains."""

    def updates(self, x: Tensor, group: Group) -> Updates:
        """y_i − x after each client's local steps from x."""
