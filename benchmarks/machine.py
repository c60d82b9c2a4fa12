"""The machine: two of its cores, its processor, and its rate of matrix products."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

CORES = 2
SIZE = 1024


def keep_to_two_cores() -> int:
    """Bind this process and its children to two cores; returns the number of usable cores."""
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    return len(os.sched_getaffinity(0))


def matmul_rate(repeats: int = 12) -> float:
    """Operations per second of a float32 product of 1024×1024 matrices, best of several."""
    torch.set_num_threads(CORES)
    left, right = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    return 2 * SIZE**3 / min(_seconds(left, right) for _ in range(repeats))


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - started


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def load_average() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
