"""Shared by all tests: small data, a table, fast recipes, and the command line in process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Examples, Federated
from fedveil.data.partition import Iid
from fedveil.recipe import Recipe

STYLE_VARIABLES = ("NO_COLOR", "CI", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def _no_ledger_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also while fixtures of a whole module train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVEIL_LEDGER", str(tmp_path_factory.mktemp("ledgers") / "shared.sqlite"))
        yield


@pytest.fixture(autouse=True)
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty place for this test's ledger; the user's own is never touched.

    The patch is its own, so that a test which undoes its patches keeps it.
    """
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
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
