"""One comparison, played once by processes of its own, for all tests that look at one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Once
from tests.system.forked import start

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--dataset", "digits", "--clients", 20, "--rounds", 3, "--noise-multiplier", 9.0,
    "--set", "steps=1", "--set", "rate=0.5",
)  # fmt: skip
TWO = ("--algorithms", "dp_fedavg,dp_norm_fedavg", *SMALL)


@pytest.fixture(scope="session")
def compared(once: Once) -> tuple[Path, str, Path]:
    """Two algorithms over two seeds, in processes: the directory, what was said, the ledger."""
    place = once("compared", _compare)
    return place / "c", (place / "said").read_text(encoding="utf-8"), place / "l.sqlite"


def _compare(place: Path) -> None:
    program = ("-m", "fedveil", "compare", *TWO, "--seeds", 2, "--jobs", 2, "--out", place / "c")
    done = start(program, place, with_package(place / "l.sqlite"), "compared")
    try:
        assert done.wait(300) == 0, done.err.read_text()
    finally:
        done.kill()
    (place / "said").write_text(done.out.read_text(), encoding="utf-8")


def with_package(ledger: Path) -> dict[str, str]:
    """The environment in which a process, and its workers, find fedveil and this ledger."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "FEDVEIL_LEDGER": str(ledger)}
