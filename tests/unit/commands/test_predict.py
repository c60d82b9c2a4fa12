"""`fedveil predict` and `fedveil export` on a run of a table."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from fedveil.algorithms import fedavg
from fedveil.data.partition import ByKey
from fedveil.data.table import load_table
from fedveil.errors import UserError
from fedveil.runs.opened import open_run
from fedveil.training.start import train
from tests.conftest import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and the run "a" on it, which nobody changes."""
    place = tmp_path_factory.mktemp("trained")
    ages = [20 + (7 * i) % 60 for i in range(80)]
    rows = {"who": [f"p{i % 8}" for i in range(80)], "age": ages}
    pl.DataFrame({**rows, "old": ["yes" if age > 50 else "no" for age in ages]}).write_csv(
        place / "ages.csv"
    )
    data = load_table(place / "ages.csv", "who", "old", classes=("no", "yes")).split(ByKey())
    train(fedavg(learning_rate=1.0, steps=10), data, rounds=20, save=place / "a")
    return place


@pytest.fixture
def table(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "ages.csv"


def test_every_row_gets_its_prediction(table: Path, run: Run, tmp_path: Path) -> None:
    outcome = run("predict", "a", table, "--probabilities", "--out", "found.parquet")
    assert outcome.code == 0, outcome
    found = pl.read_parquet(tmp_path / "found.parquet")
    assert found.columns == ["old", "probability of no", "probability of yes"]
    assert found["old"].to_list() == open_run(tmp_path / "a").predict(table)
    right = (found["old"] == pl.read_csv(table)["old"]).mean()
    assert isinstance(right, float)
    assert right > 0.8


def test_an_alert_rate_answers_for_the_rows_that_rank_first(table: Path, run: Run) -> None:
    opened = open_run(table.parent / "a")
    shares = opened.probabilities(table)[:, 1]
    outcome = run("predict", "a", table, "--alert-rate", 0.1)
    assert outcome.code == 0, outcome
    answers = outcome.out.splitlines()[1:]
    top = shares.sort(descending=True).values[7]
    assert answers == ["yes" if share >= top else "no" for share in shares]
    assert f"Threshold used: {float(top):.6g}" in outcome.err
    assert opened.predict(table, threshold=0.0) == ["yes"] * 80
    assert opened.predict(table, alert_rate=1.0) == ["yes"] * 80
    for wrong in ({"threshold": 0.5, "alert_rate": 0.5}, {"alert_rate": 2}, {"threshold": "x"}):
        with pytest.raises(UserError, match="Give"):
            opened.predict(table, **wrong)  # type: ignore[arg-type]


def test_without_a_file_the_rows_are_printed(table: Path, run: Run) -> None:
    lines = run("predict", "a", table).out.splitlines()
    assert lines[0] == "old"
    assert len(lines) == 81


def test_what_cannot_be_predicted_is_one_sentence(
    table: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "exists" in refused("predict", "a", table, "--out", "ages.csv")
    pl.DataFrame({"height": [1]}).write_csv(tmp_path / "other.csv")
    assert "no column 'age'" in refused("predict", "a", "other.csv")
    assert "Pass --onnx FILE" in refused("export", "a")


def test_the_command_line_is_told_of_flags_and_python_of_arguments(
    table: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.toml").write_bytes((tmp_path / "a" / "recipe.toml").read_bytes())
    assert "`fedveil train --resume b`" in refused("predict", "b", table)
    with pytest.raises(UserError, match=r"fedveil\.resume\('b'\)"):
        open_run("b")


def test_export_says_how_closely_outputs_agree(table: Path, run: Run, tmp_path: Path) -> None:
    outcome = run("export", "a", "--torchscript", "m.pt")
    assert outcome.code == 0, outcome
    assert "largest difference of outputs" in outcome.out
    assert (tmp_path / "m.pt").is_file()
