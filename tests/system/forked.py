"""Python programs in processes of their own that start at once: libraries are loaded before a fork.

To its own eyes such a process is `python -m MODULE …` or `python -c CODE …`: it has its own memory,
environment, directory and output, and dies of its own signals. Only the seconds in which an
interpreter imports torch are spent once, by a server that is forked for each of them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

LIBRARIES = (
    "torch", "torch.distributed", "dp_accounting.pld", "polars", "safetensors.torch", "scipy.stats",
    "sklearn.calibration", "sklearn.datasets", "tomli_w", "typer", "rich",
    "flwr.cli.app", "flwr.supercore.cli", "flwr.superlink.cli", "flwr.supernode.cli",
)  # fmt: skip


@dataclass
class Forked:
    """A process that runs, and the files that it writes its output and its errors to."""

    process: ForkServerProcess
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code; minus the signal, if it died of one."""
        self.process.join(seconds)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds or 0.0)
        return code

    def kill(self) -> None:
        """Like kill −9."""
        self.process.kill()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def lines(self, seconds: float) -> Iterator[str]:
        """Its output, line by line as each is complete, until it ends."""
        until, begun = time.monotonic() + seconds, ""
        with self.out.open(encoding="utf-8") as file:
            while time.monotonic() < until:
                alive = self.process.is_alive()
                *whole, begun = (begun + file.read()).split("\n")
                yield from (f"{line}\n" for line in whole)
                if not alive:
                    return
                time.sleep(0.02)


def start(
    program: Sequence[object], cwd: Path, environment: Mapping[str, str], name: str
) -> Forked:
    """`python PROGRAM` with new files for what it writes. The program is as `fork` takes it."""
    out, err = cwd / f"out-{name}", cwd / f"errors-{name}"
    out.write_bytes(b"")
    err.write_bytes(b"")
    return fork(program, cwd, environment, out, err)


def fork(
    program: Sequence[object], cwd: Path, environment: Mapping[str, str], out: Path, err: Path
) -> Forked:
    """`python PROGRAM`, which is `-m MODULE …`, `-c CODE …` or `FILE …`, in a group of its own.

    What it writes comes after what is in the files.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    given = tuple(map(str, program)), str(cwd), dict(environment), str(out), str(err)
    process = context.Process(target=_run, args=given)
    process.start()
    return Forked(process, out, err)


def _run(
    program: tuple[str, ...], cwd: str, environment: dict[str, str], out: str, err: str
) -> None:
    """In the new process."""
    os.setsid()
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    kind, *arguments = program
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = [kind, *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(program)
        runpy.run_path(kind, run_name="__main__")
