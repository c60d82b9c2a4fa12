from __future__ import annotations

from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.runs.listing import listed
from fedveil.runs.saved import (
    CLIENTS,
    METRICS,
    MODEL,
    RECIPE,
    SUMMARY,
    TRACE,
    SavedRun,
    settings_file,
)
from fedveil.training.start import train


@pytest.fixture
def saved(blobs: Federated, tmp_path: Path) -> SavedRun:
    recipe = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
    train(recipe, blobs, rounds=3, save=tmp_path / "a")
    return SavedRun.open(tmp_path / "a")


def test_everything_a_run_wrote_is_read(saved: SavedRun) -> None:
    assert saved.ended
    assert saved.settings["rounds"] == saved.summary["rounds"] == saved.rounds == 3
    assert [row["round"] for row in saved.rows] == [1, 2, 3]
    assert saved.summary["privacy"]["statement"]["Privacy"] in saved.statement
    assert saved.evaluation is not None
    assert saved.encoder is None
    assert saved.engine == (saved.summary["engine"], saved.summary["engine_reason"])
    assert saved.trace is not None
    tensors, facts = saved.model()
    assert tensors
    assert facts
    every, first = saved.clients(), saved.clients(1)
    assert every is not None
    assert first is not None
    assert 0 < len(first) < len(every)


def test_a_file_is_read_once_and_when_it_is_asked_for(saved: SavedRun) -> None:
    whole = saved.summary
    for name in (SUMMARY, METRICS, CLIENTS):
        saved.file(name).write_bytes(b"PAR1 damaged PAR1")
    assert saved.summary is whole
    with pytest.raises(UserError, match=r"metrics\.parquet is damaged"):
        _ = saved.rows
    with pytest.raises(UserError, match=r"clients\.parquet is damaged"):
        saved.clients()
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        _ = SavedRun.open(saved.path).summary


def test_a_list_of_runs_does_not_read_what_ended_runs_have_recorded(saved: SavedRun) -> None:
    for name in (METRICS, CLIENTS):
        saved.file(name).write_bytes(b"PAR1 whatever lies between PAR1")
    assert listed(saved.path).state == "finished"
    saved.file(METRICS).write_bytes(b"cut")
    assert "metrics.parquet is damaged" in listed(saved.path).problem


def test_settings_are_those_of_a_run_or_a_file(saved: SavedRun, tmp_path: Path) -> None:
    assert settings_file(saved.path) == saved.file(RECIPE)
    assert settings_file(tmp_path / "other.toml") == tmp_path / "other.toml"
    with pytest.raises(UserError, match=r"is not a run, because it has no recipe\.toml"):
        settings_file(tmp_path)


def test_a_run_from_python_does_not_name_its_data(saved: SavedRun, tmp_path: Path) -> None:
    assert not saved.names_data
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / RECIPE).write_text('[data]\ndataset = "digits"\n', encoding="utf-8")
    assert SavedRun.open(tmp_path / "named").names_data


def test_what_is_not_there_is_said(saved: SavedRun, tmp_path: Path) -> None:
    for name in (SUMMARY, MODEL, TRACE, METRICS, CLIENTS):
        saved.file(name).unlink()
    assert (saved.ended, saved.trace, saved.metrics, saved.clients()) == (False, None, None, None)
    with pytest.raises(UserError, match=r"has no summary\.json, because the run has not ended"):
        _ = saved.summary
    with pytest.raises(
        UserError, match=r"has no model\.safetensors, because the run has not ended"
    ):
        saved.model()
    with pytest.raises(UserError, match="There is no directory"):
        SavedRun.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a run, because it has no recipe\.toml"):
        SavedRun.open(tmp_path)


def test_a_file_of_a_run_is_answered_with_its_directory(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("rounds = 1\n")
    with pytest.raises(UserError, match=f"is a file. Name '{tmp_path}', the directory of a run"):
        SavedRun.open(tmp_path / "recipe.toml")


def test_a_damaged_recipe_is_not_the_advice_for_itself(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("rounds = \n")
    with pytest.raises(UserError, match="or train again from its settings"):
        _ = SavedRun.open(tmp_path).settings
