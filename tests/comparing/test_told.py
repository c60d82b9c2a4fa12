"""What a comparison says: what to do next, and what its numbers are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.comparing.pool import Pool
from tests.comparing.test_command import TWO, well
from tests.conftest import Run

Refused = Callable[..., str]


def stop(pool: Pool, tasks: object) -> None:
    """As if Ctrl-C had come at once."""
    pool.stopped = True


def test_a_comparison_without_a_result_is_gone_on_with_and_not_reported(
    run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Pool, "play", stop)
    stopped = run("compare", *TWO, "--seeds", 2, "--out", "c")
    assert stopped.code == 130
    assert "fedveil compare --resume c" in stopped.out
    assert "fedveil report" not in stopped.out
    said = "No run of c has ended yet; go on with `fedveil compare --resume c`."
    assert refused("report", "c") == said
    assert refused("compare", "c") == said
    (tmp_path / "c" / "comparison.json").unlink()
    assert refused("report", "c") == said


def test_a_member_without_a_finished_run_is_left_out_of_the_report(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "play", stop)
    run("compare", *TWO, "--seeds", 1, "--out", "c")
    flags = ("--algorithm", "dp_fedavg", *TWO[2:])
    well(run("train", *flags, "--out", "c/dp_fedavg-s0"))
    assert "fedveil report c" in run("compare", "--resume", "c").out
    assert "report.html" in well(run("report", "c"))
