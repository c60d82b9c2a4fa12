"""Python programs in processes of their own that start at once: libraries are loaded before a fork.

To its own eyes such a process is `python -m MODULE …` or `python -c CODE …`: it has its own memory,
environment, directory and output, and dies of its own signals. Only the seconds in which an
interpreter imports torch are spent once, by a server that is forked for each of them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

LIBRARIES = (
    "torch", "torch.distributed", "torch._dynamo", "torch.fx.experimental.symbolic_shapes",
    "dp_accounting.pld", "polars", "safetensors.torch", "scipy.stats", "sklearn.datasets",
    "tomli_w", "typer", "rich",
)  # fmt: skip


@dataclass
class Forked:
    """A process that runs, and the files that it writes its output and its errors to."""

    process: ForkServerProcess
    out: Path
    err: Path

    def wait(self, seconds: float) -> int:
        """Its exit code; minus the signal, if it died of one."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "it did not end in time"
        return self.process.exitcode

    def kill(self) -> None:
        """Like kill −9."""
        self.process.kill()

    def lines(self, seconds: float) -> Iterator[str]:
        """Its output, line by line as it comes, until it ends."""
        until = time.monotonic() + seconds
        with self.out.open(encoding="utf-8") as file:
            while time.monotonic() < until:
                alive = self.process.is_alive()
                yield from iter(file.readline, "")
                if not alive:
                    return
                time.sleep(0.02)


def start(
    program: Sequence[object], cwd: Path, environment: Mapping[str, str], name: str
) -> Forked:
    """`python PROGRAM`, where the program is `-m MODULE …` or `-c CODE …`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    out, err = cwd / f"out-{name}", cwd / f"errors-{name}"
    given = tuple(map(str, program)), str(cwd), dict(environment), str(out), str(err)
    process = context.Process(target=_run, args=given)
    out.write_bytes(b"")
    err.write_bytes(b"")
    process.start()
    return Forked(process, out, err)


def _run(
    program: tuple[str, ...], cwd: str, environment: dict[str, str], out: str, err: str
) -> None:
    """In the new process."""
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    kind, code, *arguments = program
    sys.argv = [code if kind == "-m" else kind, *arguments]
    if kind == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
