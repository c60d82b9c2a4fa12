"""Shared by all tests: small data, a table, fast recipes, and the command line in process."""

from __future__ import annotations

import fcntl
import functools
import gc
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Examples, Federated
from fedveil.data.partition import Iid
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.recipe import Recipe

# Where CI is set, pytest writes out all differences of what is compared. That takes minutes for
# each long sequence, and mutations make such comparisons fail on purpose.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# A ledger waits for the disk after each entry, which matters where the power fails, and not here.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# The same cases in every run, however busy the machine is, and one failure at a time.
settings.register_profile("here", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("here")

TIERS = ("system", "statistics", "mutations", "contracts", "unit")  # the slowest first
SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text().split())
STYLE_VARIABLES = ("NO_COLOR", "CI", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its directory's tier, unless it names another one itself.

    Long ones run first, so that no core works alone at the end; a federation waits the longest.
    """
    place = {item: _tier(item) for item in items}
    for item, tier in place.items():
        if tier is not None:
            item.add_marker(tier)
        if item.nodeid.partition("[")[0] in SLOW:
            item.add_marker("slow")
    order = [*TIERS, None]
    items.sort(key=lambda item: (order.index(place[item]), not _federates(item)))


def _tier(item: pytest.Item) -> str | None:
    marked = {mark.name for mark in item.iter_markers()}
    _, _, place = str(item.path).rpartition(f"{os.sep}tests{os.sep}")
    names = [tier for tier in TIERS if tier in marked] or [place.partition(os.sep)[0]]
    return names[0] if names[0] in TIERS else None


_yielding: list[int] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a federation's processes go first: they have deadlines, and wait most of the time.

    Federations come first, so a process whose priority is lowered has none of them left.
    """
    if not _yielding and "PYTEST_XDIST_WORKER" in os.environ and not _federates(item):
        _yielding.append(os.nice(10))


def _federates(item: pytest.Item) -> bool:
    return "federation" in item.path.parts and _tier(item) == "system"


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, fill)`: a directory that is filled once, for all processes of this test run.

    What is in it is shared: copy what a test changes.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        place, done = root / name, root / f"{name}.done"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                place.mkdir()
                fill(place)
                done.touch()
        return place

    return made


@pytest.fixture(scope="session", autouse=True)
def _no_ledger_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also while fixtures of a whole module train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVEIL_LEDGER", str(tmp_path_factory.mktemp("ledgers") / "shared.sqlite"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _libraries_answer_once() -> Iterator[None]:
    """What libraries build anew on each call, and what no test can see, costs its time once.

    The command line that typer derives from signatures; scikit-learn's file of digits; the wait
    for a disk, which matters where the power fails, and not where a process ends; and the groups
    of examples that an interval of a metric is computed from (tests/unit/training/test_metrics.py
    has all of them).
    """
    import sklearn.datasets
    import typer.main

    from fedveil.training import scoring

    command = functools.cache(typer.main.get_command)
    digits = functools.cache(sklearn.datasets.load_digits)

    def copied(**given: Any) -> tuple[np.ndarray, ...]:
        return tuple(part.copy() for part in digits(**given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", command)
        patch.setattr(sklearn.datasets, "load_digits", copied)
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(scoring, "GROUPS", 3)
        yield


@pytest.fixture(scope="session")
def _ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New directories, numbered by us: pytest reads all names before it makes another one."""
    root = tmp_path_factory.mktemp("ledger-of-each")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(scope="session", autouse=True)
def _own_models_are_checked_once() -> Iterator[None]:
    """fedveil's own models are checked for state and mixing once, not at the start of every run.

    A model, a loss or a device that a test brings is checked each time, and so is what a test has
    changed in fedveil's own models and engines: the functions are part of the key.
    """
    from fedveil.engines import choose, isolation
    from fedveil.training import prepare

    known: dict[tuple[object, ...], str] = {}

    def key(task: Task, engine: Engine, data: Federated) -> tuple[object, ...] | None:
        kinds = [type(module) for module in task.module.modules()]
        places = [kind.__module__ for kind in kinds]
        ours = places[0].startswith("fedveil.models.")
        if not ours or not all(place.startswith(("fedveil.", "torch.nn.")) for place in places):
            return None
        loss = task.loss_of_examples
        if not type(loss).__module__.startswith("fedveil.") or task.device.type != "cpu":
            return None
        shapes = [(part.shape[1:], part.dtype) for part in (data.inputs, data.labels)]
        code = (type(engine).updates, type(loss).__call__, *(kind.forward for kind in kinds))
        return *code, str((engine.name, task.module, loss, shapes, data.classes, data.layout))

    def refuse_once(task: Task, engine: Engine, data: Federated) -> None:
        case = key(task, engine, data)
        if case in known:
            task.watch(isolation.made_up(data, 2, isolation.SCALES[0]))
            return
        isolation.refuse_memory(task, engine, data)
        if case is not None:
            known[case] = ""

    problem = choose._Trial.problem

    def problem_once(trial: choose._Trial, engine: Engine) -> str:
        case = key(trial.task, engine, trial.data)
        if case is None:
            return problem(trial, engine)
        case = (isolation.mixing, choose.mixing, *case)
        if case not in known:
            known[case] = problem(trial, engine)
        return known[case]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "refuse_memory", refuse_once)
        patch.setattr(choose._Trial, "problem", problem_once)
        yield


@pytest.fixture(autouse=True)
def ledger(_ledgers: Iterator[Path]) -> Iterator[Path]:
    """An empty place for this test's ledger; the user's own is never touched.

    The patch is its own, so that a test which undoes its patches keeps it.
    """
    place = next(_ledgers)
    place.mkdir()
    path = place / "ledger.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVEIL_LEDGER", str(path))
        yield path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`fedveil ARGUMENTS` in this process, in an empty directory, not a terminal."""
    from fedveil.cli import main

    for name in STYLE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Outcome(
            code if isinstance(code, int) else int(code is not None), *capsys.readouterr()
        )

    return call


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the runs of a comparison in this process, one after another, by the workers' own code.

    That they are processes otherwise is the subject of tests/system/comparing.
    """
    from fedveil.comparing import worker
    from fedveil.comparing.pool import Pool, RunTask

    def run_here(pool: Pool, tasks: Sequence[RunTask]) -> None:
        for task in tasks:
            answers: list[Mapping[str, Any]] = []

            def tell(
                answer: Mapping[str, Any], task: RunTask = task, all: list[Any] = answers
            ) -> None:
                all.append(answer)
                if "round" in answer:
                    pool.display.moved(task, answer)

            pool.display.started(task)
            worker.load_once.cache_clear()
            worker.train_task(json.loads(task.line(pool.ledger)), tell)
            problem = answers[-1].get("problem")
            if problem is not None:
                pool.problems[task.name] = problem
            pool.display.ended(task, problem)

    monkeypatch.setattr(Pool, "run", run_here)


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The one sentence with which `fedveil ARGUMENTS` refuses: exit code 2, nothing else said."""

    def call(*arguments: object) -> str:
        outcome = run(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.startswith("fedveil: ")
        assert outcome.err.count("\n") == 1
        assert outcome.err.endswith(".\n")
        return outcome.err.removeprefix("fedveil: ").rstrip()

    return call


@pytest.fixture(scope="session")
def digits() -> Federated:
    """scikit-learn's digits over 20 clients."""
    return load("digits").split(Iid(20))


@pytest.fixture(scope="session")
def blobs() -> Federated:
    """Three classes of points in R⁵ over 12 clients of 4 to 7 examples."""
    rng = np.random.default_rng(0)
    sizes = 4 + np.arange(12) % 4
    offsets = np.concatenate([[0], np.cumsum(sizes)])

    def examples(count: int) -> Examples:
        labels = rng.integers(3, size=count)
        points = rng.normal(size=(count, 5)) + 3 * np.eye(5)[labels]
        return Examples(torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels))

    train, test = examples(int(sizes.sum())), examples(60)
    return Federated("blobs", train.inputs, train.labels, torch.from_numpy(offsets), test, 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV of 8 people with 6 rows each: columns who, x, [bold], y."""
    rng = np.random.default_rng(0)
    rows = ["who,x,[bold],y"]
    for row in range(48):
        x, z = rng.normal(size=2)
        rows.append(f"p{row % 8},{x:.3f},{z:.3f},{'yes' if x + z > 0 else 'no'}")
    path = tmp_path / "people.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def plain_recipe() -> Recipe:
    """FedAvg in two local steps."""
    return algorithms.fedavg(learning_rate=0.5, steps=2)


@pytest.fixture
def private_recipe() -> Recipe:
    """Error compensation with everyone in each round: noise not settled, quickly accounted."""
    return algorithms.fed_alpha_normec(learning_rate=0.5, beta=0.5, alpha=0.1)
