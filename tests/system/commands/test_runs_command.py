"""`fedveil runs`: listed, filtered, removed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.commands import comparison_table as table
from fedveil.commands import progress
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import Ledger
from fedveil.training.start import train
from tests.conftest import Outcome, Run

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def some(blobs: Federated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run, one that is not private, one that was stopped and one that is broken."""
    place = tmp_path_factory.mktemp("some") / "runs"
    private = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
    train(private, blobs, rounds=2, save=place / "a")
    train(algorithms.fedavg(steps=2, learning_rate=0.5), blobs, rounds=2, save=place / "b")
    shutil.copytree(place / "a", place / "compared" / "c")
    (place / "compared" / "c" / "summary.json").unlink()
    shutil.copytree(place / "a", place / "d")
    (place / "d" / "summary.json").write_text("{")
    return place


@pytest.fixture
def runs(some: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    recorded = json.loads((some / "a" / "ledger.json").read_bytes())["path"]
    monkeypatch.setenv("FEDVEIL_LEDGER", recorded)
    shutil.copytree(some, tmp_path / "runs")
    return tmp_path / "runs"


def well(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    return outcome.out


def names(run: Run, *flags: object) -> list[str]:
    return [Path(row["path"]).name for row in json.loads(well(run("runs", *flags, "--json")))]


def test_all_are_listed_with_their_state(run: Run, runs: Path) -> None:
    out = well(run("runs"))
    rows = {line.split()[0]: line for line in out.splitlines() if "runs/" in line}
    assert re.search(r"dp_fedavg +blobs +2/2 +\d+\.\d+% +\d\S* +finished", rows["runs/a"])
    assert re.search(r"fedavg +blobs +2/2 +\d+\.\d+% +not private +finished", rows["runs/b"])
    assert re.search(r"dp_fedavg +2/2 +\d+\.\d+% +\d\S* +stopped", rows["runs/compared/c"])
    assert rows["runs/d"].split() == ["runs/d", "broken"]
    assert "Broken       runs/d/summary.json is damaged" in out


def test_a_stopped_run_without_its_ledger_is_marked(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_LEDGER", str(runs / "elsewhere.sqlite"))
    out = well(run("runs"))
    rows = {line.split()[0]: line for line in out.splitlines() if "runs/" in line}
    assert " ≥ " in rows["runs/compared/c"]
    assert " ≥ " not in rows["runs/a"]
    assert "its ledger was not found or does not match" in " ".join(out.split())
    assert names(run, "--max-epsilon", 1000) == ["a"]


def test_filters(run: Run, runs: Path) -> None:
    assert names(run) == ["a", "b", "c", "d"]
    assert names(run, "--algorithm", "fedavg") == ["b"]
    assert names(run, "--data", "blobs") == ["a", "b"]
    assert names(run, "--data", "mnist") == []
    assert names(run, "--state", "stopped") == ["c"]
    assert names(run, "--state", "broken") == ["d"]
    spent = json.loads(well(run("runs", "runs/a", "--json")))[0]["epsilon"]
    assert names(run, "--max-epsilon", spent) == ["a", "c"]
    assert names(run, "--max-epsilon", spent / 2) == []
    assert names(run, "--min-accuracy", 0) == ["a", "b", "c"]
    assert names(run, "--min-accuracy", 1) == []
    assert names(run, "runs/compared") == ["c"]


def test_where_there_is_nothing_it_says_so(run: Run, tmp_path: Path) -> None:
    assert well(run("runs")) == "No runs found.\n"


def test_where_nothing_fits_it_says_so(run: Run, runs: Path) -> None:
    out = well(run("runs", "--algorithm", "dp_sgd"))
    assert out == "None of the 4 runs here matches.\n"


@pytest.mark.parametrize("answer", ["", "n\n", "no\n", "\n"])
def test_removing_asks_and_takes_no_for_an_answer(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    outcome = run("runs", "runs/a", "--remove")
    assert outcome.code == 1
    assert "Delete this run?" in outcome.out + outcome.err
    assert (runs / "a" / "summary.json").exists()


def test_removing_gives_no_epsilon_back_and_says_so(run: Run, runs: Path, ledger: Path) -> None:
    small = ("--dataset", "digits", "--clients", 20, "--noise-multiplier", 9.0, "--rounds", 1)
    well(run("train", "--algorithm", "fed_alpha_normec", *small, "--out", "runs/e"))
    before = Ledger(ledger).head
    out = well(run("runs", "runs/e", "runs/b", "--remove", "--yes"))
    assert "Deleted runs/e." in out
    assert "does not refund their privacy spending: the ledger still counts it." in out
    assert not (runs / "e").exists()
    assert not (runs / "b").exists()
    assert (runs / "a").exists()
    assert Ledger(ledger).head == before


def test_removing_what_is_not_private_speaks_of_no_epsilon(run: Run, runs: Path) -> None:
    assert "refund" not in well(run("runs", "runs/b", "--remove", "--yes"))


def test_what_is_not_a_run_s_is_left(run: Run, runs: Path) -> None:
    (runs / "a" / "thesis.tex").write_text("years of work")
    out = well(run("runs", "--algorithm", "dp_fedavg", "--state", "finished", "--remove", "--yes"))
    assert "Deleted runs/a; kept files that are not part of a run: thesis.tex." in out
    assert (runs / "a" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("nowhere",), "nowhere is not a directory"),
        (("--state", "done"), "There is no state 'done'"),
        (("--min-accuracy", 80), "it must be between 0 and 1"),
        (("--max-epsilon", 0), "it must be above 0"),
        (("--remove", "--json"), "Pass one"),
    ],
)
def test_bad_input_is_one_sentence(
    refused: Refused, flags: tuple[object, ...], problem: str
) -> None:
    assert problem in refused("runs", *flags)


@pytest.mark.parametrize(
    ("columns", "heads"),
    [(140, ("algorithm", "data")), (95, ("algorithm",)), (83, ()), (44, None)],
)
def test_names_are_whole_however_narrow_the_terminal(
    run: Run, some: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    columns: int, heads: tuple[str, ...] | None,
) -> None:  # fmt: skip
    name = "comparisons/dp_norm_fedavg-rate=0.5-s0"
    shutil.copytree(some / "a", tmp_path / name)
    monkeypatch.setenv("COLUMNS", str(columns))
    for module in (progress, table):
        monkeypatch.setattr(module, "plain_output", lambda: False)
    lines = well(run("runs", name)).splitlines()
    assert any(name in line.split() for line in lines)
    assert all(len(line.rstrip()) <= columns for line in lines)
    told = next((line for line in lines if "rounds" in line), None)
    assert (told is None) == (heads is None)
    assert any("finished" in line for line in lines)
    assert {h for h in ("algorithm", "data") if told and h in told} == set(heads or ())


@pytest.mark.parametrize("name", ["metrics.parquet", "model.safetensors"])
@pytest.mark.parametrize("left", [None, 60])
def test_a_run_that_lost_something_is_broken(
    run: Run, refused: Refused, runs: Path, name: str, left: int | None
) -> None:
    file = runs / "a" / name
    if left is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:left])
    assert "a" in names(run, "--state", "broken")
    if name == "metrics.parquet" and left is None:
        assert refused("diagnose", "runs/a") == refused("report", "runs/a")
        assert "so the run is incomplete" in refused("diagnose", "runs/a")


@pytest.mark.parametrize("name", ["recipe.toml", "summary.json"])
def test_a_run_of_a_newer_version_is_refused_everywhere_in_one_way(
    run: Run, refused: Refused, runs: Path, name: str
) -> None:
    file = runs / "a" / name
    changed = re.sub(r'("?fedveil"? ?[=:] )"[^"]+"', r'\1"9.8.7"', file.read_text())
    assert "9.8.7" in changed
    file.write_text(changed)
    said = {refused(*c) for c in (("privacy", "runs/a"), ("diagnose", "runs/a"))}
    said |= {refused("report", "runs/a"), refused("compare", "runs/a", "runs/b")}
    if name == "recipe.toml":
        said |= {refused("train", "--resume", "runs/a"), refused("train", "runs/a/recipe.toml")}
        said |= {refused("compare", "runs/a/recipe.toml"), refused("audit", "runs/a")}
        said |= {refused("budget", "set", "runs/a", "--epsilon", 3)}
    (one,) = said
    assert f"{name} was written by fedveil 9.8.7, which is newer than the installed" in one


def test_an_epsilon_that_does_not_cover_the_threshold_is_marked(run: Run) -> None:
    flags = ("--dataset", "digits", "--clients", 20, "--rounds", 1, "--noise-multiplier", 2.0)
    for clip in ("probe", "1.0"):
        probing = ("--algorithm", "dp_fedavg", "--set", f"clip={clip}", "--set", "rate=0.5")
        well(run("train", *probing, *flags, "--out", f"runs/{clip}"))
    lines = {line.split()[0]: line for line in well(run("runs")).splitlines() if "runs/" in line}
    assert " + leak " in lines["runs/probe"]
    assert "leak" not in lines["runs/1.0"]
