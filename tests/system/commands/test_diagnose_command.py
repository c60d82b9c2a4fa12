"""`fedveil diagnose RUN`: what is said of a run, and of what is not one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.diagnosis.diagnose import RULES, diagnose
from fedveil.diagnosis.run import DiagnosedRun, read
from fedveil.runs.directory import RunDirectory
from fedveil.training.start import train
from tests.conftest import Run

Refused = Callable[..., str]
SMALL = algorithms.clipped_fedavg(clip=0.01, learning_rate=0.5, steps=2)
LINE = (
    "clipped_fedavg: 12 rounds, 100% of updates clipped, mean cosine to the previous global update"
)


@pytest.fixture
def saved(blobs: Federated, tmp_path: Path) -> Path:
    train(SMALL, blobs, rounds=12, evaluate_every=6, save=tmp_path / "small")
    return tmp_path / "small"


def test_evidence_and_advice_are_sentences(run: Run, saved: Path) -> None:
    lines = run("diagnose", saved).out.splitlines()
    assert lines[0].startswith(f"Run          {LINE}")
    assert lines[1].startswith("Problem      100% of updates are clipped at C = 0.01. The median ")
    assert lines[2].startswith("  try        Raise C to ")
    assert lines[3].startswith("  flags      --set clip=")
    assert all(line.endswith(".") for line in lines[:3])
    assert lines[4:] == [f"Next         fedveil report {saved}   an HTML report of the run"]


def test_a_change_can_be_typed_where_the_run_names_its_data(run: Run, tmp_path: Path) -> None:
    flags = ("--dataset", "digits", "--clients", 20, "--rounds", 9, "--set", "clip=0.001")
    assert run("train", "--algorithm", "clipped_fedavg", *flags, "--out", "a").code == 0
    told = run("diagnose", "a").out
    (change,) = re.findall(
        r"^Next +fedveil (train .*)   the same run with that change$", told, re.M
    )
    assert run(*change.split(), "--out", "b").code == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["rounds"] == 9


def test_as_json(run: Run, saved: Path) -> None:
    plain = json.loads(run("diagnose", saved, "--json").out)
    (finding,) = plain["findings"]
    assert finding["rule"] == "C too small"
    assert finding["numbers"]["clip"] == 0.01
    assert finding["numbers"]["clipped"] == 1.0
    assert plain["diagnostics"] is True
    assert plain["unjudged"] == []
    assert plain["leak"] is None  # no privacy is promised here


def test_following_advice_about_a_private_run_leaks_and_it_says_so(
    run: Run, blobs: Federated, tmp_path: Path
) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
    train(recipe, blobs, rounds=9, save=tmp_path / "private")
    told = run("diagnose", tmp_path / "private").out
    assert "\nPrivacy      These findings were read from private data without noise" in told
    assert (
        "that no ε covers"
        in json.loads(run("diagnose", tmp_path / "private", "--json").out)["leak"]
    )


def test_when_nothing_is_wrong_it_says_that(run: Run, blobs: Federated, tmp_path: Path) -> None:
    recipe = algorithms.fedavg(learning_rate=0.5, steps=2)
    train(recipe, blobs, rounds=12, save=tmp_path / "fine")
    told = run("diagnose", tmp_path / "fine").out
    assert "\nHealthy      No problems found.\n" in told


def test_without_diagnostics_it_says_what_it_can(
    run: Run, blobs: Federated, tmp_path: Path
) -> None:
    train(SMALL, blobs, rounds=12, save=tmp_path / "bare", diagnostics=False)
    out = run("diagnose", tmp_path / "bare").out
    assert "100% of updates are clipped at C = 0.01. The median norm is " in out
    assert "Not judged   clipping bias, C too large" in out
    assert "were not recorded. Train with --diagnostics" in out
    unjudged = diagnose(tmp_path / "bare").unjudged
    assert "C too small" not in unjudged
    assert {"clients disagree", "steps too long", "clipping bias"} <= set(unjudged)


def test_a_run_that_was_stopped_can_be_diagnosed(run: Run, saved: Path) -> None:
    (saved / "summary.json").unlink()
    assert "100% of updates are clipped" in run("diagnose", saved).out
    (saved / "clients.parquet").unlink()
    assert "100% of updates are clipped" in run("diagnose", saved).out


def test_what_is_no_run(refused: Refused, saved: Path, tmp_path: Path) -> None:
    assert refused("diagnose", tmp_path).endswith(
        "is not a run, because it has no recipe.toml. Name the directory of a run."
    )
    assert "There is no directory" in refused("diagnose", tmp_path / "nowhere")
    metrics = saved / "metrics.parquet"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[:100])
    assert "metrics.parquet is damaged" in refused("diagnose", saved)
    pl.DataFrame({"x": [1]}).write_parquet(metrics)
    assert "it lacks columns of a run's metrics" in refused("diagnose", saved)
    metrics.write_bytes(whole)
    (saved / "clients.parquet").write_bytes(b"PAR1")
    assert "clients.parquet is damaged" in refused("diagnose", saved)


def test_a_run_without_rounds(refused: Refused, saved: Path) -> None:
    RunDirectory.open(saved).save_metrics([])
    sentence = refused("diagnose", saved)
    assert "has no rounds yet, so there is nothing to diagnose. Resume it with" in sentence
    for name in ("metrics.parquet", "summary.json", "checkpoint.safetensors"):
        (saved / name).unlink(missing_ok=True)
    assert refused("diagnose", saved) == sentence


def test_a_run_of_a_newer_version(refused: Refused, saved: Path) -> None:
    file = saved / "recipe.toml"
    lines = file.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("fedveil")]
    file.write_text("\n".join(['fedveil = "99.1"', "unheard_of = 3", *kept]))
    assert "was written by fedveil 99.1, which is newer than the installed" in refused(
        "diagnose", saved
    )
    file.write_text("\n".join(["fedveil = [", *kept]))
    assert "recipe.toml" in refused("diagnose", saved)


def made(rows: list[dict[str, object]], **more: object) -> DiagnosedRun:
    base: dict[str, object] = {
        "participants": 10,
        "rejected": 0,
        "clipped_fraction": 0.0,
        "norm": 1.0,
    }
    rows = [{"round": k + 1, **base, **row} for k, row in enumerate(rows)]
    return DiagnosedRun(Path("made"), algorithms.fedavg(), rows, **more)  # type: ignore[arg-type]


def test_every_rule_keeps_silent_on_a_single_round_and_on_holes() -> None:
    quiet: dict[str, object] = {"signal": 1.0, "noise": 0.0}
    assert diagnose(made([quiet])).findings == ()
    holes: list[dict[str, object]] = [{**quiet, "loss": None, "cosine": None}] * 9
    assert diagnose(made(holes)).findings == ()
    aborted: dict[str, object] = {"signal": 0.0, "noise": 0.0, "participants": 3, "aborted": True}
    assert [f.rule for f in diagnose(made([aborted] * 4)).wrong] == ["aborted rounds"]


def test_a_loss_that_is_not_finite_is_divergence() -> None:
    quiet: dict[str, object] = {"signal": 1.0, "noise": 0.0}
    losses = [2.0, 1.0, np.nan]
    (finding,) = diagnose(made([{**quiet, "loss": loss} for loss in losses])).wrong
    assert finding.rule == "diverging"
    assert (
        "its minimum was 1 after round 2, and it ended at a value that is not finite"
        in finding.evidence
    )
    overconfident = [{**quiet, "loss": loss, "accuracy": 0.9} for loss in (0.2, 0.5)]
    assert diagnose(made(overconfident)).wrong == ()


def test_cosines_are_freed_from_noise() -> None:
    """Half of a last update's length squared is noise: what was 45° away looks like 60°."""
    row: dict[str, object] = {"signal": 1.0, "noise": 1.0, "cosine": 0.5}
    assert made([row] * 4).cosine("late") == pytest.approx(0.5 * 2**0.5)


def test_a_saved_run_is_read_as_it_was_trained(saved: Path, blobs: Federated) -> None:
    found = read(saved)
    assert found.recipe == SMALL
    assert (found.rounds, found.population, found.planned) == (12, blobs.clients, 12)
    assert found.clients is not None
    norms = found.clients.filter(pl.col("round") > 6)["norm"].to_numpy()
    assert found.quantile(0.5) == pytest.approx(float(np.median(norms)))
    assert found.clip == found.reach == 0.01
    assert found.bounded() == pytest.approx(0.01, rel=1e-5)


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
