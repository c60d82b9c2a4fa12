"""Distributes rounds over processes: each works on its share of the cohort, and sums are added.

All processes hold the same state and draw from the same streams, so a round exchanges only the sum
of messages and the statistics of clients. The first process leads: it evaluates, saves and prints,
and the others follow its orders (`training.start.follow`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedveil.engines.connections import Connections
from fedveil.engines.ranks import machine_size, rank_and_size
from fedveil.errors import LostError, UserError
from fedveil.parts.memory import ClientMemory
from fedveil.threads import cores

Order = Literal["play", "gather", "end"]
ORDERS: tuple[Order, ...] = ("play", "gather", "end")
BACKENDS = ("gloo", "nccl")
SILENCE = timedelta(hours=1)  # until a process that does not respond counts as lost
PATIENCE = 5.0  # seconds to find out which process was lost
BLOCK = 2**24  # numbers of client memory per message


class Team:
    """The processes of one run. This class is a team of one, which sends nothing.

    Shares are consecutive in client order, so sums are added in that order too.
    """

    rank = 0
    size = 1
    wished = False  # whether a following process was asked to stop

    @property
    def first(self) -> bool:
        """Whether this process leads."""
        return self.rank == 0

    def share(self, workers: np.ndarray, population: int | None = None) -> slice:
        """The slice of the ascending workers that belongs to this process.

        Equal shares of the workers, or, given the population, the same clients in every round.
        """
        return slice(0, len(workers))

    def place(self, device: torch.device) -> None:
        """Exchange sums through the library of the device on which this process trains."""

    def add(self, numbers: Tensor) -> None:
        """Σ over all processes, in place."""

    def lead(self, order: Order, x: Tensor) -> None:
        """Send an order to the others; all must have arrived at the same model x."""

    def follow(self, wish: bool, x: Tensor) -> Order:
        """Receive the first process's order; `wish` asks it to stop."""
        return "end"

    def gather(self, memory: ClientMemory | None) -> None:
        """Send changed rows of client memory to the first process."""

    def secret(self, own: bytes) -> bytes:
        """The first process's secret, shared with all processes in memory."""
        return own

    def require_same(self, identity: str) -> None:
        """Refuse processes that are about to run different things."""


ALONE = Team()


class Processes(Team):
    """One of `size` processes started by torchrun.

    Orders and client memory travel through gloo. Sums do too, or through NCCL between GPUs.
    """

    device = torch.device("cpu")  # where sums are added
    sums: dist.ProcessGroup | None = None  # the group that adds them; None is the one of gloo

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._near = machine_size() == size  # all on one machine
        self._worked = np.zeros(0, dtype=bool)  # clients whose memory has changed here
        self._parent = os.getppid()
        if self._near and sys.platform in ("linux", "darwin"):
            loopback = "lo" if sys.platform == "linux" else "lo0"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        host = "127.0.0.1" if self._near else os.environ.get("MASTER_ADDR", "")
        try:
            dist.init_process_group("gloo", rank=rank, world_size=size, timeout=SILENCE)
            self.connections = Connections.open(rank, size, host, self._broadcast)
        except (OSError, RuntimeError, ValueError) as problem:
            why = str(problem).strip().partition("\n")[0]
            raise UserError(
                f"Process {rank} of {size} could not connect to the others ({why}). Start "
                "all of them with torchrun."
            ) from problem

    def share(self, workers: np.ndarray, population: int | None = None) -> slice:
        """Equal shares of the workers, or of the population."""
        parts = np.array([self.rank, self.rank + 1])
        if population is None:
            start, stop = len(workers) * parts // self.size
            return slice(int(start), int(stop))
        start, stop = np.searchsorted(workers, population * parts // self.size)
        if len(self._worked) != population:
            self._worked = np.zeros(population, dtype=bool)
        self._worked[workers[start:stop]] = True
        return slice(int(start), int(stop))

    def place(self, device: torch.device) -> None:
        """With one GPU for each process, a second group of NCCL; else everything stays on gloo."""
        backend = backend_of(device)
        (kinds,) = self._table(BACKENDS.index(backend)).T
        if other := _unequal(kinds):
            raise UserError(
                f"Process {other} trains on {_kind(int(kinds[other]))}, but process 0 on "
                f"{_kind(int(kinds[0]))}. Use the same kind of device in all processes, such as "
                "device 'cpu'."
            )
        if backend == "nccl" and self.sums is None:
            torch.cuda.set_device(device)
            self.device = device
            with self._exchange():
                self.sums = dist.new_group(backend=backend, timeout=SILENCE)

    def add(self, numbers: Tensor) -> None:
        """One all-reduce, on the GPU if there is one."""
        with self._exchange():
            there = numbers.to(self.device)
            dist.all_reduce(there, group=self.sums)
            if there is not numbers:
                numbers.copy_(there)

    def lead(self, order: Order, x: Tensor) -> None:
        """One small all-reduce, which also exchanges a checksum of x."""
        words, sums = self._table(ORDERS.index(order), _checksum(x)).T
        self.wished = self.wished or bool(words[1:].any()) or self._orphaned()
        _refuse_unequal(sums)

    def follow(self, wish: bool, x: Tensor) -> Order:
        """The receiving side of `lead`."""
        words, sums = self._table(int(wish), _checksum(x)).T
        _refuse_unequal(sums)
        return ORDERS[int(words[0])]

    def gather(self, memory: ClientMemory | None) -> None:
        """From one process after another: the number of clients, their indexes and their rows."""
        if memory is not None and not self.first:
            self._send_rows(memory)
        elif memory is not None:
            for rank in range(1, self.size):
                self._receive_rows(memory, rank)

    def secret(self, own: bytes) -> bytes:
        """By a broadcast that stays on one machine."""
        if not self._near:
            raise UserError(
                "noise='secure' keeps its key within one machine, but these processes run on "
                "several. Start all of them on one machine, or use noise='seeded' for experiments."
            )
        with self._exchange():
            return self._broadcast(own)

    def require_same(self, identity: str) -> None:
        """Compare the first 60 bits of the hash of the runs' identities."""
        (found,) = self._table(int(identity[:15], 16)).T
        if other := _unequal(found):
            raise UserError(
                f"Process {other} has a different recipe, model or data than process 0. Give "
                "all processes the same files, on machines of the same kind."
            )

    def lost(self, told: bool = False) -> UserError:
        """The error to report when an exchange failed or this process received SIGTERM.

        If a process left with a reason, that reason is reported. If the first process was killed,
        the second one reports it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gone = self.connections.gone(PATIENCE)
        if reasons := [reason for reason in gone.values() if reason]:
            return UserError(reasons[0])
        killed = [rank for rank, reason in gone.items() if reason is None]
        if killed or (gone and not told):
            rank = min(killed or gone)
            what = f"Process {rank} of {self.size} stopped, so the run ended"
            return LostError(what, teller=1 if killed == [0] else 0)
        silent = "A process no longer responds, so the run ended"
        return LostError("The run received SIGTERM and ended" if told else silent)

    def part(self, reason: str = "") -> None:
        """Leave on its own; from now on, missing processes are no error."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.connections.leave(reason)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Turn a failed exchange into a UserError."""
        try:
            yield
        except RuntimeError as problem:
            raise self.lost() from problem

    def _orphaned(self) -> bool:
        """Whether torchrun, which would have ended all processes together, is gone."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent

    def _table(self, *row: int) -> Tensor:
        """The row of whole numbers of every process, [processes, numbers]."""
        table = torch.zeros(self.size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(row)
        with self._exchange():
            dist.all_reduce(table)
        return table

    def _broadcast(self, own: bytes) -> bytes:
        numbers = torch.tensor(list(own), dtype=torch.uint8)
        dist.broadcast(numbers, 0)
        return bytes(numbers.tolist())

    def _send_rows(self, memory: ClientMemory) -> None:
        clients = np.flatnonzero(self._worked)
        self._worked[:] = False
        with self._exchange():
            dist.send(torch.tensor([len(clients)]), 0)
            dist.send(torch.from_numpy(clients), 0)
            for some in _blocks(clients, memory):
                dist.send(memory[some], 0)

    def _receive_rows(self, memory: ClientMemory, rank: int) -> None:
        count = torch.zeros(1, dtype=torch.int64)
        with self._exchange():
            dist.recv(count, rank)
            clients = torch.zeros(int(count), dtype=torch.int64)
            dist.recv(clients, rank)
            for some in _blocks(clients.numpy(), memory):
                rows = memory[some]
                dist.recv(rows, rank)
                memory[some] = rows


def backend_of(device: torch.device) -> str:
    """The library of torch.distributed that adds sums of processes on this device."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _kind(index: int) -> str:
    return "a GPU" if BACKENDS[index] == "nccl" else "the CPU"


@contextmanager
def joined() -> Iterator[Team]:
    """The team that torchrun started, from the environment; a team of one without torchrun.

    When this process leaves, it informs the others, with the reason if the input was invalid.
    """
    rank, size = rank_and_size()
    if size == 1:
        yield ALONE
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // machine_size()))
    team = Processes(rank, size)
    signal.signal(signal.SIGTERM, _told_to_end(team))
    try:
        yield team
    except UserError as problem:
        team.part("" if isinstance(problem, LostError) else str(problem))
        raise
    except (SystemExit, KeyboardInterrupt):
        team.part()
        raise
    team.part()


def _told_to_end(team: Processes) -> Callable[[int, FrameType | None], None]:
    """torchrun sends SIGTERM to all processes when one failed or when it is itself terminated."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise team.lost(told=True)

    return handle


def _checksum(x: Tensor) -> int:
    """The sum of all bits read as whole numbers, which differs for a different model."""
    return int(x.view(torch.int32).sum())


def _unequal(found: Tensor) -> int:
    """The first process whose number differs from process 0's; 0 if there is none."""
    return int((found != found[0]).int().argmax())


def _refuse_unequal(sums: Tensor) -> None:
    if other := _unequal(sums):
        raise UserError(
            f"Process {other} computed a different model than process 0 from the same rounds. Run "
            "all processes on machines of the same kind."
        )


def _blocks(clients: np.ndarray, memory: ClientMemory) -> list[np.ndarray]:
    """Clients in blocks of at most `BLOCK` numbers per message."""
    dim = memory[clients[:0]].shape[1]
    step = max(1, BLOCK // dim)
    return [clients[start : start + step] for start in range(0, len(clients), step)]
