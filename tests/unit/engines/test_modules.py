"""Modules in legal but unusual forms: computed as by the loop, or refused with a sentence."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fedveil as fv
from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import make_task, prepare

SIZES = (2, 1, 4, 2, 3)
RECIPE = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
PLANS = (SGD(Constant(0.1), steps=8, batch=2), SGD(Constant(0.1), steps=4))


class Model(nn.Module):
    """Calls a function with itself, so that it can be written in one line."""

    def __init__(self, call: Callable[[Model, Tensor], Tensor], **parts: object) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def federated(inputs: Tensor) -> Federated:
    labels = torch.arange(12) % 3
    offsets = torch.tensor([0, *np.cumsum(SIZES)])
    examples = Examples(inputs.clone(), labels)
    return Federated("made up", inputs, labels, offsets, examples, 3)


def numbers(*shape: int) -> Federated:
    return federated(torch.randn(12, *shape, generator=torch.Generator().manual_seed(0)))


def tokens() -> Federated:
    return federated(torch.randint(0, 20, (12, 6), generator=torch.Generator().manual_seed(0)))


VECTORS, IMAGES, TEXTS = (numbers, (4,)), (numbers, (3, 8, 8)), (tokens, ())


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(shape))


def image(before: Callable[[Tensor], Tensor]) -> nn.Module:
    """A convolution behind a function of the batch."""
    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "out": nn.Linear(256, 3)}
    return Model(lambda m, x: m.out(m.conv(before(x)).relu().flatten(1)), **parts)


def warning(m: Model, x: Tensor) -> Tensor:
    warnings.warn("old", FutureWarning, stacklevel=1)
    return m.out(x)


def detached(m: Model, x: Tensor) -> Tensor:
    h = m.inner(x)
    return m.out(h) + m.other(h.detach())


def without_gradient(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.inner(x)
    return m.out(m.inner(x)) + m.other(h)


def pair() -> dict[str, nn.Module]:
    return {"inner": nn.Linear(4, 8), "out": nn.Linear(8, 3), "other": nn.Linear(8, 3)}


def with_states(m: Model, x: Tensor) -> Tensor:
    start = x.new_zeros(1, len(x), 4)
    return m.out(m.cells(x, [start, start])[0][:, -1])


# The module, its data, and the best engine that supports it
SERVED: dict[str, tuple[Callable[[], nn.Module], tuple, str]] = {
    "transposed images": (lambda: image(lambda x: x.transpose(2, 3)), IMAGES, "factored"),
    "ReLU in place": (lambda: image(lambda x: x.relu_()), IMAGES, "factored"),
    "shifted in place": (lambda: image(lambda x: x.sub_(0.5)), IMAGES, "factored"),
    "one image at a time": (
        lambda: Model(
            lambda m, x: m.out(torch.stack([m.conv(one) for one in x]).flatten(1)),
            conv=nn.Conv2d(3, 2, 3),
            out=nn.Linear(72, 3),
        ),
        IMAGES,
        "factored",
    ),
    "one example at a time": (
        lambda: Model(lambda m, x: torch.stack([m.out(one) for one in x]), out=nn.Linear(4, 3)),
        VECTORS,
        "factored",
    ),
    "F.linear by name": (
        lambda: Model(lambda m, x: F.linear(x, weight=m.w, bias=m.b), w=normal(3, 4), b=normal(3)),
        VECTORS,
        "factored",
    ),
    "F.conv2d by name": (
        lambda: Model(lambda m, x: F.conv2d(x, weight=m.w).mean((2, 3)), w=normal(3, 3, 3, 3)),
        IMAGES,
        "factored",
    ),
    "F.group_norm by name": (
        lambda: Model(
            lambda m, x: m.out(F.group_norm(input=x, num_groups=1).flatten(1)),
            out=nn.Linear(192, 3),
        ),
        IMAGES,
        "factored",
    ),
    "matmul by name": (
        lambda: Model(lambda m, x: torch.matmul(x, other=m.w), w=normal(4, 3)),
        VECTORS,
        "factored",
    ),
    "mm by name": (
        lambda: Model(lambda m, x: torch.mm(x, mat2=m.w), w=normal(4, 3)),
        VECTORS,
        "factored",
    ),
    "a number": (
        lambda: Model(lambda m, x: m.out(x) / m.heat.exp(), out=nn.Linear(4, 3), heat=normal()),
        VECTORS,
        "factored",
    ),
    "a warning": (lambda: Model(warning, out=nn.Linear(4, 3)), VECTORS, "factored"),
    "detached features": (lambda: Model(detached, **pair()), VECTORS, "factored"),
    "features without gradient": (lambda: Model(without_gradient, **pair()), VECTORS, "factored"),
    "list of states": (
        lambda: Model(with_states, cells=nn.LSTM(8, 4, batch_first=True), out=nn.Linear(4, 3)),
        (numbers, (6, 8)),
        "factored",
    ),
    "last row as padding": (
        lambda: Model(
            lambda m, x: m.out(F.embedding(x, m.table, padding_idx=-1).mean(1)),
            table=normal(20, 8),
            out=nn.Linear(8, 3),
        ),
        TEXTS,
        "factored",
    ),
    "bfloat16": (lambda: nn.Linear(4, 3).bfloat16(), VECTORS, "factored"),
}


@pytest.mark.filterwarnings("ignore:old")
@pytest.mark.parametrize("name", SERVED)
def test_engines_agree(name: str) -> None:
    make, (kind, shape), best = SERVED[name]
    torch.manual_seed(0)
    data = kind(*shape)
    task = make_task(make(), data, 0)
    engines = [
        choose(name, task, data, local).engine
        for name, local in zip(dict.fromkeys((best, "dense")), PLANS, strict=False)
    ]
    for local in PLANS:
        group = Group(data, np.arange(5), local.plan(data.sizes, 0, np.random.default_rng(0)))
        expected = LoopEngine(task).updates(task.flatten(), group).rows().clone()
        for engine in engines:
            found = engine.updates(task.flatten(), group)
            assert torch.allclose(found.rows(), expected, atol=1e-6), engine.name


def norms_with_one_weight() -> nn.Module:
    parts = [nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)]
    parts[3].weight = parts[0].weight
    return nn.Sequential(*parts)


def test_a_shared_scale_with_two_shifts_is_named() -> None:
    task = Task(norms_with_one_weight(), "cross_entropy")
    with pytest.raises(UserError, match=r"0\.weight is used with two different biases or scales"):
        choose("factored", task, numbers(4))
    assert choose("auto", task, numbers(4)).engine.name == "dense"


@pytest.mark.parametrize("kind", [ValueError, AssertionError, TypeError])
def test_a_model_of_several_examples_is_computed_client_by_client(kind: type[Exception]) -> None:
    def mixed(m: Model, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise kind("needs two examples")
        return m.out(x - x.mean(0))

    data = numbers(4)
    data = Federated("pairs", data.inputs, data.labels, 2 * torch.arange(7), data.test, 3)
    run = prepare(RECIPE, data, Model(mixed, out=nn.Linear(4, 3)), 2)
    run.step()
    assert run.engine.name == "loop"


def test_momentum_of_an_unused_parameter() -> None:
    module = Model(lambda m, x: m.out(x), out=nn.Linear(4, 3), unused=nn.Linear(2, 2))
    task = Task(module, "cross_entropy")
    data, local = numbers(4), SGD(Constant(0.1), steps=3, momentum=0.9)
    group = Group(data, np.arange(5), local.plan(data.sizes, 0, np.random.default_rng(0)))
    rows = [
        choose(name, task, data, local).engine.updates(task.flatten(), group).rows()
        for name in ("loop", "dense", "factored")
    ]
    assert torch.allclose(rows[0], rows[1], atol=1e-6)
    assert torch.allclose(rows[0], rows[2], atol=1e-6)


def over_itself() -> nn.Module:
    model = Model(lambda m, x: m.short(x), inner=nn.Linear(4, 8), out=nn.Linear(8, 3))
    model.short = lambda x: model.out(model.inner(x))
    return model


def writing(m: Model, x: Tensor) -> Tensor:
    m.w.add_(1)
    return x @ m.w


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple, str]] = {
    "a lambda over itself": (over_itself, VECTORS, "is not among its own and would not be trained"),
    "a lock": (
        lambda: Model(lambda m, x: m.out(x), out=nn.Linear(4, 3), lock=threading.Lock()),
        VECTORS,
        "cannot be copied: cannot pickle",
    ),
    "a computed tensor": (
        lambda: Model(lambda m, x: m.out(x), out=nn.Linear(4, 3), twice=2 * normal(3)),
        VECTORS,
        "an attribute is a tensor that was computed from parameters",
    ),
    "no gradient": (
        lambda: Model(lambda m, x: m.out(x).detach(), out=nn.Linear(4, 3)),
        VECTORS,
        "its outputs have no gradient",
    ),
    "a written parameter": (
        lambda: Model(writing, w=normal(4, 3)),
        VECTORS,
        "writes to a parameter",
    ),
    "sparse gradients": (
        lambda: Model(
            lambda m, x: F.embedding(x, m.table, sparse=True).mean(1)[:, :3], table=normal(20, 8)
        ),
        TEXTS,
        "it has sparse gradients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_with_a_sentence(name: str) -> None:
    make, (kind, shape), sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        prepare(RECIPE, kind(*shape), make(), 2)


def test_evaluation_leaves_the_test_examples_as_they_are() -> None:
    data = numbers(4)
    task = Task(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), "cross_entropy")
    before = data.test.inputs[:].clone()
    task.evaluate(task.flatten(), data.test)
    assert torch.equal(data.test.inputs[:], before)


class Padded(nn.Module):
    """torch's encoder with a padding mask, as it is made by default."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.table, self.encoder = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.table(x), src_key_padding_mask=x == 19).mean(1))


def test_an_encoder_with_padding_is_served_by_the_factored_engine() -> None:
    given = Padded()
    assert prepare(RECIPE, tokens(), given, 2).engine.name == "factored"
    assert given.encoder.use_nested_tensor


@pytest.mark.parametrize("engine", ["auto", "loop", "dense", "factored"])
def test_a_model_without_products_of_matrices_has_an_engine(engine: str) -> None:
    """Before, the estimate of its cost was 0, by which group sizes are divided."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            total = (x * self.scale).sum(1)
            return torch.stack([total, -total], 1)

    inputs, labels = torch.rand(8, 4), torch.tensor([0, 1] * 4)
    data = fv.Federated.from_arrays(inputs, labels, [0, 0, 1, 1, 2, 2, 3, 3])
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    assert prepare(recipe, data, Scaled(), rounds=1, engine=engine).engine.name
