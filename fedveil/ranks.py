"""What torchrun tells a process: its number among how many.  Needs no torch, so it is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from fedveil.errors import LostError, UserError


def rank_and_size() -> tuple[int, int]:
    """(RANK, WORLD_SIZE) of the environment; (0, 1) for a process that was started alone."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise UserError(
            f"RANK is {rank} and WORLD_SIZE {size}, which do not fit; start with torchrun."
        )
    return rank, size


def machine_size() -> int:
    """How many of the processes are on this machine."""
    return _number("LOCAL_WORLD_SIZE", rank_and_size()[1])


@contextmanager
def one_voice() -> Iterator[None]:
    """Only the first process is heard; the others speak by raising what nobody expected.

    torchrun ends all processes as soon as one has failed. The first one is not to be ended so
    before it has said what was wrong.
    """
    rank, size = rank_and_size()
    if size > 1 and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until `processes.joined` listens to it
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def tells(problem: UserError) -> bool:
    """Whether it is for this process to say what was wrong."""
    try:
        rank, _ = rank_and_size()
    except UserError:
        return True
    return rank == (problem.teller if isinstance(problem, LostError) else 0)


def end_at_once(ended: SystemExit) -> None:
    """End a process that is connected with others, without tidying up; return in any other.

    A thread of gloo that lets go of a tensor while the interpreter ends would abort the process.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name} is '{text}' in the environment; it must be a whole number.")
    return int(text)
