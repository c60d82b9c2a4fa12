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
    """One row per client, float32, zero at first; in RAM, or in a memory-mapped file when large.

    The file has no name, so that nothing is left of it however the process ends.
    """

    def __init__(self, clients: int, dim: int, ram_share: float = RAM_SHARE) -> None:
        self.mapped = clients * dim * 4 > ram_share * _ram()
        if self.mapped:
            with tempfile.TemporaryFile() as file:
                self._rows: np.ndarray = np.memmap(file, np.float32, "w+", shape=(clients, dim))
        else:
            self._rows = np.zeros((clients, dim), dtype=np.float32)

    def __getitem__(self, clients: np.ndarray) -> Tensor:
        """A copy of these clients' rows."""
        return torch.from_numpy(np.array(self._rows[clients]))

    def __setitem__(self, clients: np.ndarray, rows: Tensor) -> None:
        self._rows[clients] = rows.numpy()

    def save(self, path: Path) -> None:
        """Write all rows to a file."""
        with path.open("wb") as sink:
            np.save(sink, self._rows, allow_pickle=False)

    def restore(self, path: Path) -> None:
        """Read all rows back; the file must hold just as many clients and dimensions."""
        saved = np.load(path, mmap_mode="r", allow_pickle=False)
        if saved.shape != self._rows.shape:
            raise UserError(
                f"{path} holds a client memory of shape {saved.shape}, but this run needs "
                f"{self._rows.shape}; resume with the data and the model it was saved from."
            )
        self._rows[:] = saved


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
