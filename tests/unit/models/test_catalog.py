from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.errors import UserError
from fedveil.models.catalog import MODELS, build, suggest
from fedveil.models.losses import LOSSES


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dataset(inputs: Tensor, labels: Tensor, classes: int, loss: str = "cross_entropy") -> Dataset:
    examples = Examples(inputs, labels)
    return Dataset("toy", examples, examples, classes, loss)


IMAGES = dataset(torch.zeros(2, 1, 28, 28), torch.tensor([0, 1]), 10)
WIDE = dataset(torch.zeros(2, 1, 28, 20), torch.tensor([0, 1]), 10)
TABLE = dataset(torch.zeros(2, 7), torch.tensor([0, 1]), 2)
TEXT = dataset(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]]), 4)
NUMBERS = dataset(torch.zeros(2, 7), torch.zeros(2), 1, "half_squared")


def data_for(name: str) -> Dataset:
    return {"lstm": TEXT, "gpt": TEXT, "linear": NUMBERS}.get(name, IMAGES)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_fits_its_data_and_its_loss(name: str) -> None:
    data = data_for(name)
    model = build(name, data, generator())
    losses = LOSSES[data.loss](model(data.train.inputs), data.train.labels)
    assert losses.shape == (len(data.train),)
    assert bool(losses.isfinite().all())


def test_build_reads_federated_data_too() -> None:
    train = IMAGES.train
    split = Federated("toy", train.inputs, train.labels, torch.tensor([0, 1, 2]), train, 10)
    assert sum(p.numel() for p in build("cnn", split, generator()).parameters()) == 26_010


@pytest.mark.parametrize("name", ["mlp", "resnet20"])
def test_build_is_a_function_of_the_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, second, other = (build(name, IMAGES, generator(seed)) for seed in (1, 1, 2))
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_gpt_sizes_can_be_part_of_the_name() -> None:
    model = build("gpt-2-64", TEXT, generator())
    assert len(model.blocks) == 2
    assert model.embedding.weight.shape == (4, 64)
    with pytest.raises(UserError, match="such as gpt-2-32"):
        build("gpt-2-30", TEXT, generator())


def test_mlp_widths_can_be_part_of_the_name() -> None:
    model = build("mlp-256-128", IMAGES, generator())
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    assert shapes == [(256, 784), (128, 256), (10, 128)]


def test_suggestions_fit_their_data() -> None:
    suggested = {suggest(data): data for data in (IMAGES, TABLE, TEXT, NUMBERS)}
    assert set(suggested) == {"softmax", "lstm", "linear"}
    for name, data in suggested.items():
        build(name, data, generator())


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("resnet19", IMAGES, "Did you mean 'resnet18'"),
        ("mlp-0", IMAGES, "There is no model 'mlp-0'"),
        ("cnn", TABLE, r"needs images of shape .* has shape \[7\]"),
        ("resnet20", TABLE, "needs images"),
        ("cnn", WIDE, "square images, but those of 'toy' are 28×20"),
        ("softmax", TEXT, "token ids. Use the model 'lstm' or 'gpt'"),
        ("lstm", IMAGES, "needs token ids"),
        ("linear", TABLE, "Use the model 'softmax'"),
        ("lstm", dataset(torch.tensor([[0, 9]]), torch.tensor([[1, 2]]), 4), "ids from 0 to 9"),
        ("lstm", dataset(torch.tensor([[0, 1]]), torch.tensor([1]), 4), "every position"),
    ],
)
def test_misfits_are_refused_with_a_sentence(name: str, data: Dataset, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(name, data, generator())


OWN = """
import math
from torch import nn

class Sized(nn.Module):
    def __init__(self, classes, inputs, extra=3):
        super().__init__()
        self.fc = nn.Linear(math.prod(inputs), classes)

    def forward(self, x):
        return self.fc(x.flatten(1))

class Plain(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)

class Demanding(nn.Module):
    def __init__(self, width):
        super().__init__()

class NoModule:
    pass

NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with modules of the user's, current but not on the import path."""
    (tmp_path / "fedveil_own_nets.py").write_text(OWN)
    (tmp_path / "fedveil_broken_net.py").write_text("import fedveil_absent_dependency\n")
    (tmp_path / "fedveil_syntax_net.py").write_text("class :\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    for name in [name for name in sys.modules if name.startswith("fedveil_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("own")
def test_own_class_is_given_the_arguments_it_has() -> None:
    path, state = list(sys.path), torch.random.get_rng_state()
    sized, again, other = (
        build("fedveil_own_nets:Sized", TABLE, generator(seed)) for seed in (4, 4, 5)
    )
    assert sized(TABLE.train.inputs).shape == (2, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(sized.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(next(sized.parameters()), next(other.parameters()))
    assert isinstance(build("fedveil_own_nets:Plain", IMAGES, generator()), nn.Linear)
    assert sys.path == path
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fedveil_absent:Net", "no module 'fedveil_absent'"),
        ("fedveil_own_nets.sub:Net", "no module 'fedveil_own_nets.sub'"),
        ("fedveil_own_nets:Sizes", "has no class 'Sizes'. Did you mean 'Sized'"),
        ("fedveil_own_nets:NUMBER", "has no class 'NUMBER'"),
        ("fedveil_own_nets:NoModule", "returned a NoModule, not a torch.nn.Module"),
        ("fedveil_own_nets:Demanding", r"with \(\): TypeError: .*width"),
        ("fedveil_broken_net:Net", "failed with ModuleNotFoundError: .*absent_dependency"),
        ("fedveil_syntax_net:Net", "failed with SyntaxError"),
        ("fedveil_own_nets:", "Write package.module:Class"),
        (":Net", "Write package.module:Class"),
        ("../nets:Net", "Write package.module:Class"),
    ],
)
def test_own_class_that_cannot_be_used_is_refused(name: str, sentence: str) -> None:
    path = list(sys.path)
    with pytest.raises(UserError, match=sentence):
        build(name, IMAGES, generator())
    assert sys.path == path
