"""The rank and world size that torchrun sets for a process.  Imports no torch, so it is fast."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from fedveil.errors import LostError, UserError


def rank_and_size() -> tuple[int, int]:
    """(RANK, WORLD_SIZE) of the environment; (0, 1) for a process started alone."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise UserError(
            f"RANK {rank} and WORLD_SIZE {size} do not match. Start all processes with torchrun."
        )
    return rank, size


def machine_size() -> int:
    """Number of processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", rank_and_size()[1])


@contextmanager
def one_voice() -> Iterator[None]:
    """Only the first process prints; the others report by raising unexpected errors.

    torchrun ends all processes as soon as one has failed. The first process must report the error
    before torchrun ends it.
    """
    rank, size = rank_and_size()
    if size > 1 and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until `processes.joined` handles it
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def tells(problem: UserError) -> bool:
    """Whether this process reports the error."""
    try:
        rank, _ = rank_and_size()
    except UserError:
        return True
    return rank == (problem.teller if isinstance(problem, LostError) else 0)


def end_at_once(ended: SystemExit) -> None:
    """Exit a process connected to others without cleanup; return in any other process.

    A gloo thread that releases a tensor while the interpreter shuts down would abort the process.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"The environment variable {name} is '{text}'. Set it to a whole number.")
    return int(text)
