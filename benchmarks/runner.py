"""Contestants, each run in its own process with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contestants.common import family
from benchmarks.environments import NotInstalledError, python_of, reason
from benchmarks.workloads import Workload
from fedveil.engines.choose import ENGINES

CONTESTANTS = Path(__file__).resolve().parent / "contestants"
BUILDING = 900.0  # seconds allowed for building a peer's environment
FEDERATED = ("W1", "W2", "W3")
ALL = ("W",)


@dataclass(frozen=True)
class Contestant:
    """A script, its environment, and the workloads it supports."""

    name: str
    script: str
    peer: str = ""  # an environment of environments.py; empty for fedveil's own
    variant: str = ""
    processes: int = 1
    workloads: tuple[str, ...] = ALL  # prefixes of their keys
    private: bool = True

    def serves(self, one: Workload) -> bool:
        """Whether it takes part in this workload."""
        return one.key.startswith(self.workloads)

    @property
    def ours(self) -> bool:
        """Whether it is fedveil."""
        return self.script == "ours.py"


@dataclass(frozen=True)
class Outcome:
    """The result of one contestant on one workload, or why there is none."""

    workload: str
    contestant: Contestant
    seconds: tuple[float, ...] = ()
    loss: float = float("nan")
    accuracy: float = float("nan")
    peak: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def contestants() -> list[Contestant]:
    """All contestants, most informative first: a quick run may not reach the last ones."""
    engines = [Contestant(f"fedveil {name}", "ours.py", variant=name) for name in ENGINES]
    examples = ("W4", "W5")
    return [
        Contestant("plain SGD, not private", "plain.py", workloads=examples, private=False),
        *(one for one in engines if one.variant not in ("auto", "loop")),
        Contestant("Opacus, ghost clipping", "with_opacus.py", "opacus", "ghost", 1, ("W4",)),
        Contestant("Opacus", "with_opacus.py", "opacus", "hooks", 1, ("W4",)),
        Contestant("fedjax", "with_fedjax.py", "fedjax", workloads=FEDERATED),
        Contestant("pfl, 2 processes", "with_pfl.py", "pfl", "", 2, FEDERATED),
        Contestant("Flower", "with_flower.py", "flower", "", 2, FEDERATED),
        Contestant("torch.func vmap", "stacked.py"),
        Contestant("torch, eager loop", "eager.py"),
        Contestant("pfl", "with_pfl.py", "pfl", workloads=FEDERATED),
        *(one for one in engines if one.variant == "loop"),
    ]


@dataclass
class Runner:
    """Runs contestants until a deadline."""

    files: Mapping[str, Path]  # settings by workload
    cache: Path  # where environments are
    rounds: int | None  # number of rounds that a quick run times
    seconds: float  # how long a fast contestant continues
    limit: float  # seconds per contestant
    deadline: float  # of all contestants, by time.monotonic
    threads: int = 2  # in total over all processes of a contestant
    problems: dict[str, str] = field(default_factory=dict)  # peers that did not install

    def run(self, contestant: Contestant, one: Workload) -> Outcome:
        """Run one contestant on one workload."""
        left = self.deadline - time.monotonic()
        if left < 5:
            return Outcome(one.key, contestant, problem="not run: out of time")
        try:
            python = self._python(contestant.peer, left)
        except NotInstalledError as problem:
            return Outcome(one.key, contestant, problem=f"does not install: {problem}")
        left = self.deadline - time.monotonic()
        answer = execute(
            [str(python), str(CONTESTANTS / contestant.script), *self._arguments(contestant, one)],
            environment(max(1, self.threads // contestant.processes), contestant.ours),
            max(1.0, min(self.limit, left)),
        )
        return outcome(one.key, contestant, answer)

    def _python(self, peer: str, left: float) -> Path:
        if not peer:
            return Path(sys.executable)
        if peer in self.problems:
            raise NotInstalledError(self.problems[peer])
        try:
            return python_of(peer, self.cache, min(BUILDING, left))
        except NotInstalledError as problem:
            self.problems[peer] = str(problem)
            raise

    def _arguments(self, contestant: Contestant, one: Workload) -> list[str]:
        rounds = min(one.rounds, self.rounds or one.rounds)
        arguments = [
            str(self.files[one.key]),
            "--rounds",
            str(rounds),
            "--seconds",
            f"{self.seconds}",
        ]
        variant = contestant.variant or str(contestant.processes)
        return [*arguments, "--variant", variant]


def environment(threads: int, ours: bool = False) -> dict[str, str]:
    """Threads per process, ours waiting as in `fedveil train`; telemetry is off."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(names, str(threads)),
        "PYTHONPATH": str(CONTESTANTS),
        "PYTHONWARNINGS": "ignore",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_PLATFORMS": "cpu",
        **({"OMP_WAIT_POLICY": "PASSIVE"} if ours else {}),
    }


def execute(command: list[str], variables: Mapping[str, str], limit: float) -> dict[str, Any]:
    """The last JSON line that a program prints, or {"problem": reason}."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = subprocess.Popen(command, stdout=out, stderr=err, env=dict(variables))
        try:
            code = program.wait(limit)
        except subprocess.TimeoutExpired:
            return {"problem": f"not finished after {limit:.0f} s"}
        finally:
            end(program)
        out.seek(0)
        err.seek(0)
        answer = last_json(out.read())
        if answer is not None and not code:
            return answer
        return {"problem": f"failed: {reason(err.read())}"}


def end(program: subprocess.Popen[bytes]) -> None:
    """End a program that is still running, and its children, by process id."""
    if program.poll() is not None:
        return
    for process in reversed(family(program.pid)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    program.wait()


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object, ignoring all other output."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return None


def outcome(workload: str, contestant: Contestant, answer: Mapping[str, Any]) -> Outcome:
    """A program's result as an outcome."""
    if "problem" in answer:
        return Outcome(workload, contestant, problem=str(answer["problem"]))
    return Outcome(
        workload,
        contestant,
        tuple(answer["seconds"]),
        float(answer["loss"]),
        float(answer["accuracy"]),
        int(answer["peak"]),
        answer["versions"],
    )
