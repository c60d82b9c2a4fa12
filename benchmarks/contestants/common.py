"""What every contestant shares: the workload and its data, the stopwatch, the JSON line.

Contestants run in environments of their own, so this needs numpy and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST = 200  # rounds of a quick contestant


@dataclass(frozen=True)
class Setting:
    """A workload as its JSON file has it (benchmarks/workloads.py), and how long to play."""

    key: str
    model: str
    clients: int
    per_round: int
    steps: int
    learning_rate: float
    clip: float
    noise: float
    batch: int | None
    momentum: float
    unit: str
    data: str  # what the examples are
    folder: str  # where the arrays are
    warm: int = 1
    rounds: int = 5
    seconds: float = 3.0
    variant: str = ""

    @property
    def deviation(self) -> float:
        """Of the noise in the mean of the participants."""
        return self.noise * self.clip / self.per_round


@dataclass(frozen=True, eq=False)
class Arrays:
    """The split data, the first model, and who takes part in which round."""

    inputs: np.ndarray  # float32 [n, 1, 28, 28], client after client
    labels: np.ndarray  # int64 [n]
    offsets: np.ndarray  # client i owns [offsets[i], offsets[i+1])
    test_inputs: np.ndarray
    test_labels: np.ndarray
    start: np.ndarray  # float32 [dim], in the order of torch's named parameters
    cohorts: np.ndarray  # int64 [rounds, participants]

    def cohort(self, k: int) -> np.ndarray:
        """Who takes part in round k: the clients that fedveil draws; they repeat in long runs."""
        return np.asarray(self.cohorts[k % len(self.cohorts)])

    def client(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of one client."""
        place = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[place], self.labels[place]


def setting() -> Setting:
    """The command line: the workload's file, and how long to play."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    for name, kind in (("warm", int), ("rounds", int), ("seconds", float), ("variant", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = vars(parser.parse_args())
    plain = json.loads(given.pop("file").read_text())
    return Setting(**plain, **{name: value for name, value in given.items() if value is not None})


def arrays(one: Setting) -> Arrays:
    """Read the arrays."""
    folder = Path(one.folder)
    halves = {name: folder / f"{name}-{one.clients}.npy" for name in ("inputs", "labels")}
    halves |= {name: folder / f"{name}.npy" for name in ("test_inputs", "test_labels")}
    rest = np.load(folder / f"{one.key}.npz")
    return Arrays(**{name: np.load(file) for name, file in halves.items()}, **rest)


def batches(size: int, one: Setting, rng: np.random.Generator) -> np.ndarray:
    """Positions of each local step, [steps, width], from reshuffled passes without a gap."""
    if one.batch is None or one.batch >= size:
        return np.broadcast_to(np.arange(size), (one.steps, size))
    passes = -(-one.steps * one.batch // size)
    flat = np.concatenate([rng.permutation(size) for _ in range(passes)])
    return flat[: one.steps * one.batch].reshape(one.steps, one.batch)


def race(
    one: Setting,
    play: Callable[[int], object],
    evaluate: Callable[[], tuple[float, float]],
    *packages: str,
) -> None:
    """Warm up, time the rounds, evaluate after the promised ones, go on for `seconds`; report."""
    for k in range(one.warm):
        play(k)
    seconds = [_timed(play, one.warm + k) for k in range(one.rounds)]
    loss, accuracy = evaluate()
    while sum(seconds) < one.seconds and len(seconds) < MOST:
        seconds.append(_timed(play, one.warm + len(seconds)))
    report(seconds, loss, accuracy, peak_bytes(), *packages)


def _timed(play: Callable[[int], object], k: int) -> float:
    started = time.perf_counter()
    play(k)
    return time.perf_counter() - started


def report(seconds: list[float], loss: float, accuracy: float, peak: int, *packages: str) -> None:
    """Print the JSON line."""
    result: dict[str, Any] = {
        "seconds": seconds,
        "loss": loss,
        "accuracy": accuracy,
        "peak": peak,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    print(json.dumps(result), flush=True)


def decline(reason: str) -> None:
    """Say in the JSON line why this workload is not served, and end."""
    print(json.dumps({"problem": reason}), flush=True)
    raise SystemExit(0)


def peak_bytes(process: str = "self") -> int:
    """The most memory a process has held; not getrusage's, which also counts its parent's."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if process == "self" else 0
        return own if sys.platform == "darwin" else own * 1024
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0")
    return int(line.split()[1]) * 1024


def family(process: int) -> list[int]:
    """A process and all that descend from it, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found
