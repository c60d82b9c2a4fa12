"""Rounds over processes: each works on its share of a cohort, and the sums are added up.

All processes hold the same state and draw from the same streams, so a round exchanges the sum of
messages and what was seen on the way, nothing else. The first process leads: it evaluates, saves
and speaks, and the others do what it says (`training.follow`).
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

from fedveil.engines.lines import Lines
from fedveil.errors import LostError, UserError
from fedveil.parts.memory import ClientMemory
from fedveil.ranks import machine_size, rank_and_size
from fedveil.threads import cores

Order = Literal["play", "gather", "end"]
ORDERS: tuple[Order, ...] = ("play", "gather", "end")
SILENCE = timedelta(hours=1)  # until a process that is there but does not answer counts as lost
PATIENCE = 5.0  # seconds to find out who was lost
BLOCK = 2**24  # numbers of client memory sent at once


class Team:
    """The processes of one run. This is a team of one: it has all of the work, and sends nothing.

    Shares follow each other in the order of clients, so sums are added up in that order too.
    """

    rank = 0
    size = 1
    wished = False  # whether a process that follows was asked to stop

    @property
    def first(self) -> bool:
        """Whether this process leads."""
        return self.rank == 0

    def share(self, workers: np.ndarray, population: int | None = None) -> slice:
        """Which of the ascending workers are this process's.

        As many as any other's; or, given the population, those that are its own in every round.
        """
        return slice(0, len(workers))

    def add(self, numbers: Tensor) -> None:
        """Σ over all processes, in place."""

    def lead(self, order: Order, x: Tensor) -> None:
        """Have the others do something; all must have come to the same model x."""

    def follow(self, wish: bool, x: Tensor) -> Order:
        """What the first process says; `wish` asks it to stop."""
        return "end"

    def gather(self, memory: ClientMemory | None) -> None:
        """Bring rows of clients that changed to the first process."""

    def secret(self, own: bytes) -> bytes:
        """The first process's secret, in the memory of all."""
        return own

    def require_same(self, identity: str) -> None:
        """Refuse processes that are about to do different things."""


ALONE = Team()


class Processes(Team):
    """One of `size` processes that torchrun started, connected by gloo."""

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
            self.lines = Lines.open(rank, size, host, self._broadcast)
        except (OSError, RuntimeError, ValueError) as problem:
            why = str(problem).strip().partition("\n")[0]
            raise UserError(
                f"Process {rank} of {size} could not be connected with the others ({why}); start "
                "all of them with torchrun."
            ) from problem

    def share(self, workers: np.ndarray, population: int | None = None) -> slice:
        """Equal parts of the workers, or of the population."""
        parts = np.array([self.rank, self.rank + 1])
        if population is None:
            start, stop = len(workers) * parts // self.size
            return slice(int(start), int(stop))
        start, stop = np.searchsorted(workers, population * parts // self.size)
        if len(self._worked) != population:
            self._worked = np.zeros(population, dtype=bool)
        self._worked[workers[start:stop]] = True
        return slice(int(start), int(stop))

    def add(self, numbers: Tensor) -> None:
        """One all-reduce."""
        with self._exchange():
            dist.all_reduce(numbers)

    def lead(self, order: Order, x: Tensor) -> None:
        """One small all-reduce, by which everybody also tells a checksum of x."""
        words, sums = self._table(ORDERS.index(order), _checksum(x)).T
        self.wished = self.wished or bool(words[1:].any()) or self._orphaned()
        _refuse_unequal(sums)

    def follow(self, wish: bool, x: Tensor) -> Order:
        """The other side of `lead`."""
        words, sums = self._table(int(wish), _checksum(x)).T
        _refuse_unequal(sums)
        return ORDERS[int(words[0])]

    def gather(self, memory: ClientMemory | None) -> None:
        """From one process after the other: how many clients, which, and their rows."""
        if memory is not None and not self.first:
            self._send_rows(memory)
        elif memory is not None:
            for rank in range(1, self.size):
                self._receive_rows(memory, rank)

    def secret(self, own: bytes) -> bytes:
        """By a broadcast that does not leave the machine."""
        if not self._near:
            raise UserError(
                "noise='secure' keeps its key within one machine, but these processes are on "
                "several; start all of them on one, or use noise='seeded' to try things out."
            )
        with self._exchange():
            return self._broadcast(own)

    def require_same(self, identity: str) -> None:
        """Compare the first 60 bits of what the runs' keys are made of."""
        (found,) = self._table(int(identity[:15], 16)).T
        if other := _unequal(found):
            raise UserError(
                f"Process {other} has come to another recipe, model or data than process 0; give "
                "all processes the same files, on machines of the same kind."
            )

    def lost(self, told: bool = False) -> UserError:
        """What is to be said when an exchange failed, or this process was told to end; by whom.

        The reason of a process that had one is said as it is. If the first process was killed, the
        second speaks.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gone = self.lines.gone(PATIENCE)
        if reasons := [reason for reason in gone.values() if reason]:
            return UserError(reasons[0])
        killed = [rank for rank, reason in gone.items() if reason is None]
        if killed or (gone and not told):
            rank = min(killed or gone)
            what = f"Process {rank} of {self.size} stopped, and the run with it"
            return LostError(what, teller=1 if killed == [0] else 0)
        silent = "A process no longer answers, so the run ended"
        return LostError("The run was told to end (SIGTERM)" if told else silent)

    def part(self, reason: str = "") -> None:
        """Leave of one's own accord, undisturbed: nobody is missed from now on."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.lines.leave(reason)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Turn a failed exchange into a sentence."""
        try:
            yield
        except RuntimeError as problem:
            raise self.lost() from problem

    def _orphaned(self) -> bool:
        """Whether torchrun is gone, which would have ended all processes together."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent

    def _table(self, *row: int) -> Tensor:
        """Everybody's row of whole numbers, [processes, numbers]."""
        table = torch.zeros(self.size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(row)
        self.add(table)
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


@contextmanager
def joined() -> Iterator[Team]:
    """The team that torchrun started, as the environment has it; alone without one.

    The others are told when this process leaves, and why if the input was bad.
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
    """torchrun sends SIGTERM to all processes when one has failed, or when it is ended itself."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise team.lost(told=True)

    return handle


def _checksum(x: Tensor) -> int:
    """The sum of all bits, read as whole numbers: another model has another one."""
    return int(x.view(torch.int32).sum())


def _unequal(found: Tensor) -> int:
    """The first process whose number is not process 0's; 0 if there is none."""
    return int((found != found[0]).int().argmax())


def _refuse_unequal(sums: Tensor) -> None:
    if other := _unequal(sums):
        raise UserError(
            f"Process {other} has come to another model than process 0 by the same rounds; run all "
            "processes on machines of the same kind."
        )


def _blocks(clients: np.ndarray, memory: ClientMemory) -> list[np.ndarray]:
    """Few enough at a time for a message of `BLOCK` numbers."""
    dim = memory[clients[:0]].shape[1]
    step = max(1, BLOCK // dim)
    return [clients[start : start + step] for start in range(0, len(clients), step)]
