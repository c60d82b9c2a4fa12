"""memory: the state that a client and the server keep between rounds."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.parts.checks import one_of, positive
from fedveil.parts.part import Begin, Part, Tensors

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

RAM_SHARE = 0.25  # client memory beyond this share of RAM is in a memory-mapped file


class Memory(Part, ABC):
    """A vector that is subtracted before the bound and updated after it."""

    claims: ClassVar = ("amplified",)

    kept: bool = True  # whether clients keep a memory
    amplified: bool = False  # whether amplification by sampling is proved with this memory
    compares: bool = True  # whether an update is compared with what is remembered of earlier ones
    corrects: bool = False  # whether it changes the gradients of local training
    shared: tuple[str, ...] = ()  # vectors of the server's state that a client's work needs
    personal: bool = False  # whether clients keep models of their own and continue from them

    @abstractmethod
    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """The memory after a message: a client's after its own, the server's after the mean."""

    def width(self, dim: int) -> int:
        """How many numbers a client keeps."""
        return dim

    def correction(self, remembered: Tensor, state: Tensors) -> Tensor:
        """What is added to every local gradient, [clients, dim]; `state` is the server's side."""
        return torch.zeros_like(remembered)

    def model(self, remembered: Tensor, state: Tensors) -> Tensor:
        """The clients' own models, [clients, dim], if they keep any (`personal`)."""
        return remembered

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        """The update as it is bounded. [default: what the memory does not know yet]"""
        return update - remembered

    def update_for(self, remembered: Tensor, wanted: Tensor) -> Tensor:
        """An update that `compare` maps to `wanted`: what an audit's canaries send."""
        return remembered + wanted

    def after(self, remembered: Tensor, update: Tensor, message: Tensor, state: Tensors) -> Tensor:
        """What clients keep after a round. [default: what they learn from their message]"""
        return self.learn(remembered, message)

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        """The clients that do local work in this round. Only the cohort sends messages."""
        return cohort

    @property
    def rate(self) -> float:
        """The share of a message that is added to the memory."""
        return 1.0

    def initial_state(self, begin: Begin) -> Tensors:
        """v̂ = 0, the server's side of the memory."""
        return {"direction": torch.zeros_like(begin.x)} if self.kept else {}

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        """The direction after a round's mean message, and the next state."""
        if not self.kept:
            return self.learn(mean, mean), state
        direction = self.learn(state["direction"], mean)
        return direction, {**state, "direction": direction}


@dataclass(frozen=True)
class NoMemory(Memory):
    """w = u."""

    kept = False
    amplified = True

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """The mean itself is the server's direction."""
        return message


@dataclass(frozen=True)
class ErrorCompensation(Memory):
    """w = u − v_i, v_i ← v_i + β·b_i, v̂ ← v̂ + β·mean(b).  Shulgin et al. 2025, Alg. 1, lines 5–11.

    `everyone` updates all v_i in every round, as in the published algorithm. `participants` updates
    only those of the cohort, which is all that a deployment can do.
    """

    beta: float
    update: Literal["participants", "everyone"] = "participants"
    amplified = True

    def __post_init__(self) -> None:
        positive(self, "beta", self.beta)
        one_of(self, "update", self.update, "participants", "everyone")

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        """The cohort, or all clients."""
        return np.arange(population) if self.update == "everyone" else cohort

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """v + β·b."""
        return remembered + self.beta * message

    @property
    def rate(self) -> float:
        """β."""
        return self.beta

    def misfit(self, recipe: Recipe) -> str | None:
        """The memory needs differences, and draws that are independent between clients."""
        if recipe.report.affine(1.0)[1] != 0:
            return (
                f"memory ErrorCompensation and report {type(recipe.report).__name__} do not fit: "
                "the memory accumulates differences. Use PseudoGradient or Difference."
            )
        if recipe.private and self.update == "participants" and not recipe.cohort.independent:
            return (
                f"memory ErrorCompensation with update='participants' and cohort "
                f"{type(recipe.cohort).__name__} do not fit: the memory of absent clients depends "
                "on who was drawn, which is covered only if clients are drawn independently. Use "
                "Poisson, Everyone, or update='everyone'."
            )
        return None


@dataclass(frozen=True)
class PersonalModels(Memory):
    """y_i ← y_i + u_i, x ← x + p·mean(u): each client's own model, and x the mean of all of them.

    Local work continues from y_i, and u_i is how far it moved. All models start at the first x, and
    p is the expected share of participants. MR-MTL: Liu et al. 2022.
    """

    compares = False
    personal = True

    def initial_state(self, begin: Begin) -> Tensors:
        """The model that all clients start from, and p."""
        share = torch.tensor(begin.expected / begin.population)
        return {"start": begin.x.clone(), "share": share}

    def model(self, remembered: Tensor, state: Tensors) -> Tensor:
        """What clients remember is how far their models are from the first one."""
        return state["start"] + remembered

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        """The update itself."""
        return update

    def update_for(self, remembered: Tensor, wanted: Tensor) -> Tensor:
        """The inverse of `compare`."""
        return wanted

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """y_i + u_i, both relative to the first model."""
        return remembered + message

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        """p·mean: the sum of the updates over all clients, absent ones included."""
        return state["share"] * mean, state

    def misfit(self, recipe: Recipe) -> str | None:
        """Models that differ need local work that starts from each of them."""
        if recipe.by_record:
            return None
        return (
            f"memory PersonalModels and local {type(recipe.local).__name__} do not fit: all "
            "clients would start from the same model. Use RecordSGD."
        )


class ClientMemory:
    """v_i in float32, zero until client i first takes part. Only rows of participants are stored.

    The rows are in RAM, or in a memory-mapped file if they are large. The file has no name, so it
    disappears however the process ends. Its disk space is allocated before it is written.
    """

    def __init__(self, clients: int, dim: int, ram_share: float = RAM_SHARE) -> None:
        self._ram = ram_share * _ram()
        self._place = np.full(clients, -1, dtype=np.int64)  # the row of each client
        self._count = 0  # rows in use
        self._rows: np.ndarray = np.zeros((0, dim), dtype=np.float32)

    @property
    def width(self) -> int:
        """The numbers of one client."""
        return int(self._rows.shape[1])

    @property
    def mapped(self) -> bool:
        """Whether the rows are in a file."""
        return isinstance(self._rows, np.memmap)

    def __len__(self) -> int:
        """The number of clients, with or without a row."""
        return len(self._place)

    def __getitem__(self, clients: np.ndarray) -> Tensor:
        """A copy of the rows of these clients."""
        place = self._place[clients]
        known = place >= 0
        rows = np.zeros((len(place), self._rows.shape[1]), dtype=np.float32)
        rows[known] = self._rows[place[known]]
        return torch.from_numpy(rows)

    def admit(self, clients: np.ndarray) -> None:
        """Allocate rows for these clients, in this order. Threads may then set them in parallel."""
        new = clients[self._place[clients] < 0]
        self._reserve(self._count + len(new))
        self._place[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)

    def __setitem__(self, clients: np.ndarray, rows: Tensor) -> None:
        self.admit(clients)
        self._rows[self._place[clients]] = rows.numpy()

    def _reserve(self, count: int) -> None:
        """Allocate `count` rows. Capacity at least doubles, so that rows are rarely moved."""
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
                if hasattr(os, "posix_fallocate"):  # else a full disk would kill the process
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, np.float32, "w+", shape=shape)
        except OSError as problem:
            raise UserError(
                f"The memory of {count:,} clients with {shape[1]:,} numbers each needs "
                f"{size / 1e9:.1f} GB in {tempfile.gettempdir()} ({problem.strerror or problem}). "
                "Set TMPDIR to a larger disk, or use a smaller model or an algorithm without "
                "client memory."
            ) from problem

    def save(self, path: Path) -> None:
        """Write the rows, then the row number of each client."""
        with path.open("wb") as sink:
            for part in (self._rows[: self._count], self._place):
                np.save(sink, part, allow_pickle=False)

    def restore(self, path: Path) -> None:
        """Read the output of `save`. Clients and dimension must match."""
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.open("rb") as source:
            source.seek(rows.offset + rows.nbytes)
            place = np.load(source, allow_pickle=False)
        dim = self._rows.shape[1]
        if place.shape != self._place.shape or rows.shape[1:] != (dim,):
            raise UserError(
                f"{path} has a client memory of shape {(*place.shape, *rows.shape[1:])}, but this "
                f"run needs {(len(self), dim)}. Resume with the data and the model it was saved "
                "from."
            )
        if not np.array_equal(np.sort(place[place >= 0]), np.arange(len(rows))):
            raise ValueError("it does not assign its rows to clients")
        self._count = 0
        self._reserve(len(rows))
        self._rows[: len(rows)] = rows
        self._place[:], self._count = place, len(rows)


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
