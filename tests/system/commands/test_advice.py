"""Sentences that say what to do instead: each for a mistake that people have made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.ledger.session import RELEASED_BEFORE, Session
from fedveil.planning import plan as planning
from fedveil.planning.facts import SizeOptions
from fedveil.training.settings import read_settings
from fedveil.training.start import train
from tests.conftest import Run

Refused = Callable[..., str]


def test_a_misspelt_command_is_corrected_once(run: Run) -> None:
    assert run("trian").err.count("Did you mean") == 1
    assert run("budget", "shwo").err.count("Did you mean") == 1


def test_a_comparison_of_nothing(refused: Refused) -> None:
    assert "Pass --algorithms, settings files or runs" in refused("compare")


def test_what_is_no_settings_file_is_told_its_flag(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "eng").mkdir()
    assert "data as `--path eng`" in refused("train", "eng")
    (tmp_path / "eng" / "recipe.toml").write_text("")
    said = refused("train", "eng")
    assert "`fedveil train --resume eng`" in said
    assert "eng/recipe.toml" in said
    assert "--path mine.csv" in refused("train", "mine.csv")
    assert "--path mine.csv" in refused("plan", "mine.csv")


def test_a_run_that_is_not_there(refused: Refused) -> None:
    assert refused("diagnose", "nope") == "There is no directory nope. Name the directory of a run."


def test_a_misspelt_setting_of_the_data(refused: Refused) -> None:
    assert "Did you mean 'alpha'?" in refused("train", "--dataset", "digits", "--data", "alpa=2")


def test_an_adapter_that_needs_flower(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    (tmp_path / "adapter.py").write_text("import flwr\n")
    assert "Install it with `pip install 'fedveil[federation]'`" in refused("conform", "adapter.py")


def test_a_table_is_described(run: Run, refused: Refused, table: Path) -> None:
    assert "also give --client (the column that identifies the client) and --label" in refused(
        "datasets", table
    )
    told = run("datasets", table, "--client", "who", "--label", "y")
    assert told.code == 0, told
    assert "8 clients" in told.out
    (table.parent / "note.pdf").write_text("")
    assert "nor a directory written by fedveil.save_federated" in refused("datasets", "note.pdf")


def test_the_note_about_ranges_is_a_flag_that_works(run: Run, table: Path) -> None:
    flags = ("train", "--path", table, "--client", "who", "--label", "y", "--rounds", 1)
    flags += ("--algorithm", "fedavg", "--set", "steps=1")
    said = run(*flags, "--out", "one").out
    assert "ranges or categories: --data ranges='{x=[0,100]}' or --data categories=" in said
    assert "If they are public, declare them: --data classes=no,yes" in said
    ranges = 'ranges={x=[-4,4],"[bold]"=[-4,4]}'
    classes = ("--data", "classes=no,yes")
    again = run(*flags, "--data", ranges, *classes, "--out", "two")
    assert again.code == 0, again
    assert "fixed public bins" not in again.out
    assert "read from the data" not in again.out
    assert run(*flags, "--data", 'categories={x=["a","b"]}', "--out", "three").code == 0


def test_an_unsaved_run_names_no_files_of_its_own(blobs: Federated) -> None:
    result = train(algorithms.dp_fedavg(noise_multiplier=3.0, steps=1), blobs, rounds=1)
    assert "in Python, result.records" in result.statement.text()


def test_the_noise_found_is_the_noise_told(run: Run) -> None:
    said = run("privacy", "--epsilon", 0.5, "--rate", 0.2, "--rounds", 2000, "--delta", 1e-5).out
    found = said.partition("noise multiplier = ")[2].split()[0]
    assert f"with noise multiplier {found} on" in said
    assert "2,000 rounds" in said


def test_a_run_that_comes_out_otherwise_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("train", "--algorithm", "dp_fedavg", "--noise-multiplier", 2, "--set", "steps=1")
    flags += ("--dataset", "digits", "--clients", 20, "--rounds", 3)
    assert RELEASED_BEFORE not in run(*flags, "--out", "one").out
    commit = Session.commit
    monkeypatch.setattr(Session, "commit", lambda s, r, digest: commit(s, r, digest[::-1]))
    assert f"Note         {RELEASED_BEFORE}" in run(*flags, "--out", "two").out
    problem = run("budget", "verify").out
    assert "rounds 1–3 were released in two versions with the same noise, by the runs of" in problem
    assert "train the other again with another seed" in problem


def test_a_sweep_counts_and_leaves_out_what_cannot_be(run: Run) -> None:
    asked = {"parameters": {"clients": 600}, "epsilon": 5.0, "data": {"clients": 3000}}
    settings = read_settings(None, {"algorithm": "dp_fedavg", **asked})
    made = planning.make(settings, planning.PlanOptions(SizeOptions(100, None, None, None, None)))
    sweep, heard = planning.sweep_of(made.case, "cohort=300,4800"), []
    found = planning.swept(made.case, [sweep], lambda number, of: heard.append((number, of)))
    assert heard == [(1, 2), (2, 2)]
    assert found[1] == [None]
    flags = ("plan", "--algorithm", "dp_fedavg", "--clients", 3000, "--cohort", 600, "--dim", 100)
    said = run(*flags, "--epsilon", 5, "--sweep", "cohort=300,4800").out
    assert "300" in said
    assert "4,800" not in said
    shown = run(*flags, "--epsilon", 5).out
    assert re.search(r"^signal-to-noise ratio: .*\nper round \(over the run\)", shown, re.M)
