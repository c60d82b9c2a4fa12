"""Runs as they are found on disk: whole, stopped, broken, newer, or no runs at all."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tomli_w

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.bound import Clip, ProbedClip
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory
from fedveil.runs.listing import find_runs, listed, remove_run
from fedveil.runs.saved import SavedRun
from fedveil.serialization.versions import refuse_newer
from fedveil.training.start import train

PRIVATE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)


@pytest.fixture(scope="module")
def whole(blobs: Federated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nobody changes."""
    path = tmp_path_factory.mktemp("whole") / "a"
    train(PRIVATE, blobs, rounds=3, seed=5, save=path)
    return path


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "runs" / "a")
    return tmp_path / "runs" / "a"


def test_a_finished_run(finished: Path) -> None:
    found, summary = listed(finished), json.loads((finished / "summary.json").read_bytes())
    assert (found.state, found.rounds, found.planned, found.seed) == ("finished", 3, 3, 5)
    assert (found.algorithm, found.data, found.private) == ("dp_fedavg", "blobs", True)
    assert found.accuracy == summary["accuracy"]
    assert found.epsilon == summary["privacy"]["views"]["models"]["epsilon"]
    assert found.plain()["path"] == str(finished)


def test_a_run_that_is_not_private_has_no_epsilon(
    blobs: Federated, plain_recipe: Recipe, tmp_path: Path
) -> None:
    train(plain_recipe, blobs, rounds=1, save=tmp_path / "a")
    found = listed(tmp_path / "a")
    assert (found.private, found.epsilon, found.state) == (False, None, "finished")


@dataclass(frozen=True)
class Probed(ProbedClip):
    """A user's own clip, whose threshold was taken from the data."""


def test_a_user_s_probed_threshold_is_marked(blobs: Federated, tmp_path: Path) -> None:
    """Its class is not imported: the saved statement says it."""
    for name, bound in (("probed", Probed(norm=1.0)), ("clip", Clip(1.0))):
        train(replace(PRIVATE, bound=bound), blobs, rounds=1, save=tmp_path / name)
    assert (listed(tmp_path / "probed").leaks, listed(tmp_path / "clip").leaks) == (True, False)


def test_a_run_that_was_stopped(finished: Path) -> None:
    (finished / "summary.json").unlink()
    found = listed(finished)
    assert (found.state, found.rounds, found.planned) == ("stopped", 3, 3)
    assert found.accuracy is not None
    assert found.epsilon is not None
    (finished / "metrics.parquet").unlink()
    (finished / "checkpoint.safetensors").unlink()
    assert (listed(finished).state, listed(finished).rounds) == ("stopped", 0)


def test_an_unfinished_run_is_listed_with_what_its_plan_costs_or_with_nothing(
    blobs: Federated, tmp_path: Path
) -> None:
    train(PRIVATE, blobs, rounds=4, evaluate_every=3, checkpoint_every=1, save=tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    directory = RunDirectory.open(tmp_path / "a")
    rows = SavedRun(directory.path).rows
    planned = rows[-1]["epsilon"]
    assert listed(tmp_path / "a").epsilon == planned
    rows[-1] |= {"loss": None, "accuracy": None, "epsilon": None, "epsilon_planned": None}
    directory.save_metrics(rows)  # as if it had been stopped before the last evaluation
    found = listed(tmp_path / "a")
    assert rows[2]["epsilon"] < planned
    assert (found.rounds, found.epsilon, found.untold) == (4, planned, False)
    assert found.accuracy == rows[2]["accuracy"]
    old = [{k: v for k, v in row.items() if k != "epsilon_planned"} for row in rows]
    directory.save_metrics(old)  # as versions before 0.2 did
    assert (listed(tmp_path / "a").epsilon, listed(tmp_path / "a").untold) == (None, True)


def test_drawn_runs_of_a_private_selection_are_not_found(finished: Path) -> None:
    hidden = finished.parent / "c" / "out-of-sight" / "draw-0"
    shutil.copytree(finished, hidden)
    assert find_runs([finished.parent / "c"]) == []
    assert find_runs([finished.parent]) == [finished]


@pytest.mark.parametrize("name", ["recipe.toml", "summary.json"])
def test_a_half_written_run_is_broken_and_says_where(finished: Path, name: str) -> None:
    file = finished / name
    file.write_bytes(file.read_bytes()[:40])
    found = listed(finished)
    assert found.state == "broken"
    assert found.problem.startswith(f"{file} is damaged")


def test_a_run_of_a_newer_version_is_broken(finished: Path) -> None:
    file = finished / "recipe.toml"
    plain = tomllib.loads(file.read_text())
    file.write_text(tomli_w.dumps({**plain, "fedveil": "7.1.dev2"}))
    found = listed(finished)
    assert found.state == "broken"
    assert "written by fedveil 7.1.dev2, which is newer than the installed" in found.problem
    for version in (None, "0.0.9", "0.1.0", "nonsense"):
        refuse_newer(file, version)


def test_what_is_no_run_is_not_found(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "b.txt").write_text("no run")
    (tmp_path / "runs" / "link").symlink_to(finished)
    assert find_runs([tmp_path / "runs"]) == [finished]
    assert find_runs([finished, tmp_path / "runs"]) == [finished]
    assert find_runs([tmp_path]) == [finished]
    with pytest.raises(UserError, match="is not a directory"):
        find_runs([tmp_path / "nowhere"])
    assert "is not a run" in listed(tmp_path / "runs" / "notes").problem


def test_removing_leaves_nothing_of_the_run_and_everything_else(finished: Path) -> None:
    (finished / "thoughts.md").write_text("mine")
    (finished / "plots").mkdir()
    (finished / "memory-3.npy").write_bytes(b"")
    assert remove_run(finished) == ["plots", "thoughts.md"]
    assert (finished / "thoughts.md").read_text() == "mine"
    assert not listed(finished).rounds


def test_removing_a_run_alone_removes_its_directory(finished: Path) -> None:
    assert remove_run(finished) == []
    assert not finished.exists()


def test_what_is_no_run_is_not_removed(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(UserError, match="is not a run"):
        remove_run(tmp_path / "precious")
    assert (tmp_path / "precious" / "model.safetensors").exists()
    (tmp_path / "link").symlink_to(finished)
    with pytest.raises(UserError, match="is a symbolic link"):
        remove_run(tmp_path / "link")
    assert listed(finished).state == "finished"


def test_a_run_at_work_is_not_removed(finished: Path) -> None:
    working = RunDirectory.open(finished)
    working.claim()
    with pytest.raises(UserError, match="is in use by another process"):
        remove_run(finished)
    working.release()
    assert listed(finished).state == "finished"
