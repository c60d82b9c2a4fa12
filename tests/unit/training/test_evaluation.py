"""evaluation.json: confusion and clients' accuracy agree with the model's own test results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Federated
from fedveil.data.partition import Dirichlet
from fedveil.data.problems import das2022_quadratics
from fedveil.engines.task import Task
from fedveil.models.linear import SoftmaxRegression
from fedveil.training import evaluation as module
from fedveil.training.evaluation import evaluation
from fedveil.training.start import train


@pytest.fixture(scope="module")
def data() -> Federated:
    return load("digits").split(Dirichlet(40, 0.5), seed=1)


@pytest.fixture(scope="module")
def run(data: Federated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(algorithms.fedavg(), data, rounds=3, save=path)
    return path


def test_the_confusion_adds_up_to_the_test_accuracy(run: Path, data: Federated) -> None:
    found = json.loads((run / "evaluation.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    counts = np.array(found["confusion"])
    assert found["classes"] == list("0123456789")
    assert counts.sum() == len(data.test)
    assert counts.sum(1).tolist() == np.bincount(data.test.labels[:].numpy()).tolist()
    assert np.trace(counts) / counts.sum() == pytest.approx(summary["accuracy"])
    assert summary["fingerprint"] == data.fingerprint()


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("diagnostics", [False, True])
def test_it_is_written_where_diagnostics_are_and_the_statement_says_so(
    data: Federated, tmp_path: Path, noise: Literal["seeded", "secure"], diagnostics: bool
) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
    train(recipe, data, rounds=1, save=tmp_path / "a", noise=noise, diagnostics=diagnostics)
    told = json.loads((tmp_path / "a" / "summary.json").read_bytes())["privacy"]["statement"]
    assert (tmp_path / "a" / "evaluation.json").exists() == diagnostics
    assert ("evaluation.json" in told["Diagnostics"]) == diagnostics


def test_each_client_gets_its_own_accuracy(
    data: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(SoftmaxRegression(64, 10), "cross_entropy")
    x = torch.randn(task.dim, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(module, "BATCH", 50)  # some clients are split, others share a batch
    found = evaluation(task, x, data)
    assert found is not None
    served = found["client_accuracy"]
    assert served["examples"] == data.sizes.tolist()
    wanted = [task.evaluate(x, data.client(i))[1] for i in range(data.clients)]
    assert served["accuracy"] == pytest.approx(wanted, abs=1e-4)


def test_many_clients_are_sampled_evenly(data: Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CLIENTS", 5)
    task = Task(SoftmaxRegression(64, 10), "cross_entropy")
    found = evaluation(task, task.flatten(), data)
    assert found is not None
    chosen = [0, 10, 20, 29, 39]
    assert found["client_accuracy"]["examples"] == data.sizes[chosen].tolist()


def test_without_classes_there_is_none(tmp_path: Path) -> None:
    problem = das2022_quadratics(0, clients=4, dim=3, rank=2)
    train(algorithms.fedavg(), problem.data, problem.model, rounds=2, save=tmp_path / "run")
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_examples_are_not_served_one_by_one(data: Federated) -> None:
    task = Task(SoftmaxRegression(64, 10), "cross_entropy")
    found = evaluation(task, task.flatten(), data.by_example())
    assert found is not None
    assert found["client_accuracy"] is None
    assert found["confusion"] is not None


def test_a_deployment_keeps_none(data: Federated, tmp_path: Path) -> None:
    recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=2.0)
    train(recipe, data, rounds=1, save=tmp_path / "run", noise="secure")
    assert not (tmp_path / "run" / "evaluation.json").exists()
