"""Rounds reach every logger, without diagnostics unless they are asked for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedveil import algorithms
from fedveil.errors import UserError
from fedveil.runs.saved import SavedRun
from fedveil.training.loggers import MLflow, TensorBoard, WandB, scalars
from fedveil.training.records import Record
from fedveil.training.start import train
from tests.conftest import Run
from tests.unit.training.test_metrics import rare

PLAIN = ("--algorithm", "fedavg", "--set", "steps=1", "--dataset", "digits", "--clients", 20)


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is an extra: fedveil[{package}]")


class Kept:
    """A logger of the user's own."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.rounds: list[tuple[int, dict[str, float]]] = []

    def check(self) -> None:
        """Nothing is needed."""

    @contextmanager
    def run(self, facts: Mapping[str, Any]) -> Iterator[Callable[..., None]]:
        self.facts = dict(facts)
        yield lambda round, values: self.rounds.append((round, dict(values)))


def test_a_record_s_numbers_have_names_and_gaps_are_left_out() -> None:
    record = Record(3, 5, 0, 1.5, 0.25, 2.0, 0.5, 0.1, 40, loss=math.inf, accuracy=0.5, epsilon=1.0)
    assert scalars(record) == {"test/accuracy": 0.5, "privacy/epsilon": 1.0}
    found = scalars(record, diagnostics=True)
    assert found["diagnostics/norm"] == 1.5
    assert found["diagnostics/aborted"] == 0.0
    assert not {"test/loss", "diagnostics/threshold", "diagnostics/round"} & found.keys()


def test_a_logger_of_your_own_gets_facts_and_rounds() -> None:
    kept, all_ = Kept(), Kept()
    train(algorithms.fedavg(), rare(), rounds=2, log=[kept], metric="auc")
    assert kept.facts["algorithm"] == "fedavg"
    assert kept.facts["metric"] == "auc"
    assert [round for round, _ in kept.rounds] == [1, 2]
    assert set(kept.rounds[0][1]) == {"test/accuracy", "test/loss", "test/metric"}
    train(algorithms.fedavg(), rare(), rounds=1, log=[all_], log_diagnostics=True)
    assert "diagnostics/norm_median" in all_.rounds[0][1]


def test_what_is_no_logger_is_refused() -> None:
    for wrong in ("logs", TensorBoard):
        with pytest.raises(UserError, match="is not a logger"):
            train(algorithms.fedavg(), rare(), rounds=1, log=[wrong])  # type: ignore[list-item]


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore")  # of the packages that read the log
def test_tensorboard_has_every_round_and_diagnostics_if_asked(run: Run, tmp_path: Path) -> None:
    board = ("--tensorboard", "log", "--log-diagnostics")
    outcome = run("train", *PLAIN, "--rounds", 3, "--out", "a", *board)
    assert outcome.code == 0, outcome
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(tmp_path / "log"))
    log.Reload()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0  # norms and counts are private data
    rows = SavedRun.open(tmp_path / "a").rows
    for name, column in (("test/accuracy", "accuracy"), ("diagnostics/norm", "norm")):
        events = log.Scalars(name)
        assert [event.step for event in events] == [1, 2, 3]
        assert [event.value for event in events] == pytest.approx([row[column] for row in rows])


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_s_file_store_has_settings_and_rounds(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    result = train(algorithms.fedavg(), rare(), rounds=3, log=[MLflow(tmp_path / "ml")])
    client = MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())
    known = client.get_experiment_by_name("fedveil")
    assert known is not None
    [mine] = client.search_runs([known.experiment_id])
    assert mine.info.status == "FINISHED"
    assert mine.data.params["algorithm"] == "fedavg"
    found = client.get_metric_history(mine.info.run_id, "test/loss")
    assert [m.value for m in found] == pytest.approx([r.loss for r in result.records])
    assert not any(name.startswith("diagnostics") for name in mine.data.metrics)


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_writes_an_offline_run(tmp_path: Path) -> None:
    train(algorithms.fedavg(), rare(), rounds=2, log=[WandB(tmp_path / "wb")])
    [file] = (tmp_path / "wb").rglob("run-*.wandb")
    assert b"test/loss" in file.read_bytes()
    assert b"diagnostics/" not in file.read_bytes()


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "wandb"])
def test_where_it_is_not_installed_a_sentence_says_how(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == package else real(name, *more),
    )
    said = refused("train", *PLAIN, "--out", "a", f"--{package}", "log")
    assert f'Install it with `pip install "fedveil[{package}]"`' in said
    assert not (tmp_path / "a").exists()
