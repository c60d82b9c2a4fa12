"""memory: what a client remembers between rounds, and the server with it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.checks import positive

RAM_SHARE = 0.25  # client memory beyond this share of RAM lives in a memory-mapped file


class Memory(Protocol):
    """What is subtracted before the bound and remembered after it."""

    @property
    def kept(self) -> bool:
        """Whether anything is remembered at all."""

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        """Who does local work this round; the cohort's members also transmit."""

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """The memory after a message: of a client after its own, of the server after the mean."""


@dataclass(frozen=True)
class NoMemory:
    """w = u."""

    kept = False

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        """The cohort."""
        return cohort

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """The server's direction is the mean itself."""
        return message


@dataclass(frozen=True)
class ErrorCompensation:
    """w = u − v_i, v_i ← v_i + β·b_i, v̂ ← v̂ + β·mean(b).  Shulgin et al. 2025, Alg. 1, lines 5–11.

    `everyone` updates all v_i in every round, as the algorithm is written; `participants` only
    those who transmit, which is all a deployment can ask for.
    """

    beta: float
    update: Literal["participants", "everyone"] = "participants"
    kept = True

    def __post_init__(self) -> None:
        positive(self, "beta", self.beta)
        if self.update not in ("participants", "everyone"):
            raise UserError(
                f"ErrorCompensation: update is '{self.update}'; "
                "it must be 'participants' or 'everyone'."
            )

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        """The cohort, or all."""
        return np.arange(population) if self.update == "everyone" else cohort

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """v + β·b."""
        return remembered + self.beta * message


class ClientMemory:
    """v_i, float32, zero until client i first takes part; only rows of those who did are kept.

    In RAM, or in a memory-mapped file when large. The file has no name, so that nothing is left of
    it however the process ends, and its space is taken from the disk before it is written to.
    """

    def __init__(self, clients: int, dim: int, ram_share: float = RAM_SHARE) -> None:
        self._ram = ram_share * _ram()
        self._place = np.full(clients, -1, dtype=np.int64)  # where a client's row is
        self._count = 0  # rows in use
        self._rows: np.ndarray = np.zeros((0, dim), dtype=np.float32)

    @property
    def mapped(self) -> bool:
        """Whether the rows are in a file by now."""
        return isinstance(self._rows, np.memmap)

    def __len__(self) -> int:
        """All clients, whether or not anything is kept of them."""
        return len(self._place)

    def __getitem__(self, clients: np.ndarray) -> Tensor:
        """A copy of these clients' rows."""
        place = self._place[clients]
        known = place >= 0
        rows = np.zeros((len(place), self._rows.shape[1]), dtype=np.float32)
        rows[known] = self._rows[place[known]]
        return torch.from_numpy(rows)

    def admit(self, clients: np.ndarray) -> None:
        """Room for these clients' rows, in this order; after that threads may set them at once."""
        new = clients[self._place[clients] < 0]
        self._reserve(self._count + len(new))
        self._place[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)

    def __setitem__(self, clients: np.ndarray, rows: Tensor) -> None:
        self.admit(clients)
        self._rows[self._place[clients]] = rows.numpy()

    def _reserve(self, count: int) -> None:
        """Room for so many rows; it at least doubles, so that rows are seldom moved."""
        if count <= len(self._rows):
            return
        kept = self._rows[: self._count]
        self._rows = self._room(min(max(count, 2 * len(self._rows)), len(self)))
        self._rows[: len(kept)] = kept

    def _room(self, count: int) -> np.ndarray:
        shape = (count, self._rows.shape[1])
        size = 4 * shape[0] * shape[1]
        if size <= self._ram:
            return np.zeros(shape, dtype=np.float32)
        try:
            with tempfile.TemporaryFile() as file:
                if hasattr(os, "posix_fallocate"):  # without it a full disk would end the process
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, np.float32, "w+", shape=shape)
        except OSError as problem:
            raise UserError(
                f"The memory of {count:,} clients of {shape[1]:,} numbers each needs "
                f"{size / 1e9:.1f} GB in {tempfile.gettempdir()} ({problem.strerror or problem}); "
                "let TMPDIR name a larger disk, or take a smaller model or an algorithm whose "
                "clients remember nothing."
            ) from problem

    def save(self, path: Path) -> None:
        """Write the rows that are kept, and then where each client's is."""
        with path.open("wb") as sink:
            for part in (self._rows[: self._count], self._place):
                np.save(sink, part, allow_pickle=False)

    def restore(self, path: Path) -> None:
        """Read them back; the file must be of just as many clients and dimensions."""
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.open("rb") as source:
            source.seek(rows.offset + rows.nbytes)
            place = np.load(source, allow_pickle=False)
        dim = self._rows.shape[1]
        if place.shape != self._place.shape or rows.shape[1:] != (dim,):
            raise UserError(
                f"{path} holds a client memory of shape {(*place.shape, *rows.shape[1:])}, but "
                f"this run needs {(len(self), dim)}; resume with the data and the model it was "
                "saved from."
            )
        if not np.array_equal(np.sort(place[place >= 0]), np.arange(len(rows))):
            raise ValueError("it does not say whose its rows are")
        self._count = 0
        self._reserve(len(rows))
        self._rows[: len(rows)] = rows
        self._place[:], self._count = place, len(rows)


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
