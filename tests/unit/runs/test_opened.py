"""A saved run predicts as its model did, without the data; what cannot be opened is said."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedveil as fv
from fedveil.data.encoding import TableEncoder
from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.models.catalog import MODELS, build, rebuild
from fedveil.runs.opened import BATCH, Interface
from fedveil.training.settings import from_settings, read_settings
from fedveil.training.start import finish, start

OWN = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, inputs, classes):
        super().__init__(nn.Flatten(), nn.Linear(inputs[0], 3), nn.Tanh(), nn.Linear(3, classes))

def annotated(inputs, classes) -> nn.Module:
    return Net(inputs, classes)

def bare(inputs, classes):
    return Net(inputs, classes)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "ledger.sqlite"))
    yield tmp_path
    sys.modules.pop("fedveil_test_net", None)


def federated(classes: int = 3, names: tuple[str, ...] = ("a", "b", "c")) -> Federated:
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % classes
    offsets = torch.arange(0, 13, 3)
    return Federated(
        "few", inputs, labels, offsets, Examples(inputs, labels), classes, class_names=names
    )


def trained(model: str | nn.Module = "softmax", **facts: Any) -> fv.Result:
    recipe = fv.algorithms.fedavg(learning_rate=0.5)
    return fv.train(recipe, federated(**facts), model, rounds=2, save="run", engine="dense")


def test_a_run_predicts_what_its_model_did() -> None:
    result = trained("mlp-5")
    run = fv.open_run("run")
    inputs = federated().inputs[:]
    outputs = result.model(inputs).detach()
    assert not run.model.training
    assert torch.equal(run.model(inputs), outputs)
    assert run.predict(inputs) == ["abc"[i] for i in outputs.argmax(1)]
    assert run.predict(inputs.double().numpy()) == run.predict(inputs)
    assert torch.allclose(run.probabilities(inputs), outputs.softmax(1))
    assert run.summary["accuracy"] == result.accuracy
    assert run.statement == result.statement.text()
    assert run.encoder is None
    assert repr(run) == "<Run run: MLP, inputs [4], 3 classes>"


def test_many_rows_are_predicted_in_their_order() -> None:
    trained()
    run = fv.open_run("run")
    many = torch.randn(2 * BATCH + 1, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(run.probabilities(many), run.model(many).softmax(1), atol=1e-6)


def test_what_is_made_to_be_released_is_enough() -> None:
    trained()
    Path("out").mkdir()
    for name in ("model.safetensors", "privacy.txt", "recipe.toml"):
        shutil.copy(Path("run", name), "out")
    run = fv.open_run("out")
    numbers = run.predict(torch.eye(4))
    assert numbers == run.model(torch.eye(4)).argmax(1).tolist()
    assert (run.class_names, run.summary) == ((), {})


def test_classes_without_names_are_numbers() -> None:
    trained(names=())
    assert set(fv.open_run("run").predict(torch.eye(4))) <= {0, 1, 2}


@pytest.fixture(scope="module")
def run_on_a_table(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, Path]:
    """The rows, and a run on them that nobody changes."""
    place = tmp_path_factory.mktemp("table")
    frame = pl.DataFrame(
        {
            "who": [f"p{i // 4}" for i in range(40)],
            "size": [float(i % 7) for i in range(40)],
            "colour": [("red", "blue", None)[i % 3] for i in range(40)],
            "y": [("no", "yes")[i % 7 > 3] for i in range(40)],
        }
    )
    frame.write_csv(place / "table.csv")
    (place / "s.toml").write_text(
        'algorithm = "fedavg"\nrounds = 3\n[parameters]\nlearning_rate = 0.5\nsteps = 20\n'
        '[data]\npath = "table.csv"\nclient = "who"\nlabel = "y"\nstandardize = true\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        finish(start(from_settings(read_settings(place / "s.toml", {})), place / "run"))
    return frame, place / "run"


@pytest.fixture
def table(here: Path, run_on_a_table: tuple[pl.DataFrame, Path]) -> pl.DataFrame:
    """The rows of a run, which is here, but its table is not."""
    frame, run = run_on_a_table
    shutil.copytree(run, here / "run")
    return frame


def test_rows_of_a_table_are_encoded_as_in_training(table: pl.DataFrame) -> None:
    run = fv.open_run("run")
    assert run.encoder == TableEncoder.from_json(Path("run/encoder.json"))
    assert run.encoder == TableEncoder.from_json("run/encoder.json")
    assert run.encoder is not None
    expected = run.model(run.encoder.encode(table)).argmax(1).tolist()
    by_frame = run.predict(table.drop("who", "y"))
    assert by_frame == [("no", "yes")[i] for i in expected]
    assert len(set(by_frame)) == 2
    table.drop("who", "y").write_csv("new.csv")
    assert run.predict("new.csv") == run.predict(Path("new.csv")) == by_frame
    assert run.predict({"size": [1.0], "colour": ["green"]})


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a column is missing": (lambda: {"size": [1.0]}, "has no column 'colour'"),
    "two are missing": (lambda: {"x": [1.0]}, "has no column 'size', 'colour'"),
    "not a table": (lambda: 3, "Rows of type int are not a table"),
    "uneven columns": (lambda: {"size": [1.0, 2.0], "colour": ["red"] * 3}, "do not form a table"),
    "no file": (lambda: "absent.csv", "No such file: 'absent.csv'"),
    "a wrong shape": (lambda: torch.ones(2, 3), r"shape \[2, 3\], but .* takes \[rows, 5\]"),
    "one row alone": (lambda: torch.ones(5), r"shape \[5\]"),
    "no rows": (lambda: torch.ones(0, 5), "no rows to predict"),
}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("rows", "sentence"), WRONG.values(), ids=WRONG)
def test_rows_that_do_not_fit_are_refused(rows: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fv.open_run("run").predict(rows())


def test_a_table_needs_an_encoder() -> None:
    trained()
    with pytest.raises(
        UserError, match=r"has no encoder.json.*tensor of inputs of shape \[rows, 4\]"
    ):
        fv.open_run("run").predict({"size": [1.0]})


def test_sequences_have_a_prediction_for_every_position() -> None:
    tokens = torch.arange(24).reshape(6, 4) % 5
    offsets = torch.arange(0, 7, 2)
    data = Federated("text", tokens, tokens, offsets, Examples(tokens, tokens), 5)
    fv.train(fv.algorithms.fedavg(), data, "lstm", rounds=1, save="run", engine="loop")
    run = fv.open_run("run")
    assert run.probabilities(tokens[:, :3]).shape == (6, 3, 5)
    assert [len(row) for row in run.predict(tokens)] == [4] * 6


def test_numeric_targets_are_predicted_as_numbers() -> None:
    inputs = torch.eye(4)
    targets = torch.arange(4.0)
    data = Federated(
        "line", inputs, targets, torch.arange(5), Examples(inputs, targets), 1, "half_squared"
    )
    recipe = fv.algorithms.fedavg()
    result = fv.train(recipe, data, "linear", rounds=3, save="run", engine="loop")
    run = fv.open_run("run")
    assert run.predict(inputs) == result.model(inputs).flatten().tolist()
    with pytest.raises(UserError, match="predicts numbers"):
        run.probabilities(inputs)


@pytest.mark.parametrize("name", ["Net", "annotated"])
def test_a_model_of_one_s_own_is_imported_by_its_name(here: Path, name: str) -> None:
    (here / "fedveil_test_net.py").write_text(OWN)
    result = trained(f"fedveil_test_net:{name}")
    assert torch.equal(fv.open_run("run").model(torch.eye(4)), result.model(torch.eye(4)))


@pytest.mark.parametrize("name", ["fedveil_test_net:bare", "os:getcwd", "builtins:dict"])
def test_what_makes_no_modules_is_not_called(here: Path, name: str) -> None:
    (here / "fedveil_test_net.py").write_text(OWN)
    trained()
    text = Path("run/recipe.toml").read_text().replace('"softmax"', f'"{name}"')
    Path("run/recipe.toml").write_text(text)
    with pytest.raises(UserError, match=r"neither a torch.nn.Module class"):
        fv.open_run("run")


def test_a_model_that_was_an_object_is_given_again() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3))
    result = trained(net)
    with pytest.raises(UserError, match=r"passed to train as an object.*open_run\(path, model="):
        fv.open_run("run")
    before = net[0].weight.clone()
    run = fv.open_run("run", model=net)
    assert torch.equal(run.model(torch.eye(4)), result.model(torch.eye(4)))
    assert torch.equal(net[0].weight, before)
    with pytest.raises(UserError, match="does not fit the model Linear"):
        fv.open_run("run", model=nn.Linear(4, 3))


def test_what_is_no_run_and_what_has_not_ended(here: Path) -> None:
    with pytest.raises(UserError, match="There is no directory"):
        fv.open_run(here / "absent")
    trained()
    Path("run/model.safetensors").unlink()
    with pytest.raises(
        UserError,
        match=r"no model\.safetensors, because the run has not ended.*fedveil.resume\('run'\)",
    ):
        fv.open_run("run")


def test_a_newer_run_is_refused() -> None:
    trained()
    file = Path("run/recipe.toml")
    file.write_text(file.read_text().replace('"0.', '"99.', 1) + "\n[later]\nx = 1\n")
    with pytest.raises(UserError, match="which is newer than the installed"):
        fv.open_run("run")


@pytest.mark.usefixtures("table")
def test_an_earlier_run_is_opened_by_its_encoder_or_says_how() -> None:
    file = Path("run/model.safetensors")
    answers = fv.open_run("run").predict({"size": [1.0, 6.0], "colour": ["red", "blue"]})
    save_file(load_file(file), file)  # without facts
    assert fv.open_run("run").predict({"size": [1.0, 6.0], "colour": ["red", "blue"]}) == answers
    Path("run/encoder.json").unlink()
    with pytest.raises(UserError, match=r"earlier version.*safetensors.torch.load_file\("):
        fv.open_run("run")


@pytest.mark.parametrize(
    "facts",
    ["x", "3", "{}", '{"inputs": [-1], "tokens": false, "classes": 3, "loss": "cross_entropy"}'],
)
def test_broken_facts_are_told(facts: str) -> None:
    trained()
    file = Path("run/model.safetensors")
    save_file(load_file(file), file, {"facts": facts})
    with pytest.raises(UserError, match="is damaged"):
        fv.open_run("run")


def test_facts_that_promise_too_much_take_no_memory() -> None:
    trained()
    file = Path("run/model.safetensors")
    vast = Interface((10**7,), False, 10**6, "cross_entropy")  # 40 TB of parameters
    save_file(load_file(file), file, {"facts": vast.to_json()})
    with pytest.raises(UserError, match=r"does not fit the model SoftmaxRegression: size mismatch"):
        fv.open_run("run")


@pytest.mark.parametrize("name", [*MODELS, "mlp-4-3"])
def test_every_model_is_rebuilt_for_its_parameters(name: str) -> None:
    image = torch.zeros(2, 1, 28, 28)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    loss = "half_squared" if name == "linear" else "cross_entropy"
    inputs = tokens if name in ("lstm", "gpt") else image
    labels = {"lstm": tokens, "gpt": tokens, "linear": torch.zeros(2)}.get(
        name, torch.zeros(2).long()
    )
    data = Federated("x", inputs, labels, torch.arange(3), Examples(inputs, labels), 10, loss)
    model = build(name, data, torch.Generator().manual_seed(0)).eval()
    facts = Interface.of(data)
    assert Interface.from_json(json.dumps(json.loads(facts.to_json()))) == facts
    again = rebuild(name, facts.inputs, facts.classes, "x").eval()
    again.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(again(inputs), model(inputs))
