"""Rounds logged for TensorBoard, and one sentence where it is not installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.runs.directory import RunDirectory
from fedveil.tensorboard import scalars
from fedveil.training import Record
from tests.conftest import Run

PLAIN = ("--algorithm", "fedavg", "--set", "steps=1", "--dataset", "digits", "--clients", 20)
needs_it = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed; it is an extra: pip install fedveil[tensorboard]",
)


def test_a_record_s_numbers_have_names_and_gaps_are_left_out() -> None:
    record = Record(3, 5, 0, 1.5, 0.25, 2.0, 0.5, 0.1, 40, loss=math.inf, accuracy=0.5, epsilon=1.0)
    found = scalars(record)
    assert found["test/accuracy"] == 0.5
    assert found["privacy/epsilon"] == 1.0
    assert found["diagnostics/norm"] == 1.5
    assert found["diagnostics/void"] == 0.0
    assert not {"test/loss", "diagnostics/threshold", "diagnostics/round"} & found.keys()


@needs_it
@pytest.mark.filterwarnings("ignore")  # of the packages that read the log
def test_every_round_is_logged(run: Run, tmp_path: Path) -> None:
    outcome = run("train", *PLAIN, "--rounds", 3, "--out", "a", "--tensorboard", "log")
    assert outcome.code == 0, outcome
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(tmp_path / "log"))
    log.Reload()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0  # norms and counts are private data
    rows = RunDirectory.open(tmp_path / "a").load_metrics()
    for name, column in (("test/accuracy", "accuracy"), ("diagnostics/norm", "norm")):
        events = log.Scalars(name)
        assert [event.step for event in events] == [1, 2, 3]
        assert [event.value for event in events] == pytest.approx([row[column] for row in rows])


def test_where_it_is_not_installed_a_sentence_says_how(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "tensorboard" else real(name, *more),
    )
    said = refused("train", *PLAIN, "--out", "a", "--tensorboard", "log")
    assert 'install it with `pip install "fedveil[tensorboard]"`' in said
    assert not (tmp_path / "a").exists()
