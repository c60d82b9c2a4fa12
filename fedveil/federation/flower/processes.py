"""Processes that are started together and ended together, each in its own process group."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedveil.errors import UserError

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
PAUSE = 0.05
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class ChildProcesses:
    """Named child processes with a log file each. `end` ends all of them and their children."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._environment = logs, dict(environment)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, str] = {}

    def start(
        self, name: str, command: Sequence[str | Path], variables: Mapping[str, str] | None = None
    ) -> int:
        """Start a process in its own group, with its output in `name`.log, and return its ID."""
        if name in self._running:
            raise UserError(f"The process '{name}' is already running. End it first.")
        self._commands[name] = shlex.join(map(str, command))
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(variables or {})},
                start_new_session=True,
            )
        return self._running[name].pid

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self._logs / f"{name}.log"

    def command(self, name: str) -> str:
        """The command that started a process, as a line of a shell."""
        return self._commands[name]

    def names(self) -> list[str]:
        """The processes that were started and not ended."""
        return list(self._running)

    def pid(self, name: str) -> int:
        """The process ID."""
        return self._running[name].pid

    def alive(self, name: str) -> bool:
        """Whether the process runs."""
        return name in self._running and self._running[name].poll() is None

    def kill(self, name: str) -> None:
        """`kill -9` of the process alone. Its children, if any, are left to notice."""
        process = self._running[name]
        process.kill()
        process.wait()

    def end(self, *names: str) -> None:
        """SIGTERM to the named processes (all if none), then SIGKILL to what is left of them."""
        chosen = names or tuple(self._running)
        for name in reversed(chosen):
            _signal_group(self._running[name], signal.SIGTERM)
        until = time.monotonic() + GRACE
        for name in chosen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[name].wait(max(0.0, until - time.monotonic()))
        for name in chosen:
            process = self._running.pop(name)
            _signal_group(process, signal.SIGKILL)
            process.wait()

    def fail_unless_alive(self, name: str) -> None:
        """Raise with the end of its log if a process has ended."""
        if not self.alive(name):
            tail = self.log(name).read_text(errors="replace")[-2000:]
            raise UserError(f"The process '{name}' has ended. Its log ends with:\n{tail}")


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: no telemetry, state in `home`, our commands first."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def free_port() -> int:
    """A TCP port on loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether something listens on a loopback port."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what: str, ready: Callable[[], bool], seconds: float) -> None:
    """Wait until `ready`, or raise after `seconds`. Looking takes a tenth of the time at most."""
    until = time.monotonic() + seconds
    while (started := time.monotonic()) < until:
        if ready():
            return
        time.sleep(max(PAUSE, 9 * (time.monotonic() - started)))
    raise UserError(f"{what} took more than {seconds:g} seconds. Read the logs.")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process group that we started. It may outlive its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
