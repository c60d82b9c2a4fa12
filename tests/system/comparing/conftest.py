"""One comparison, played once by processes of its own, for all tests that look at one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Once

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
    command = [sys.executable, "-m", "fedveil", "compare", *map(str, TWO), "--seeds", "2"]
    environment = {**os.environ, "FEDVEIL_LEDGER": str(place / "l.sqlite")}
    done = subprocess.run(
        [*command, "--out", str(place / "c")], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place / "said").write_text(done.stdout, encoding="utf-8")
