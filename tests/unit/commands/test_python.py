"""Python is a first-class interface: the commands as functions, and a sentence for each mistake."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.ledger.ledger import Ledger


def small() -> fv.Federated:
    return fv.load("digits").split(fv.Iid(20))


def recipe() -> fv.Recipe:
    return fv.algorithms.dp_fedavg(clip=1.0, rate=0.5, steps=1)


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def keyed(keys: Any) -> fv.Dataset:
    part = fv.Examples(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    return fv.Dataset("x", part, part, 2, keys=keys)


NONE = fv.Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
VISITS = ("examples/visits.csv", "user_id", "returned")
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "text for epsilon": (
        lambda: fv.train(recipe(), small(), epsilon="4"),
        "epsilon is '4'; it must be a number",
    ),
    "text for rounds": (lambda: fv.train(recipe(), small(), rounds="9"), "rounds is '9'"),
    "a class for a module": (
        lambda: fv.train(recipe(), small(), Net, epsilon=4),
        r"model is the class Net. Give an instance: Net\(…\)",
    ),
    "a function for a recipe": (
        lambda: fv.train(fv.algorithms.dp_fedavg, small()),
        "Give a Recipe, such as",
    ),
    "a name for a recipe": (lambda: fv.train("dp_fedavg", small()), "recipe is 'dp_fedavg'"),
    "a data set for clients": (
        lambda: fv.train(recipe(), fv.load("digits")),
        "which is not split over clients",
    ),
    "a misspelt argument": (lambda: fv.train(recipe(), small(), sed=1), "argument 'sed'"),
    "no data": (lambda: fv.train(recipe()), "missing a required argument: 'data'"),
    "half a round": (lambda: fv.train(recipe(), small(), rounds=2.5), "rounds is 2.5"),
    "NaN for epsilon": (lambda: fv.train(recipe(), small(), epsilon=np.nan), "epsilon is nan"),
    "a number for a path": (lambda: fv.train(recipe(), small(), save=3), "save is 3"),
    "a number for a name": (lambda: fv.train(recipe(), small(), account=5), "account is 5"),
    "a partitioner's name": (lambda: fv.load("digits").split("iid"), "partitioner is 'iid'"),
    "a partitioner's class": (lambda: fv.load("digits").split(fv.Iid), "Give one such as"),
    "text for clients": (lambda: fv.Iid("5"), "must be a whole number"),
    "text for alpha": (lambda: fv.Dirichlet(5, "a"), "alpha must be a positive number"),
    "text for a seed": (lambda: fv.load("digits").split(fv.Iid(5), "x"), "seed is 'x'"),
    "a number for a data set": (lambda: fv.load(3), "name is 3; it must be a text"),
    "numpy for tensors": (
        lambda: fv.Examples(np.zeros((3, 2)), np.zeros(3)),
        "inputs is a ndarray. Give a tensor",
    ),
    "lists for tensors": (lambda: fv.Examples([[1.0]], [0]), "Federated.from_arrays"),
    "None among keys": (
        lambda: keyed(np.array(["a", None, "b"], dtype=object)).split(fv.ByKey()),
        "Some keys are None",
    ),
    "too few keys": (lambda: keyed(["a", "b"]).split(fv.ByKey()), "2 keys for 3 examples"),
    "a misspelt column": (
        lambda: fv.load_table(*VISITS[:2], "returnd"),
        "Did you mean 'returned'",
    ),
    "a number for a table": (lambda: fv.load_table(5, "a", "b"), "A int is not a table"),
    "text for stats_epsilon": (
        lambda: fv.load_table(*VISITS, stats_epsilon="1"),
        "stats_epsilon is '1'",
    ),
    "an unknown hold-out": (lambda: fv.load_table(*VISITS, holdout="all"), "holdout is 'all'"),
    "a number for a range": (
        lambda: fv.load_table(*VISITS, ranges={"age": 5}),
        r"range of 'age' is 5. Give \(low, high\)",
    ),
    "a list for ranges": (
        lambda: fv.load_table(*VISITS, ranges=[1]),
        "ranges is \\[1\\]; it must be a dictionary",
    ),
    "text for classes": (lambda: fv.load_table(*VISITS, classes="no"), "Give a list of names"),
    "no label": (lambda: fv.load_table(*VISITS[:2], None), "label is None"),
    "no directory": (lambda: fv.open_run("/nowhere"), "There is no directory"),
    "a number to describe": (lambda: fv.describe(3), "it must be a Federated"),
    "a number to save": (lambda: fv.save_federated(3, "x"), "it must be a Federated"),
    "text in a budget": (lambda: fv.Budget("1", 1e-5), "epsilon is '1'"),
    "text in a plan": (lambda: fv.plan(epsilon="x"), "epsilon is 'x'"),
    "a misspelt parameter": (lambda: fv.plan(epsilonn=3), "named 'epsilonn'"),
    "no run to diagnose": (lambda: fv.diagnose("/nowhere"), "There is no directory"),
    "no run to report": (lambda: fv.report([]), "no run to report"),
    "no run to resume": (lambda: fv.resume("/nowhere"), "There is no directory"),
    "half a question": (lambda: fv.privacy(epsilon=5.0), "depends on the rounds. Give rounds"),
    "text for seeds": (
        lambda: fv.compare(["dp_fedavg"], seeds="3"),
        "seeds is '3'; it must be a whole number",
    ),
    "text for an epsilon": (
        lambda: fv.statistics(*VISITS[:2], "1", count=True),
        "epsilon is '1'",
    ),
    "no statistic": (lambda: fv.statistics(*VISITS[:2], 1.0), "No statistic was requested"),
    "a misspelt option": (
        lambda: fv.algorithms.fedavg(rate=0.1),
        "fedavg: got an unexpected keyword argument 'rate'. Its arguments are clients, ",
    ),
    "text for a clip": (lambda: fv.algorithms.dp_fedavg(clip="1.0"), "clip is '1.0'"),
    "an array for a rate": (
        lambda: fv.algorithms.dp_fedavg(rate=np.zeros(3)),
        "rate is a ndarray; it must be a number",
    ),
    "text for a report": (
        lambda: fv.algorithms.dp_fedavg(report="x"),
        "it must be a part of kind .*PseudoGradient",
    ),
    "text for a norm": (lambda: fv.parts.Clip("1"), "Clip: norm is '1'; it must be a number"),
    "text for a share": (lambda: fv.parts.Poisson("a"), "Poisson: rate is 'a'"),
    "NaN for steps": (lambda: fv.algorithms.dp_fedavg(steps=np.nan), "steps is nan"),
    "a number for a run": (lambda: fv.diagnose(3), "run is 3; it must be a text or a path"),
    "an array for a name": (
        lambda: fv.train(recipe(), small(), noise=np.zeros(2)),
        "noise is a ndarray; it must be 'seeded' or 'secure'",
    ),
    "text for a model": (
        lambda: fv.open_run("/nowhere", model="softmax"),
        "model is 'softmax'; it must be a Module",
    ),
    "a name for examples": (
        lambda: fv.Dataset("x", "train", "test", 2),
        "Dataset: train is 'train'; it must be an Examples",
    ),
    "numpy for labels": (
        lambda: fv.Federated("x", torch.zeros(2, 1), np.zeros(2), torch.arange(3), NONE, 2),
        "Federated: labels is a ndarray. Give a tensor",
    ),
    "one client for all": (
        lambda: fv.Federated.from_arrays(np.zeros((2, 1)), [0, 1], "me", classes=2),
        "clients is 'me'. Give the client of each example in a list",
    ),
    "a number for inputs": (
        lambda: fv.Federated.from_arrays(1.0, [0], ["a"], classes=2),
        "inputs is 1.0. Give one row per example",
    ),
    "a number of data sets": (
        lambda: fv.Federated.from_torch(3, classes=2),
        "clients is 3. Give a list of Datasets",
    ),
    "numbers for columns": (
        lambda: fv.load_table(*VISITS, columns=[1, 2]),
        r"columns is \[1, 2\]; it must be a list, each a text",
    ),
    "a negative seed": (lambda: fv.load("digits").split(fv.Iid(5), -1), "seed is -1"),
    "text for a dimension": (lambda: fv.plan(dim="many"), "dim is 'many'; it must be a whole"),
    "a number in a grid": (
        lambda: fv.compare(["dp_fedavg"], grid={"clip": 1}, dataset="digits"),
        "grid has clip = 1. Give a list of values",
    ),
    "a run below a file": (
        lambda: fv.train(recipe(), small(), epsilon=8, save="pyproject.toml/run"),
        "Could not save to .*choose another save",
    ),
    "a run in place of a file": (
        lambda: fv.train(recipe(), small(), epsilon=8, save="pyproject.toml"),
        "pyproject.toml is a file, not a directory. Choose another save",
    ),
    "a ledger below a file": (
        lambda: fv.train(recipe(), small(), epsilon=8, save="a", ledger="pyproject.toml/l"),
        "Could not create a directory for the ledger",
    ),
    "a page in no directory": (
        lambda: fv.report("examples", out="/nowhere/r.html"),
        "examples is not a run",
    ),
    "half a selection": (
        lambda: fv.compare(["dp_fedavg"], expect=3.0, dataset="digits"),
        "expect needs select_privately=True",
    ),
    "no model to fix": (lambda: fv.models.fix(Net), r"Give an instance: Net\(…\)"),
    "a list to plot": (lambda: fv.plot([1]), "it must be a Result or a Statement or a Recipe"),
    "an array for a place": (
        lambda: fv.parts.Gaussian(at=np.zeros(3)),
        "Gaussian: at is a ndarray; it must be 'server' or 'client'",
    ),
    "an array for trials": (
        lambda: fv.parts.Binomial(np.zeros(3)),
        "Binomial: trials is a ndarray; it must be an even whole number",
    ),
    "a list for rates": (
        lambda: fv.parts.Piecewise([0.1, 0.2], (3,)),
        "Piecewise: rates is .*; it must be a tuple of numbers",
    ),
    "a tensor for weights": (
        lambda: fv.parts.BufferedNoise(weights=torch.zeros(3)),
        "BufferedNoise: weights is a Tensor; it must be a tuple of numbers",
    ),
    "no limit": (lambda: fv.parts.ClipCoordinates(None), "ClipCoordinates: limit is None"),
    "a number beyond all": (
        lambda: fv.algorithms.dp_fedavg(clip=10**400),
        "clip is an int of 401 digits; it must be a number",
    ),
    "a class for a part": (
        lambda: dataclasses.replace(recipe(), bound=fv.parts.Clip),
        r"bound is the class Clip. Give an instance: Clip\(…\)",
    ),
    "an array for a unit": (
        lambda: dataclasses.replace(recipe(), unit=np.zeros(2)),
        "unit is a ndarray; it must be 'client' or",
    ),
    "a number for a recipe's name": (lambda: fv.Recipe(3, recipe().local), "name is 3"),
    "an array in a plan": (lambda: fv.plan(epsilon=np.zeros(3)), "epsilon is a ndarray"),
    "text for a cosine": (
        lambda: fv.plan(clients=9, dim=9, cosine="much"),
        "plan: cosine is 'much'; it must be a number",
    ),
    "a number for an axis": (
        lambda: fv.compare(["dp_fedavg"], grid={1: [2]}, dataset="digits", clients=20),
        "grid varies 1. Give the name of a parameter",
    ),
    "a tensor in a comparison": (
        lambda: fv.compare(["dp_fedavg"], clip=torch.zeros(3), dataset="digits"),
        "clip is a Tensor",
    ),
    "negative rounds": (
        lambda: fv.privacy(noise_multiplier=1.0, rate=0.1, rounds=-1),
        "rounds is -1; it must be a whole number \\(int\\), at least 1",
    ),
    "a number to watch": (
        lambda: fv.train(recipe(), small(), watch=3),
        r"watch is 3. Give a function \(training, record\)",
    ),
    "a tensor for metrics": (
        lambda: fv.train(recipe(), small(), epsilon=8.0, metrics=torch.tensor(1.0)),
        "metrics is not a dict",
    ),
    "text from a metric": (
        lambda: fv.Metric("cost", lambda targets, outputs: "high")(np.ones(2), np.ones(2)),
        "The metric 'cost' returned 'high'. Return a number",
    ),
    "text for a score": (lambda: fv.Metric("cost", "auc"), "score is 'auc'; it must be a function"),
    "texts for a range": (
        lambda: fv.load_table(*VISITS, ranges={"age": ("a", "b")}),
        r"range of 'age' is \('a', 'b'\). Give two numbers",
    ),
    "one number for inputs": (
        lambda: fv.Examples(torch.tensor(1.0), torch.tensor([1])),
        "inputs is one number. Give one per example",
    ),
    "test inputs of another shape": (
        lambda: fv.Federated.from_arrays(
            np.zeros((2, 3)), [0, 1], ["a", "b"], classes=2, test=(np.zeros((2, 5)), [0, 1])
        ),
        r"test has inputs of shape \[5\], but training inputs are \[3\]",
    ),
    "an array for test examples": (
        lambda: fv.Federated.from_arrays(
            np.zeros((2, 3)), [0, 1], ["a", "b"], classes=2, test=np.zeros((2, 3))
        ),
        "test is a ndarray; it must be a tuple",
    ),
    "numbers for clients": (
        lambda: fv.save_clients(f"{gettempdir()}/of-numbers", [3], NONE, "x", 2),
        "a client is 3. Give the Examples of each",
    ),
    "a mean without a range": (
        lambda: fv.statistics(*VISITS[:2], 1.0, mean="age"),
        "needs a public range: range",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "ledger.sqlite"))
    call, says = MISTAKES[mistake]
    with pytest.raises(fv.UserError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)  # flags are for the command line


def test_numpy_s_numbers_are_numbers() -> None:
    found = fv.privacy(epsilon=np.float64(5), rate=np.float32(0.5), rounds=np.int64(3))
    assert found.multiplier is not None


def test_a_run_from_start_to_report(tmp_path: Path) -> None:
    run, ledger = tmp_path / "a", tmp_path / "l.sqlite"
    known = {"dataset": "digits", "clients": 20}
    predicted = fv.plan(algorithm="dp_fedavg", rounds=3, epsilon=8.0, rate=0.5, **known)
    assert predicted.recipe.name == "dp_fedavg"
    fv.train(recipe(), small(), "softmax", 3, 8.0, save=run, ledger=ledger)
    assert fv.privacy(run).main.epsilon <= 8
    assert fv.diagnose(run).run.recipe.name == "dp_fedavg"
    assert fv.report(run).is_file()
    assert fv.resume(run, small(), ledger).rounds == 3


@pytest.mark.usefixtures("workers_here")
def test_a_private_selection_hands_out_one_run_at_the_price_of_all(tmp_path: Path) -> None:
    found = fv.compare(
        ["dp_fedavg", "dp_norm_fedavg"], select_privately=True, expect=2.0,
        dataset="digits", clients=20, rounds=1, noise_multiplier=4.0, rate=0.5, steps=1, jobs=1,
        out=tmp_path / "c", ledger=tmp_path / "l.sqlite", quiet=True,
    )  # fmt: skip
    (chosen,), price = found.outcome["members"], found.outcome["selection"]
    assert found.best == chosen
    assert price["expected"] == pytest.approx(2.0)
    assert 0 < price["single"] < price["epsilon"] == chosen["epsilon"]
    assert found.to_frame()["epsilon"].to_list() == [price["epsilon"]]
    kept = tmp_path / "c" / chosen["runs"][0]
    assert {p.name for p in (tmp_path / "c").iterdir() if p.is_dir()} == {kept.name}
    assert fv.open_run(kept).model is not None
    books = Ledger(tmp_path / "l.sqlite")
    (account,) = books.accounts()
    spent = books.spent(account, "models", price["delta"], 99.0)
    books.close()
    assert spent == pytest.approx(price["epsilon"], rel=1e-3)
    with pytest.raises(fv.UserError, match="must be above 1"):
        fv.compare(["dp_fedavg"], select_privately=True, expect=0.5, dataset="digits", clients=20)


NAMES = [n for n in fv.__all__ if n != "__version__" and not inspect.ismodule(getattr(fv, n))]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_parameters_and_an_example(name: str) -> None:
    known = getattr(fv, name)
    text = inspect.getdoc(known) or ""
    assert ">>>" in text
    if not (isinstance(known, type) and issubclass(known, Exception)):
        missing = [
            p for p in inspect.signature(known).parameters if not re.search(rf"\b{p}\b", text)
        ]
        assert missing == []
