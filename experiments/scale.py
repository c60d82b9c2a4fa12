"""Rounds of W1's model on a synthetic population: time and memory by number of participants.

`python -m experiments.scale 600 6000 60000 100000` prints a line for each, in one process each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

POPULATION = 1_000_000


def peak() -> float:
    """Peak memory of this process, GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def play(participants: int, rounds: int) -> None:
    """Time the rounds, and measure the memory they need in addition to the data."""
    from fedveil.data.synthetic import synthetic
    from fedveil.parts.bound import Clip
    from fedveil.parts.cohort import FixedSize
    from fedveil.parts.local import SGD
    from fedveil.parts.noise import Gaussian
    from fedveil.parts.report import Difference
    from fedveil.parts.schedule import Constant
    from fedveil.recipe import Recipe
    from fedveil.training.prepare import prepare

    started = time.perf_counter()
    data = synthetic(clients=POPULATION)
    described = time.perf_counter() - started
    local, noise = SGD(Constant(0.05), steps=20), Gaussian(1.0)
    recipe = Recipe(
        "scale", local, FixedSize(participants), Difference(), bound=Clip(0.5), noise=noise
    )
    run = prepare(recipe, data, "softmax", 100, engine="factored", evaluate_every=100)
    before, seconds = peak(), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run.step()
        seconds.append(time.perf_counter() - started)
    each = min(seconds[1:])
    print(
        f"{participants:>9,} of {POPULATION:,}: {each:8.3f} s per round, "
        f"{1e6 * each / participants:6.1f} µs per client, {peak() - before:5.2f} GB on top of the "
        f"{before:.2f} GB before the first; described in {described:.2f} s",
        flush=True,
    )


def main() -> None:
    """Run each number of participants in its own process."""
    if os.environ.get("FEDVEIL_SCALE"):
        participants = int(sys.argv[1])
        play(participants, max(1, min(20, 60_000 // participants)))
        return
    variables = {**os.environ, "FEDVEIL_SCALE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for participants in sys.argv[1:] or ["600", "6000", "60000", "100000"]:
        command = [sys.executable, "-m", "experiments.scale", participants]
        subprocess.run(command, env=variables, check=True)


if __name__ == "__main__":
    main()
