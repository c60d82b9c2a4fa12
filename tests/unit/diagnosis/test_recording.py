"""A run's recorded diagnostics: in which runs, how they go on, and what they cost in memory."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.data.problems import QuadraticProblem, heterogeneous_quadratic, zhang2022_table4
from fedveil.errors import UserError
from fedveil.runs import participants
from fedveil.runs.directory import RunDirectory
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, start, train
from tests.conftest import Run

RECIPE = algorithms.clipped_fedavg(clip=0.2, clients=5, learning_rate=0.5, steps=2, batch=3)
DIAGNOSTIC = {
    *("norm_median", "norm_deviation", "cosine", "bias_own", "bias_shared", "incremental_norm"),
    *("second_moment", "memory_error", "heterogeneity", "distance", "position_0", "position_1"),
    *("along", "across"),
}

TABLE = ("--path", "people.csv", "--client", "who", "--label", "y", "--data", "classes=no,yes")


def metrics(path: Path) -> pl.DataFrame:
    return pl.read_parquet(path / "metrics.parquet").drop("seconds")


def test_a_row_for_each_participant_and_columns_for_each_round(
    blobs: Federated, tmp_path: Path
) -> None:
    result = train(RECIPE, blobs, rounds=6, save=tmp_path / "run", evaluate_every=4)
    rows = pl.read_parquet(tmp_path / "run" / "clients.parquet")
    kinds = [pl.Int32, pl.Int32, *[pl.Float32] * 4]
    names = ["round", "client", "norm", "scale", "cosine", "memory_error"]
    assert dict(rows.schema) == dict(zip(names, kinds, strict=True))
    assert rows["round"].to_list() == sorted([*range(1, 7)] * 5)
    for record in result.records:
        mine = rows.filter(pl.col("round") == record.round)
        assert mine["client"].is_sorted()
        assert mine["client"].n_unique() == record.participants == 5
        assert mine["norm"].mean() == pytest.approx(record.norm, rel=1e-5)
        assert (mine["scale"] < 1).mean() == record.clipped_fraction
        assert mine["cosine"].null_count() == (5 if record.round == 1 else 0)
        assert mine["memory_error"].null_count() == 5
    table = metrics(tmp_path / "run")
    assert set(table.columns) >= DIAGNOSTIC
    assert table["norm_median"].null_count() == 0
    assert table["bias_own"].is_not_null().to_list() == [True, *[False] * 3, True, False]


def test_off_means_nothing_is_there_and_the_model_is_the_same(
    blobs: Federated, tmp_path: Path
) -> None:
    train(RECIPE, blobs, rounds=4, save=tmp_path / "on")
    train(RECIPE, blobs, rounds=4, save=tmp_path / "off", diagnostics=False)
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("on", "off")]
    assert models[0] == models[1]
    assert not (tmp_path / "off" / "clients.parquet").exists()
    table = metrics(tmp_path / "off")
    assert all(table[name].null_count() == 4 for name in DIAGNOSTIC)
    shared = [name for name in table.columns if name not in DIAGNOSTIC]
    assert_frame_equal(table[shared], metrics(tmp_path / "on")[shared])


def test_secure_runs_record_only_when_told_to(blobs: Federated, tmp_path: Path) -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, steps=1, noise_multiplier=1.0)
    told: list[tuple[str, bool | None]] = [("unsaid", None), ("on", True)]
    for name, diagnostics in told:
        path = tmp_path / name
        train(recipe, blobs, rounds=2, save=path, noise="secure", diagnostics=diagnostics)
    said = {name: (tmp_path / name / "privacy.txt").read_text() for name, _ in told}
    assert not (tmp_path / "unsaid" / "clients.parquet").exists()
    assert "Diagnostics Not recorded." in said["unsaid"]
    assert (tmp_path / "on" / "clients.parquet").exists()
    assert "Diagnostics Recorded: the norm and angle" in said["on"]
    assert "These are private data: no ε covers them." in said["on"]
    summary = json.loads((tmp_path / "unsaid" / "summary.json").read_text())
    assert summary["privacy"]["diagnostics"] is False


def test_the_flag_and_the_statement_of_a_saved_run(run: Run, table: Path) -> None:
    flags = (*TABLE, "--rounds", 2, "--noise-multiplier", 1, "--set", "steps=1")
    assert run("train", *flags, "--out", "on").code == 0
    assert run("train", *flags, "--out", "off", "--no-diagnostics").code == 0
    assert "Diagnostics  Recorded" in run("privacy", "on").out
    assert "Diagnostics  Not recorded." in run("privacy", "off").out
    assert "diagnostics = false" in Path("off/recipe.toml").read_text()
    assert "diagnostics" not in Path("on/recipe.toml").read_text()


def stopped(data: Federated, path: Path, rounds: int) -> Training:
    """A run that ends after so many rounds, as a killed one does: no checkpoint of the last."""
    training = start(prepare(RECIPE, data, rounds=9, checkpoint_every=3), path)

    def watch(training: Training, record: object) -> None:
        if training.state.round == rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(training, watch)
    return training


@pytest.mark.parametrize("crowd", [2**20, 8])
def test_a_resumed_run_has_every_row_once(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowd: int
) -> None:
    """Also when rows were written ahead of the checkpoint, since memory was full."""
    train(RECIPE, blobs, rounds=9, save=tmp_path / "whole", checkpoint_every=3)
    monkeypatch.setattr(participants, "MOST", crowd)
    training = stopped(blobs, tmp_path / "stopped", 5)
    assert len(training.participants) <= crowd
    ahead = pl.read_parquet(tmp_path / "stopped" / "clients.parquet")["round"].max()
    assert ahead == (3 if crowd > 100 else 4)
    again = prepare(RECIPE, blobs, rounds=9, checkpoint_every=3)
    finish(resume(again, tmp_path / "stopped"))
    assert_frame_equal(metrics(tmp_path / "stopped"), metrics(tmp_path / "whole"))
    rows = [pl.read_parquet(tmp_path / name / "clients.parquet") for name in ("stopped", "whole")]
    assert_frame_equal(*rows)


def test_a_run_whose_rows_cannot_be_read_does_not_go_on(blobs: Federated, tmp_path: Path) -> None:
    stopped(blobs, tmp_path / "run", 4)
    (tmp_path / "run" / "clients.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"clients\.parquet is damaged"):
        resume(prepare(RECIPE, blobs, rounds=9), tmp_path / "run")


def test_memory_is_bounded_where_nothing_is_saved(
    blobs: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "MOST", 12)
    training = prepare(RECIPE, blobs, rounds=9)
    finish(training)
    assert len(training.participants) == 10
    assert training.participants.table()["round"].unique().to_list() == [8, 9]


def test_large_runs_stay_small_on_disk(tmp_path: Path) -> None:
    from fedveil.engines.seen import Seen

    directory = RunDirectory.create(tmp_path / "run")
    rng = torch.Generator().manual_seed(0)
    kept = participants.ParticipantRows()
    for round in range(1, 201):
        numbers = torch.rand(3, 600, generator=rng).double()
        clients = torch.randperm(3000, generator=rng)[:600].sort().values.numpy()
        kept.add(round, Seen(clients, *numbers))
        if round % 50 == 0:
            kept.save(directory)
            assert len(kept) == 0
    file = tmp_path / "run" / "clients.parquet"
    assert file.stat().st_size < 3e6
    assert pl.read_parquet(file)["round"].to_list() == sorted([*range(1, 201)] * 600)


def test_rejected_updates_have_a_row_without_a_norm(blobs: Federated, tmp_path: Path) -> None:
    inputs = blobs.inputs[:].clone()
    inputs[: int(blobs.offsets[1])] = 1e38
    from dataclasses import replace

    data = replace(blobs, inputs=inputs)
    recipe = algorithms.clipped_fedavg(clip=0.2, learning_rate=0.5, steps=3)
    result = train(recipe, data, rounds=2, save=tmp_path / "run")
    assert [record.rejected for record in result.records] == [1, 1]
    rows = pl.read_parquet(tmp_path / "run" / "clients.parquet")
    lost = rows.filter(pl.col("norm").is_null())
    assert lost["client"].to_list() == [0, 0]
    assert lost["scale"].to_list() == [0.0, 0.0]
    assert result.records[1].norm_median is not None


def distance_of(problem: QuadraticProblem, x: torch.Tensor) -> float:
    return float((x.double() - problem.optimum).norm())


def test_distance_and_heterogeneity_where_the_optimum_is_known() -> None:
    problem = heterogeneous_quadratic(5, 2, seed=3)
    training = prepare(algorithms.fedavg(learning_rate=0.2, steps=1), problem.data, problem.model)
    gaps = []
    for client in range(5):
        own = problem.data.client(client)
        rows, targets = own.inputs[:].double(), own.labels[:].double()
        solved = torch.linalg.lstsq(rows, targets[:, None]).solution[:, 0]
        losses = [0.5 * (rows @ x - targets).square().mean() for x in (problem.optimum, solved)]
        gaps.append(float(losses[0] - losses[1]))
    for _ in range(3):
        record = training.step()
        assert record.distance == pytest.approx(distance_of(problem, training.state.x))
        assert record.heterogeneity == pytest.approx(sum(gaps) / 5, rel=1e-5)
        assert (record.position_0, record.position_1) == tuple(training.state.x.tolist())
    assert sum(gaps) > 1


def test_the_path_around_the_optimum_keeps_the_distance() -> None:
    problem = heterogeneous_quadratic(5, 4, seed=3)
    training = prepare(algorithms.fedavg(learning_rate=0.1, steps=1), problem.data, problem.model)
    record = training.step()
    assert record.along is not None
    assert record.across is not None
    assert record.distance == pytest.approx((record.along**2 + record.across**2) ** 0.5)
    start, goal = training.data.optimum.start, problem.optimum  # type: ignore[union-attr]
    assert start is not None
    assert record.along == pytest.approx(
        float((training.state.x - goal) @ (start - goal) / (start - goal).norm())
    )
    assert 0 < record.across < record.along < float((start - goal).norm())


def test_heterogeneity_of_zhangs_three_clients_is_three() -> None:
    """f_i(0) = 8, 1/2, 1/2 and every minimum is 0; no distance to another model's optimum."""
    known = zhang2022_table4().data.optimum
    assert known is not None
    assert known.gaps.tolist() == pytest.approx([8.0, 0.5, 0.5])
    wider = heterogeneous_quadratic(3, 4, seed=0)
    training = prepare(algorithms.fedavg(steps=1), wider.data, torch.nn.Linear(4, 1), rounds=1)
    record = training.step()
    assert record.distance is None
    assert record.heterogeneity is None
    assert record.position_0 is None
    assert wider.data.by_example().optimum is None
