"""A stranger's file on the command line: every command says what is true of its parts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Run

SOURCE = Path(__file__).parents[1] / "contracts" / "own_parts.py"
SMALL = ("--dataset", "digits", "--clients", "20", "--rounds", "3", "--epsilon", "8")


@pytest.fixture
def stranger(run: Run, tmp_path: Path) -> Iterator[Run]:
    """Commands in a directory that has own_parts.py."""
    shutil.copy(SOURCE, tmp_path / "own_parts.py")
    yield run
    sys.modules.pop("own_parts", None)


def test_every_command_tells_the_truth_about_a_stranger_s_parts(
    stranger: Run, tmp_path: Path
) -> None:
    listed = stranger("algorithms", "own_parts:dp_own")
    assert "cap: int | None = None" in listed.out
    train = ("train", "--algorithm", "own_parts:dp_own", "--set", "cap=2", *SMALL)
    trained = stranger(*train, "--diagnostics", "--out", "a")
    assert trained.code == 0, trained.err
    said = stranger("privacy", "a")
    for outcome in (trained, said):
        assert "CoinFlips(rate=0.2, cap=2): 4 of 20 clients on average per round" in outcome.out
        assert "own_parts:BlockClip" in outcome.out
        assert "every client takes part" not in outcome.out
    advised = stranger("diagnose", "a")
    assert advised.code == 0, advised.err
    for flag in ("Lower C", "Raise C", "--set clip", "--set server_rate", "--set rate"):
        assert flag not in advised.out  # nobody knows of a C here, nor what its flags are
    reported = stranger("report", "a")
    assert reported.code == 0, reported.err
    page = (tmp_path / "a" / "report.html").read_text()
    assert "CoinFlips(rate=0.2, cap=2)" in page
    assert "The dotted line is the bound C" not in page
    resumed = stranger("train", "a/recipe.toml", "--seed", "1", "--out", "b")
    assert resumed.code == 0, resumed.err


def test_a_plan_says_what_it_does_not_know_of_a_stranger_s_parts(stranger: Run) -> None:
    plan = ("plan", "--algorithm", "own_parts:dp_own_memory", *SMALL)
    planned = stranger(*plan)
    assert planned.code == 0, planned.err
    assert "multiplier z" not in planned.out
    for what in ("clip", "cohort"):
        refused = stranger(*plan, "--sweep", what)
        assert refused.code == 2
        assert what in refused.err
    secure = stranger("train", "--algorithm", "own_parts:dp_own", *SMALL, "--noise", "secure")
    assert secure.code == 2
    assert "OwnNoise" in secure.err


@pytest.mark.usefixtures("workers_here")
def test_a_stranger_s_algorithms_are_compared(stranger: Run) -> None:
    """That processes of their own find a stranger's file is in test_docs.py."""
    names = "own_parts:dp_own,own_parts:dp_own_memory"
    compared = stranger("compare", "--algorithms", names, *SMALL, "--out", "c")
    assert compared.code == 0, compared.err
    for name in ("own_parts_dp_own", "own_parts_dp_own_memory"):
        assert name in compared.out
