"""What a round costs, from constants measured here, and what a second process gains.

Writes the tables of docs/scaling.md, in about five minutes on a quiet machine of two cores:

    python -m experiments.scaling
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import material
from benchmarks.machine import keep_to_two_cores, load_average, processor
from benchmarks.workloads import WORKLOADS, Workload
from fedveil.data.federated import Examples, Federated
from fedveil.engines.loop import LoopEngine
from fedveil.engines.processes import Team, joined
from fedveil.engines.ranks import end_at_once
from fedveil.engines.task import Task
from fedveil.engines.updates import DenseUpdates, Group
from fedveil.loop import State
from fedveil.parts.bound import within
from fedveil.parts.cohort import Poisson
from fedveil.parts.local import LocalPlan, all_examples
from fedveil.parts.noise import Gaussian
from fedveil.parts.server import Momentum
from fedveil.random.samplers import rounded_gaussian
from fedveil.runs.directory import RunDirectory
from fedveil.training.run import Training
from fedveil.training.start import follow

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- measured: python -m experiments.scaling -->", "<!-- end of what is measured -->"
SHARE, EXAMPLES, STEPS, FEATURES = 0.1, 20, 20, 784  # of a round on paper: as W1, 10% take part
SOFTMAX = 7850  # the d of W1, whose engine is quicker than plain arithmetic
CHECKPOINT_EVERY = 5  # rounds
SMALL, LARGE = 10**4, 4 * 10**6  # numbers of the all-reduces that are timed
WAYS = {
    "1 process, 1 thread": (1, 1),
    "1 process, 2 threads": (1, 2),
    "2 processes, 1 thread each": (2, 1),
}
RACES = {
    "W1": WORKLOADS["W1"],
    "MLP": replace(WORKLOADS["W2"], key="W2", per_round=24, steps=4),
}  # fmt: skip


@dataclass(frozen=True)
class Constants:
    """Seconds on one thread, per unit of work."""

    cohort: float  # a client of the population: its coin
    softmax: float  # a participant of W1: all of its work
    work: float  # a parameter, example and step: plain local SGD of a large model
    gather: float  # an input's number, once a participant
    bound: float  # a number of an update: its norm and its part in the sum
    noise: float  # a number: Gaussian
    exact: float  # a number: the rounded Gaussian of secure noise
    server: float  # a number: mean, momentum, next model
    save: float  # a number: a checkpoint, flushed to the disk
    start: float  # a small all-reduce of two processes
    reduce: float  # a number of a large one
    orders: float  # the small exchange before a round

    def round(self, population: float, dim: float, processes: int = 1) -> dict[str, float]:
        """Seconds of a round's parts; participants are shared, the rest runs on every process."""
        each = self.softmax
        if dim != SOFTMAX:
            each = EXAMPLES * (STEPS * dim * self.work + FEATURES * self.gather) + dim * self.bound
        together = 2 * self.start + self.orders + dim * self.reduce if processes > 1 else 0.0
        return {
            "cohort": population * self.cohort,
            "clients": SHARE * population * each / processes,
            "exchange": together,
            "noise": dim * self.noise,
            "server": dim * self.server,
            "checkpoint": dim * self.save / CHECKPOINT_EVERY,
        }


# Constants of one process


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of a few runs after a warm-up."""
    work()
    return statistics.median(once(work) for _ in range(repeats))


def once(work: Callable[[], object]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cohort_cost(population: int = 10**7) -> float:
    """Drawing the cohort."""
    rng = np.random.default_rng(0)
    return seconds(lambda: Poisson(SHARE).draw(population, rng)) / population


def work_cost(clients: int = 3) -> float:
    """Local SGD one client after another, as for models too large to stack."""
    layers = [nn.Linear(FEATURES, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(1500, 10))
    data = population(clients)
    task = Task(module, data.loss)
    plan = LocalPlan(all_examples(data.sizes), torch.full((clients, STEPS), 0.01))
    group, x = Group(data, np.arange(clients), plan), task.flatten()
    engine = LoopEngine(task)
    return seconds(lambda: engine.updates(x, group)) / (clients * EXAMPLES * STEPS * task.dim)


def gather_cost(clients: int = 500) -> float:
    """Gathering the examples of scattered clients."""
    data = population(4 * clients)
    chosen = np.sort(np.random.default_rng(0).choice(4 * clients, clients, replace=False))
    index = all_examples(data.sizes[:clients])
    group = Group(data, chosen, LocalPlan(index, torch.ones(clients, 1)))
    return seconds(lambda: next(group.steps())) / (clients * EXAMPLES * FEATURES)


def population(clients: int) -> Federated:
    """Clients of EXAMPLES examples of FEATURES numbers."""
    inputs = torch.rand(clients * EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(clients * EXAMPLES) % 10
    offsets = torch.arange(clients + 1) * EXAMPLES
    return Federated("made up", inputs, labels, offsets, Examples(inputs[:10], labels[:10]), 10)


def bound_cost(clients: int = 32, dim: int = 10**6) -> float:
    """Norms and the weighted sum of rows."""
    updates = DenseUpdates(torch.ones(clients, dim))
    total = torch.zeros(dim, dtype=torch.float64)

    def bounded_sum() -> None:
        total.add_(updates.weighted_sum(1 / updates.norms()))

    return seconds(bounded_sum) / (clients * dim)


def noise_costs(dim: int = 10**6) -> tuple[float, float]:
    """Gaussian, and exactly rounded."""
    rng, noise = np.random.default_rng(0), Gaussian(1.0)
    plain = seconds(lambda: noise.draw(within(1.0, dim), 1, 1.0, rng)) / dim
    few = dim // 20
    return plain, seconds(lambda: rounded_gaussian(2.0**24, few, rng)) / few


def server_cost(dim: int = 10**7) -> float:
    """From the noisy sum to the next model."""
    x, total = torch.ones(dim), torch.ones(dim, dtype=torch.float64)
    server = Momentum()
    state = server.start(x)
    return seconds(lambda: server.step(x, -(total + total).div(7.0).float(), state, 0)) / dim


def save_cost(dim: int = 10**7) -> float:
    """Saving the model, its momentum and the output."""
    x = torch.ones(dim)
    state = State(1, x, {"momentum": x}, {"model": x})
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        return seconds(lambda: directory.save_checkpoint(state), 3) / dim


# Measurements with processes


def worker(job: str, file: str) -> None:
    """Inside torchrun: time all-reduces or rounds of a workload; the first process prints them."""
    with joined() as team:
        found = exchange_costs(team) if job == "exchange" else round_times(team, Path(file))
        if team.first:
            print(json.dumps(found), flush=True)
    end_at_once(SystemExit(0))


def exchange_costs(team: Team) -> list[float]:
    """Seconds of a small all-reduce, of one number of a large one, and of an order."""
    small, large = (torch.zeros(dim, dtype=torch.float64) for dim in (SMALL, LARGE))
    x = torch.zeros(SOFTMAX)
    start = seconds(lambda: team.add(small), 50)
    each = (seconds(lambda: team.add(large), 7) - start) / (LARGE - SMALL)
    orders = seconds(lambda: team.lead("play", x) if team.first else team.follow(False, x), 50)
    return [start, each, orders]


def round_times(team: Team, file: Path) -> list[float]:
    """A few seconds of rounds after a warm-up."""
    run = trained(file)
    run.team = team
    if not team.first:
        follow(run)
        return []
    run.step()
    times: list[float] = []
    while sum(times) < 6 or len(times) < 5:
        times.append(once(run.step))
    team.lead("end", run.state.x)
    return times


def trained(file: Path) -> Training:
    """A workload of the benchmark at round 0, on the engine that `auto` selects."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "contestants"))  # scripts with relative imports
    import common
    import ours

    setting = common.Setting(**json.loads(file.read_text()))
    return ours.training(setting, common.arrays(setting), "auto")


def torchrun(processes: int, threads: int, *arguments: str) -> list[float]:
    """The output of the first process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "experiments.scaling"]
    command += ["--worker", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def races(files: dict[str, Path]) -> dict[str, dict[str, list[float]]]:
    """Seconds of rounds by workload and way; ways alternate, so that a slow minute affects all."""
    found: dict[str, dict[str, list[float]]] = {key: {way: [] for way in WAYS} for key in files}
    for _ in range(3):
        for key, file in files.items():
            for way, numbers in WAYS.items():
                found[key][way] += torchrun(*numbers, "rounds", str(file))
                tell(f"{key}, {way}: {statistics.median(found[key][way]):.4f} s")
    return found


def tell(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


# The document


def measured(softmax: float) -> Constants:
    """Measure all constants on one thread."""
    torch.set_num_threads(1)
    noise, exact = noise_costs()
    start, reduce, orders = torchrun(2, 1, "exchange", "")
    return Constants(
        cohort_cost(), softmax, work_cost(), gather_cost(), bound_cost(), noise, exact,
        server_cost(), save_cost(), start, reduce, orders,
    )  # fmt: skip


def document(
    constants: Constants, raced: dict[str, dict[str, list[float]]], load: float, data: str
) -> str:
    """Everything between the markers."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    blocks = [
        f"Measured {date} on {len(os.sched_getaffinity(0))} cores of {processor()}, load average "
        f"{load:.1f} before; data: {data}.",
        "### Two processes compared with one\n\nMedian (minimum) seconds per round.",
        table(["", *WAYS, "speedup of 2 processes over 1, and over 2 threads"], speeds(raced)),
        "### Constants\n\nOne thread; for the exchange, two processes with one thread each.",
        table(["constant", "ns", "for each"], priced(constants)),
        f"### Calculated cost of a round\n\nCalculated from these constants: {SHARE:.0%} of the "
        f"clients participate, each with {EXAMPLES} examples of {FEATURES} numbers and {STEPS} "
        "full-batch steps; Gaussian noise, server momentum, a checkpoint every "
        f"{CHECKPOINT_EVERY} rounds. The column d = {SOFTMAX:,} is the softmax regression of W1 "
        "as measured. The others are plain arithmetic of a large model, one client after the "
        "other. One process with one thread:",
        paper(constants, 1),
        "Two processes with one thread each:",
        paper(constants, 2),
        "Where the time of two processes goes, in percent:",
        shares(constants),
    ]  # fmt: skip
    return "\n\n".join(blocks)


def table(header: list[str], rows: Iterator[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speeds(raced: dict[str, dict[str, list[float]]]) -> Iterator[list[str]]:
    """A row for each workload."""
    for key, ways in raced.items():
        medians = {way: statistics.median(times) for way, times in ways.items()}
        cells = [f"{medians[way]:.4f} ({min(times):.4f})" for way, times in ways.items()]
        one, threads, two = medians.values()
        yield [title(RACES[key]), *cells, f"{one / two:.2f}×, {threads / two:.2f}×"]


def title(one: Workload) -> str:
    """Describe a workload in a few words."""
    examples = 60_000 // one.clients
    return f"{one.model}, {one.per_round} clients of {examples} examples, {one.steps} steps"


MEANINGS = {
    "cohort": "client of the population: its coin",
    "softmax": "participant of W1: all of its work",
    "work": "parameter, example and step of a participant: local SGD of a large model",
    "gather": "number of a participant's examples: bringing them together",
    "bound": "parameter of a participant: norm, bound and sum",
    "noise": "parameter: Gaussian noise",
    "exact": "parameter: exactly rounded noise (`noise=\"secure\"`)",
    "server": "parameter: mean, momentum, next model",
    "save": "parameter: a checkpoint on disk",
    "start": "all-reduce, however small",
    "reduce": "parameter of an all-reduce in float64",
    "orders": "round: what the first process says to the other",
}  # fmt: skip


def priced(constants: Constants) -> Iterator[list[str]]:
    """A row for each constant."""
    for name in fields(constants):
        yield [name.name, f"{1e9 * getattr(constants, name.name):,.3g}", MEANINGS[name.name]]


DIMS = (SOFTMAX, 10**5, 10**6, 10**7, 10**8)
POPULATIONS = tuple(10**power for power in range(3, 8))


def paper(constants: Constants, processes: int) -> str:
    """Seconds per round by population and dimension."""
    rows = (
        [f"{n:,}", *(clock(sum(constants.round(n, d, processes).values())) for d in DIMS)]
        for n in POPULATIONS
    )
    return table(["clients", *(f"d = {d:,}" for d in DIMS)], rows)


def shares(constants: Constants) -> str:
    """The share of each part of a round."""
    chosen = [(10**3, 10**5), (10**3, 10**8), (10**5, SOFTMAX), (10**7, SOFTMAX), (10**7, 10**8)]
    parts = list(constants.round(1, 1))
    rows = ([f"{n:,} clients, d = {d:,}", *percents(constants.round(n, d, 2))] for n, d in chosen)
    return table(["", *parts], rows)


def percents(parts: dict[str, float]) -> list[str]:
    """Percentages of their sum."""
    return [f"{100 * part / sum(parts.values()):.3g}" for part in parts.values()]


def clock(time: float) -> str:
    """Seconds, minutes, hours or days.

    >>> clock(0.0123), clock(7200), clock(3e6)
    ('0.012 s', '2 h', '35 days')
    """
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if time >= 2 * length or (unit == "h" and time >= length):
            return f"{time / length:.2g} {unit}"
    return f"{time:.2g} s"


def main() -> None:
    """Measure, and update the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("JOB", "FILE"))
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    load = load_average()
    keep_to_two_cores()
    data, examples = material.examples()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            key: material.write([one], Path(folder) / key, data, examples)[one.key]
            for key, one in RACES.items()
        }
        raced = races(files)
    alone = statistics.median(raced["W1"]["1 process, 1 thread"]) / RACES["W1"].per_round
    text = document(measured(alone), raced, load, data)
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
