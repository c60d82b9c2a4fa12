"""What cannot run says which line or layer of the model stands in the way, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.training.prepare import prepare


class Strange(nn.Module):
    """A linear layer behind a function that only the loop engine can compute."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.change(x))


class Doubled(torch.autograd.Function):
    """Written for autograd alone."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return 2 * g


def scaled(x: Tensor) -> Tensor:
    return x / x.abs().max().item()


def chosen(x: Tensor) -> Tensor:
    return x[x[:, 0] > -100]


def left(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.numpy()))


def turned(x: Tensor) -> Tensor:
    while x.sum() > 0:
        x = x - 1
    return x


def own(x: Tensor) -> Tensor:
    return Doubled.apply(x)


STRANGE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "item": (
        lambda: Strange(scaled),
        r"reads the value .* at scaled \(test_where\.py, line \d+: return x / x\.abs\(\)\.max\(\)"
        r"\.item\(\)\)\. Keep it as a tensor\.",
    ),
    "boolean index": (
        lambda: Strange(chosen),
        r"depends on their values, at chosen \(.*\)\. Keep all entries and multiply by the mask",
    ),
    "numpy": (lambda: Strange(left), r"leaves torch.*, at left \(.*\)\. Use operations of torch\."),
    "while": (
        lambda: Strange(turned),
        r"branches on .*, at turned \(.*: while x\.sum\(\) > 0:\)\. .*torch\.where\.",
    ),
    "function": (
        lambda: Strange(own),
        r"no rule for vmap, at own \(.*\)\. Define setup_context.*generate_vmap_rule = True\.",
    ),
    "only layers": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
        r"vmap does not support weight_norm.*, in the layer _WeightNorm\(\)\. Use other operations",
    ),
}


def people() -> Federated:
    x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    return Federated("six", x, labels, torch.tensor([0, 2, 4, 6]), Examples(x, labels), 3)


@pytest.mark.parametrize("engine", ["factored", "dense"])
@pytest.mark.parametrize("kind", STRANGE)
def test_an_engine_says_what_stands_in_the_way_and_what_to_change(kind: str, engine: str) -> None:
    make, sentence = STRANGE[kind]
    task = Task(make(), "cross_entropy")
    with pytest.raises(
        UserError, match=f"'{engine}' does not support this model: .*{sentence}"
    ) as e:
        choose(engine, task, people())
    assert not re.search("file (us )?an? (issue|bug)", str(e.value))
    assert choose("auto", task, people()).engine.name == "loop"


def test_the_factored_engine_names_the_parameter_and_its_layer() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.ConvTranspose2d(1, 1, 2), nn.Flatten(), nn.Linear(9, 3)
    )
    task = Task(model, "cross_entropy")
    sentence = r"1\.weight, a parameter of shape .*conv_transpose2d.*in the layer ConvTranspose2d\("
    with pytest.raises(UserError, match=sentence):
        choose("factored", task, people())
    assert choose("auto", task, people()).engine.name == "dense"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Complex, "The parameter 'weight' is complex. Use a real one"),
        (
            lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True)),
            r"Layer '0' \(Embedding\) has sparse gradients\. Use sparse=False",
        ),
    ],
)
def test_what_no_engine_can_train_is_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        prepare(algorithms.fedavg(steps=1), people(), make(), 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_is_refused() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(UserError, match=r"compiled by torch\.jit.* Give the module itself"):
        prepare(algorithms.fedavg(steps=1), people(), module, 1)
