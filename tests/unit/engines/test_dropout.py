"""Dropout: masks from each client's own stream, equal on every engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.dropout import LEVELS, DropoutStreams, Masks, dropped, example_seeds
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import prepare

LENGTH, SIZE, CLASSES = 5, 8, 3


class Called(nn.Module):
    """Drops with the function instead of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class TimeFirst(nn.Module):
    """A module that wants [length, n, size]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(0, 1))
        return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)


class Attends(nn.Module):
    """torch's attention, of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def encoder(**options: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.3, **options)


INNER: dict[str, Callable[[], nn.Module]] = {
    "first of all": lambda: nn.Dropout(0.3),
    "after a layer": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5), nn.Tanh()),
    "in place": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5, inplace=True)),
    "twice": lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(SIZE, SIZE), nn.Dropout(0.6)),
    "function": Called,
    "channels": lambda: nn.Dropout1d(0.4),
    "alpha": lambda: nn.AlphaDropout(0.3),
    "channels, alpha": lambda: nn.FeatureAlphaDropout(0.3),
    "everything": lambda: nn.Dropout(1.0),
    "between recurrences": lambda: TimeFirst(nn.GRU(SIZE, SIZE, 2, dropout=0.4)),
    "attention": Attends,
    "encoder": lambda: encoder(batch_first=True),
    "encoder, time first": lambda: TimeFirst(encoder()),
}


def model(inner: Callable[[], nn.Module]) -> nn.Module:
    return construct(
        lambda: nn.Sequential(inner(), nn.Flatten(), nn.Linear(LENGTH * SIZE, CLASSES)), seed=1
    )


def population(outlier: float | None = None) -> Federated:
    rng = np.random.default_rng(0)
    sizes = [1, 4, 2, 3]
    inputs = torch.from_numpy(rng.normal(size=(10, LENGTH, SIZE)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, CLASSES, 10))
    if outlier is not None:
        inputs[1:5] = outlier
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    return Federated("rows", inputs, labels, offsets, Examples(inputs, labels), CLASSES)


def engines(task: Task) -> list[Engine]:
    return [LoopEngine(task), DenseEngine(task, 4), FactoredEngine(task, 4)]


def rows(
    engine: Engine,
    task: Task,
    data: Federated,
    batch: int | None = None,
    round: int = 0,
    clients: tuple[int, ...] = (0, 1, 2, 3),
) -> Tensor:
    who = np.array(clients)
    local = SGD(Constant(0.1), steps=2, batch=batch)
    plan = local.plan(data.sizes[who], 0, np.random.default_rng(0))
    group = Group(data, who, plan, DropoutStreams(5, round, who))
    return engine.updates(task.flatten(), group).rows().clone()


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("kind", INNER)
def test_engines_drop_the_same(kind: str, batch: int | None) -> None:
    task, data = Task(model(INNER[kind]), "cross_entropy"), population()
    wanted, *others = (rows(engine, task, data, batch) for engine in engines(task))
    for found in others:
        assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    quiet = Task(model(INNER[kind]).eval(), "cross_entropy")
    assert not torch.allclose(rows(LoopEngine(quiet), quiet, data, batch), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", INNER)
def test_models_with_dropout_are_served_by_every_engine(kind: str) -> None:
    task = Task(model(INNER[kind]), "cross_entropy")
    for name in ("factored", "dense", "loop"):
        assert choose(name, task, population()).engine.name == name


@pytest.mark.parametrize("kind", ["twice", "encoder"])
def test_a_client_s_masks_depend_on_no_other_client(kind: str) -> None:
    """Bit by bit beside other values, and up to rounding in another group."""
    task = Task(model(INNER[kind]), "cross_entropy")
    for engine in engines(task):
        present = rows(engine, task, population())
        changed = rows(engine, task, population(outlier=100.0))
        assert torch.equal(changed[[0, 2, 3]], present[[0, 2, 3]])
        alone = rows(engine, task, population(), clients=(2,))
        assert torch.allclose(alone[0], present[2], atol=1e-6)


def test_masks_differ_between_rounds_and_repeat_with_the_key() -> None:
    task, data = Task(model(INNER["twice"]), "cross_entropy"), population()
    for engine in engines(task):
        first, again, later = (rows(engine, task, data, round=k) for k in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.allclose(first, later, atol=1e-3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_with_probability_p_independently(p: float) -> None:
    """n = 2·10⁵ entries: a rate off by 0.005, or a correlation of 0.02, fails; chance < 1e-5."""
    seeds = example_seeds(DropoutStreams(0, 0, np.arange(10)).seeds(), 3, 5).flatten(0, 1)
    masks = Masks(seeds, [torch.Size([1, 4000])] * 2)
    first, second = ((dropped(masks, torch.ones(50, 4000), p) > 0).float() for _ in range(2))
    assert abs(float(first.mean()) - (1 - p)) < 4.5 * (p * (1 - p) / 2e5) ** 0.5
    pairs = [
        (first, second),  # two calls
        (first[:-1], first[1:]),  # two examples, mostly of one client
        (first[:-5], first[5:]),  # two clients
        (first[:, :-1], first[:, 1:]),  # two positions
    ]
    for one, other in pairs:
        both = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 4.5 / 190000**0.5


def test_uniform_numbers_fill_their_range() -> None:
    numbers = Masks(example_seeds(np.array([7], np.uint64), 0, 1)[0, 0]).uniform((100000,))
    counts = torch.bincount(numbers // (LEVELS // 100), minlength=100)[:100].double()
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 180  # χ² with 99 degrees: chance < 1e-6


def test_dropout_off_is_never_refused_and_changes_nothing() -> None:
    """p = 0, and evaluation mode of the whole model or of one layer."""
    data, recipe = population(), algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)

    def after(inner: nn.Module, evaluation: bool = False) -> Tensor:
        module = model(lambda: inner)
        module = module.eval() if evaluation else module
        training = prepare(recipe, data, module, 1, engine="factored")
        assert not training.task.dropouts(torch.Size([LENGTH, SIZE]), torch.float32)
        return rows(training.engine, training.task, data)

    wanted = after(nn.Identity())
    assert torch.equal(after(nn.Dropout(0.0)), wanted)
    assert torch.equal(after(nn.Dropout(0.5).eval()), wanted)
    assert torch.equal(after(Called(), evaluation=True), wanted)


def test_training_with_dropout_repeats_and_evaluates_without_it() -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    states = []
    for _ in range(2):
        training = prepare(recipe, population(), model(INNER["attention"]), 2)
        before = torch.get_rng_state()
        training.step()
        training.step()
        assert torch.equal(torch.get_rng_state(), before)
        once, again = (training.task.evaluate(training.state.x, population().test) for _ in "12")
        assert once == again
        states.append(training.state.x)
    assert torch.equal(*states)


def test_a_model_with_and_without_dropout_gets_unrelated_noise() -> None:
    """They would release different models with the same noise, which reveals their difference."""
    recipe, data = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), population()
    with_it, without = (model(Called), model(Called).eval())
    keys = {prepare(recipe, data, module, 2).key for module in (with_it, without)}
    assert len(keys) == 2


def test_other_randomness_is_still_refused() -> None:
    module = nn.Sequential(nn.Dropout(0.1), nn.RReLU(), nn.Flatten(), nn.Linear(40, CLASSES))
    with pytest.raises(UserError, match="global random generator"):
        prepare(algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), population(), module, 2)


class Noisy(nn.Module):
    """Adds noise in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class OutputOf(nn.Module):
    """The sequence that a recurrent layer returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


RANDOM: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "RReLU": (nn.RReLU, r"'0' \(RReLU\)"),
    "noise": (Noisy, r"'0' \(Noisy\)"),
    "projected": (
        lambda: OutputOf(nn.LSTM(SIZE, 16, 2, proj_size=SIZE, dropout=0.5, batch_first=True)),
        r"'0\.inner' \(LSTM\)",
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", RANDOM)
def test_random_layers_are_refused_by_name_and_not_switched_off(kind: str) -> None:
    make, layer = RANDOM[kind]
    module = nn.Sequential(make(), nn.Flatten(), nn.Linear(40, CLASSES))
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    with pytest.raises(UserError, match=f"Layer {layer} draws from a global random generator"):
        prepare(recipe, population(), module, 2)
    assert prepare(recipe, population(), module.eval(), 2).step()


class DropsWeights(nn.Module):
    """DropConnect (Wan et al. 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(SIZE, 6), nn.Linear(6 * LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = F.dropout(self.inner.weight, 0.3, self.training)
        return self.out(F.linear(x, weight, self.inner.bias).relu().flatten(1))


def test_dropout_of_a_weight_has_one_mask_for_each_step() -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    run = prepare(recipe, population(), DropsWeights(), 2)
    run.step()
    assert run.engine.name == "loop"
    masks = Masks(example_seeds(np.zeros(1, np.uint64), 0, 3)[0], [torch.Size([6, 4])])
    alone = Masks(example_seeds(np.zeros(1, np.uint64), 0, 1)[0, 0])
    assert torch.equal(masks.uniform(torch.Size([6, 4])), alone.uniform(torch.Size([6, 4])))


def test_dropout_without_an_axis_of_examples_is_refused() -> None:
    masks = Masks(example_seeds(np.zeros(1, np.uint64), 0, 3)[0], [torch.Size([7])])
    with pytest.raises(UserError, match="have no axis of their own"):
        masks.uniform(torch.Size([8]))
