"""The same data, split, first model and cohorts for every contestant, as files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import EXAMPLES, Workload
from fedveil.data.catalog import CATALOG
from fedveil.data.partition import Assignment, Iid, Shards
from fedveil.random.streams import stream

CONTESTANTS = Path(__file__).resolve().parent / "contestants"
Arrays = dict[str, np.ndarray]  # inputs, labels, test_inputs, test_labels
COHORTS = 16  # rounds until cohorts repeat
SHARDS = 5  # of one label each, per client of W1
TEST = 10_000


def write(workloads: list[Workload], folder: Path, data: str, examples: Arrays) -> dict[str, Path]:
    """Write all arrays; returns each workload's settings file by key."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("test_inputs", "test_labels"):
        np.save(folder / f"{name}.npy", examples[name])
    return {one.key: _write_one(one, folder, data, examples) for one in workloads}


def examples() -> tuple[str, Arrays]:
    """The name of the examples, and the examples."""
    entry = CATALOG["fashion-mnist"]
    place = entry.found()
    if place is None:
        return "synthetic", synthetic(np.random.default_rng(0), EXAMPLES, TEST)
    dataset = entry.read(place)
    halves = {"": dataset.train, "test_": dataset.test}
    arrays = {f"{half}inputs": part.inputs.numpy() for half, part in halves.items()}
    arrays |= {f"{half}labels": part.labels.numpy() for half, part in halves.items()}
    return "Fashion-MNIST", arrays


def synthetic(rng: np.random.Generator, examples: int, test: int) -> Arrays:
    """Ten patterns with noise, in Fashion-MNIST's shape, for machines without it."""
    patterns = rng.random((10, 1, 28, 28), dtype=np.float32)
    arrays: Arrays = {}
    for half, count in (("", examples), ("test_", test)):
        labels = rng.integers(10, size=count)
        noise = rng.random((count, 1, 28, 28), dtype=np.float32)
        arrays |= {f"{half}inputs": 0.3 * patterns[labels] + 0.7 * noise, f"{half}labels": labels}
    return arrays


def split(one: Workload, labels: np.ndarray) -> Assignment:
    """Shards of few labels for small clients, otherwise random; examples stay unchanged."""
    if one.unit == "example":
        return Assignment(np.arange(len(labels)), np.arange(len(labels) + 1))
    rule = Shards(one.clients, SHARDS) if one.model == "softmax" else Iid(one.clients)
    return rule.assign(labels, None, np.random.default_rng(0))


def _write_one(one: Workload, folder: Path, data: str, examples: Arrays) -> Path:
    plain: dict[str, Any] = {**asdict(one), "data": data, "folder": str(folder)}
    settings = {name: value for name, value in plain.items() if name not in ("title", "rounds")}
    assignment = split(one, examples["labels"])
    dealt = {**examples, **_dealt(one, assignment, examples, folder)}
    start, cohorts = _beginning(settings, assignment.offsets, dealt)
    np.savez(folder / f"{one.key}.npz", offsets=assignment.offsets, start=start, cohorts=cohorts)
    file = folder / f"{one.key}.json"
    file.write_text(json.dumps(settings))
    return file


def _dealt(one: Workload, assignment: Assignment, examples: Arrays, folder: Path) -> Arrays:
    """The training examples client by client; workloads with as many clients share a file."""
    parts = {name: examples[name][assignment.order] for name in ("inputs", "labels")}
    for name, part in parts.items():
        np.save(folder / f"{name}-{one.clients}.npy", part)
    return parts


def _beginning(
    settings: dict[str, Any], offsets: np.ndarray, dealt: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    """fedveil's first model and cohorts, which all contestants use."""
    if str(CONTESTANTS) not in sys.path:  # contestants are scripts with relative imports
        sys.path.insert(0, str(CONTESTANTS))
    import common
    import ours

    data = common.Arrays(**dealt, offsets=offsets, start=np.empty(0), cohorts=np.empty(0))
    run = ours.training(common.Setting(**settings), data, "loop")
    draw, population = run.recipe.cohort.draw, run.data.clients
    cohorts = [draw(population, stream(run.key, k, "cohort")) for k in range(COHORTS)]
    return run.state.x.numpy(), np.stack(cohorts)
