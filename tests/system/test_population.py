"""A million clients are described, sampled and trained on, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.save import save_federated
from fedveil.data.saved import open_federated
from fedveil.data.synthetic import synthetic
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.parts.part import Begin
from fedveil.training.prepare import prepare
from fedveil.training.settings import DataSettings
from fedveil.training.sources import load_data
from fedveil.training.start import train
from tests.conftest import Run
from tests.system.forked import start

CLIENTS = 10**6
# 63 GB if they were stored.
SCRIPT = """
import json, resource
import fedveil as fv
import dp_accounting, polars, sklearn  # what a run loads anyway

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
data = fv.synthetic(clients=10**6)
table = fv.describe(data)
recipe = fv.algorithms.dp_fedavg(clip=1.0, rate=6e-4, steps=2, cap=2, noise_multiplier=1.0)
runs = [fv.train(recipe, data, "softmax", rounds=3) for _ in range(2)]
models = [[leaf.flatten().tolist()[:50] for leaf in run.model.parameters()] for run in runs]
print(json.dumps({
    "megabytes": peak() - before,
    "clients": table.clients,
    "examples": table.examples,
    "counted": sum(table.class_totals),
    "spread": sum(table.classes_per_client.values()),
    "same": models[0] == models[1],
    "moved": any(abs(x) > 0 for x in models[0][0]),
    "participants": [record.participants for record in runs[0].records],
}))
"""


def printed(script: str, cwd: Path) -> str:
    """What a process of its own prints: it has its own peak of memory."""
    child = start(("-c", script), cwd, os.environ, "script")
    try:
        assert child.wait(240) == 0, child.err.read_text()
    finally:
        child.kill()
    return child.out.read_text()


def test_a_million_clients_are_described_and_trained_on_in_little_memory(tmp_path: Path) -> None:
    found = json.loads(printed(SCRIPT, tmp_path))
    assert found["megabytes"] < 600
    assert (found["clients"], found["examples"]) == (CLIENTS, 20 * CLIENTS)
    assert (found["counted"], found["spread"]) == (20 * CLIENTS, CLIENTS)
    assert found["same"]
    assert found["moved"]
    assert all(500 < count < 700 for count in found["participants"])


MANY = """
import resource, torch
import fedveil as fv

torch.set_num_threads(2)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

data = fv.synthetic(clients=10**6)
for cohort in (200, 10_000):
    recipe = fv.algorithms.dp_fedavg(clip=1.0, clients=cohort, steps=2, noise_multiplier=1.0)
    run = fv.train(recipe, data, "softmax", rounds=1, engine="factored")
    assert run.records[0].participants == cohort
    print(peak())
"""


def test_memory_is_bounded_by_the_group_and_not_by_the_cohort(tmp_path: Path) -> None:
    """10,000 clients of 20 examples would be 600 MB of inputs, and their updates 300 MB."""
    few, many = (float(line) for line in printed(MANY, tmp_path).split())
    assert many - few < 200


@pytest.mark.parametrize("cohort", [FixedSize(600), FixedSize(600, cap=1), Poisson(6e-4, cap=1)])
def test_a_million_clients_are_sampled_evenly_and_within_their_cap(
    cohort: FixedSize | Poisson,
) -> None:
    rng = np.random.default_rng(0)
    state = cohort.initial_state(Begin(torch.zeros(1), CLIENTS, 20, rng))
    drawn = []
    for _ in range(20):
        drawn.append(cohort.draw(CLIENTS, rng, state))
        state = cohort.step(state, drawn[-1])
    everybody = np.concatenate(drawn)
    assert everybody.size == pytest.approx(12_000, abs=600)
    assert everybody.mean() == pytest.approx(CLIENTS / 2, abs=4 * CLIENTS / np.sqrt(12 * 12_000))
    assert cohort.cap is None or len(np.unique(everybody)) == len(everybody)


def test_clients_remember_only_if_they_took_part() -> None:
    """Rows for everybody would be 31 GB."""
    data = synthetic(clients=CLIENTS)
    recipe = algorithms.fed_alpha_normec(rate=5e-5, steps=2, noise_multiplier=1.0)
    training = prepare(recipe, data, "softmax", rounds=2)
    came = training.step().participants + training.step().participants
    memory = training.state.memory
    assert memory is not None
    assert memory._count == came  # nobody twice, of a million
    assert len(memory._rows) < 2 * came
    assert torch.isfinite(training.state.x).all()


# On the command line

SMALL = ("--dataset", "synthetic", "--clients", 30, "--data", "features=12", "--data", "classes=3")
PLAIN = ("--algorithm", "fedavg", "--set", "steps=2", "--rounds", 2)


def model(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_a_synthetic_population_is_named_by_flags_and_by_its_recipe(
    run: Run, tmp_path: Path
) -> None:
    flags = (*SMALL, "--data", "alpha=0.1", "--data", "examples=5", "--data", "seed=3")
    outcome = run("train", *PLAIN, *flags, "--out", "a")
    assert outcome.code == 0, outcome
    assert "fedavg on synthetic: 30 clients, 39 parameters" in outcome.out
    written = tomllib.loads((tmp_path / "a" / "recipe.toml").read_text())["data"]
    wanted = {"clients": 30, "features": 12, "classes": 3, "alpha": 0.1, "examples": 5, "seed": 3}
    assert {name: written[name] for name in wanted} == wanted
    assert written["dataset"] == "synthetic"
    assert run("train", "a/recipe.toml", "--out", "b").code == 0
    assert model(tmp_path / "a") == model(tmp_path / "b")
    assert run("train", "a/recipe.toml", "--data", "alpha=9.0", "--out", "c").code == 0
    assert model(tmp_path / "a") != model(tmp_path / "c")


def test_it_is_the_population_that_python_makes() -> None:
    named = load_data(DataSettings(dataset="synthetic", clients=7, examples=3, alpha=2.0, seed=4))
    made = synthetic(clients=7, examples=3, alpha=2.0, seed=4)
    assert named.fingerprint() == made.fingerprint()
    plain = load_data(DataSettings(dataset="synthetic"))
    assert plain.fingerprint() == synthetic().fingerprint()


def test_a_million_clients_on_the_command_line(run: Run, tmp_path: Path) -> None:
    flags = ("--dataset", "synthetic", "--clients", CLIENTS, "--data", "features=20")
    private = ("--algorithm", "dp_fedavg", "--set", "clip=1.0", "--set", "rate=1e-4")
    outcome = run("train", *private, *flags, "--noise-multiplier", 2.0, "--rounds", 2, "--out", "a")
    assert outcome.code == 0, outcome
    assert "dp_fedavg on synthetic: 1,000,000 clients" in outcome.out
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rounds"] == 2


def test_saved_data_are_named_by_their_path(run: Run, tmp_path: Path) -> None:
    data = synthetic(clients=30, features=12, classes=3)
    save_federated(data, tmp_path / "saved")
    assert run("train", *PLAIN, "--path", "saved", "--out", "a").code == 0
    assert train(algorithms.fedavg(steps=2), open_federated(tmp_path / "saved"), rounds=2, save="b")
    assert model(tmp_path / "a") == model(tmp_path / "b")
    assert run("train", "a/recipe.toml", "--out", "c").code == 0
    assert model(tmp_path / "a") == model(tmp_path / "c")
    assert run("train", "--resume", "a").code == 0


def test_saved_data_are_checked_and_described(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    save_federated(synthetic(clients=30, features=12, classes=3), tmp_path / "saved")
    outcome = run("datasets", "saved")
    assert outcome.code == 0
    assert "synthetic: 30 clients, 600 examples\n" in outcome.out
    assert outcome.out.endswith("saved is intact: every file is as it was saved.\n")
    file = tmp_path / "saved" / "inputs.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    assert "saved/inputs.npy has changed since it was saved" in refused("datasets", "saved")
    assert "no federated.json" in refused("datasets", ".")


def test_saved_data_that_changed_do_not_go_on_with_a_run(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    save_federated(synthetic(clients=30, features=12, classes=3), tmp_path / "saved")
    assert run("train", *PLAIN, "--path", "saved", "--out", "a").code == 0
    shutil.rmtree(tmp_path / "saved")
    save_federated(synthetic(clients=30, features=12, classes=3, seed=1), tmp_path / "saved")
    assert "belongs to another recipe, model or data" in refused("train", "--resume", "a")


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "a partition of synthetic data": (
        (*SMALL, "--partition", "iid"),
        "synthetic is already split over clients. Remove partition.",
    ),
    "columns of synthetic data": ((*SMALL, "--label", "y"), "synthetic is not a table"),
    "no clients": (("--dataset", "synthetic", "--clients", 0), "clients is 0. Give a whole number"),
    "features of other data": (
        ("--dataset", "digits", "--data", "features=3"),
        "features applies to the data set 'synthetic' only",
    ),
    "no such setting": (("--data", "colour=3"), "colour"),
    "a setting without value": (
        ("--data", "alpha"),
        "--data alpha: not of the form name=value. Write",
    ),
    "a setting of another kind": (("--data", "alpha=much"), "data.alpha is 'much'"),
    "clients of saved data": (
        ("--path", "saved", "--clients", 3, "--partition", "iid"),
        "saved is already split over clients. Remove partition and clients.",
    ),
    "columns of saved data": (("--path", "saved", "--client", "who"), "saved is not a table"),
    "saved data without their header": (("--path", "torn"), "torn has no federated.json"),
    "a data set and saved data": (("--path", "saved", "--dataset", "digits"), "Give one of them."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_one_sentence(
    case: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    save_federated(synthetic(clients=4, features=3), tmp_path / "saved")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "offsets.npy").write_bytes(b"")
    flags, why = REFUSED[case]
    assert why in refused("train", *PLAIN, *flags)
