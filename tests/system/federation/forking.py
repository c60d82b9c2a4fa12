"""A local federation whose processes are forked with their libraries loaded.

They are what `Processes` starts otherwise: each in its own group, with its log, and killed by
signals. What Flower itself starts for a run, ServerApp and ClientApps, are new interpreters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.federation.flower.local import LocalFederation
from fedveil.federation.flower.processes import ChildProcesses, environment
from tests.system.forked import fork


class ForkedProcesses(ChildProcesses):
    """`Processes` whose Python programs begin in a fork."""

    def start(
        self, name: str, command: Sequence[str | Path], variables: Mapping[str, str] | None = None
    ) -> int:
        assert name not in self._running
        program = [str(part) for part in command]
        if program[0] == sys.executable:
            del program[0]
        log, whole = self.log(name), {**self._environment, **(variables or {})}
        self._running[name] = fork(program, Path.cwd(), whole, log, log)  # type: ignore[assignment]
        return self._running[name].pid


def local_federation(directory: Path, nodes: int) -> LocalFederation:
    """Its processes are forked. What they inherit is this process's environment."""
    made = LocalFederation(directory, nodes)
    made.processes = ForkedProcesses(made.directory / "logs", environment(made.home))
    return made
