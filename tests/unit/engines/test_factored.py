"""The factored engine: every operation it serves, every inner rule, and what it does not serve."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil.data.federated import Examples, Federated
from fedveil.engines.bounding import scales_of
from fedveil.engines.choose import choose
from fedveil.engines.factored import FactoredEngine, FactoredUpdates
from fedveil.engines.loop import LoopEngine
from fedveil.engines.stores import Factors, StoredRows
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.models.lstm import CharLSTM
from fedveil.parts.bound import Bound, Clip, Normalize, within
from fedveil.parts.local import SGD, LocalPlan
from fedveil.parts.schedule import Constant

SIZES = [1, 7, 3, 12, 2, 5]


class Residual(nn.Module):
    """Convolutions with and without bias, group norm, in-place ReLU, a shortcut, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.inner = nn.Conv2d(4, 4, 3, stride=1, padding=1, bias=False)
        self.wide = nn.Conv2d(4, 6, 2, stride=2, dilation=2)
        self.head = nn.Linear(6 * 7 * 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.stem(x)), inplace=True)
        x = x + self.inner(x)
        x = nn.functional.max_pool2d(self.wide(x).tanh(), 1)
        return self.head(x.flatten(1))


class Norms(nn.Module):
    """Layer norms in the middle of a network, one of them over two axes and without a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm([16, 16], bias=False)
        self.linear = nn.Linear(16, 5)
        self.second = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(self.first(x.squeeze(1)))
        return self.head(self.second(rows).relu().mean(1))


class Shared(nn.Module):
    """One linear layer used twice, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(256, 6)
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1)).tanh()
        return self.head(self.again(self.again(x).tanh()))


class Parallel(nn.Module):
    """Two layers on the same input whose outputs are added: they are handed one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(256, 3)
        self.other = nn.Linear(256, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x.flatten(1)) + self.other(x.flatten(1))


class Halves(nn.Module):
    """One convolution on two parts of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, stride=2)
        self.head = nn.Linear(2 * 3 * 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.conv(x[:, :, :8]) - 2 * self.conv(x[:, :, 8:])).flatten(1))


class Grouped(nn.Module):
    """Padding by name, even kernels too; channels in groups, one of these layers used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(1, 4, 3, padding="same")
        self.even = nn.Conv2d(4, 4, 2, padding="same", bias=False)
        self.each = nn.Conv2d(4, 4, 3, groups=4, padding=1)
        self.halves = nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
        self.valid = nn.Conv2d(6, 2, (1, 3), padding="valid", dilation=2)
        self.head = nn.Linear(2 * 7 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.even(self.same(x).tanh())
        x = self.each(self.each(x).tanh()) + x
        return self.head(self.valid(self.halves(x).tanh()).flatten(1))


def softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 9), nn.ReLU(), nn.Linear(9, 3))


MODULES = {
    "softmax": softmax, "mlp": mlp, "residual": Residual, "norms": Norms, "shared": Shared,
    "parallel": Parallel, "halves": Halves, "grouped": Grouped,
}  # fmt: skip
PLANS = {
    "one step": SGD(Constant(0.1), steps=1),
    "one step, decay": SGD(Constant(0.1), steps=1, batch=4, momentum=0.9, weight_decay=0.3),
    "full batches": SGD(Constant(0.1), steps=5),
    "batches": SGD(Constant(0.1), epochs=2, batch=3),
    "momentum": SGD(Constant(0.05), steps=4, momentum=0.9),
    "momentum, batches": SGD(Constant(0.05), epochs=2, batch=2, momentum=0.9),
    "decay": SGD(Constant(0.1), steps=4, weight_decay=0.3),
    "decay, momentum, batches": SGD(
        Constant(0.05), epochs=2, batch=2, momentum=0.8, weight_decay=0.3
    ),
}


def population() -> Federated:
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.random((sum(SIZES), 1, 16, 16), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, sum(SIZES)))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(SIZES)]))
    return Federated("ragged", images, labels, offsets, Examples(images, labels), classes=3)


def seeded(module: nn.Module) -> nn.Module:
    """The module with weights from a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.copy_(torch.randn(leaf.shape, generator=generator) / leaf[0].numel() ** 0.5)
    return module


def task_of(make) -> Task:
    return Task(seeded(make()), "cross_entropy")


def plan_of(local: SGD, data: Federated, proximal: float = 0.0) -> LocalPlan:
    plan = local.plan(data.sizes, 0, np.random.default_rng(3))
    return dataclasses.replace(plan, proximal=proximal)


CASES = [  # a pull to the start adds to each parameter alike: every module and plan has both
    (name, local, 0.4 * ((i + j) % 2)) for i, name in enumerate(MODULES)
    for j, local in enumerate(PLANS)
]  # fmt: skip


@pytest.mark.parametrize(("name", "local", "proximal"), CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_rows_norms_and_sums_are_those_of_one_client_after_the_other(
    name: str, local: str, proximal: float
) -> None:
    data, task = population(), task_of(MODULES[name])
    group = Group(data, np.arange(len(SIZES)), plan_of(PLANS[local], data, proximal))
    x = task.flatten()
    expected = LoopEngine(task).updates(x, group).rows()
    updates = FactoredEngine(task, 100).updates(x, group)
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(updates.rows(), expected, atol=1e-5)
    assert torch.allclose(updates.norms(), expected.double().norm(dim=1), rtol=1e-4)
    scale = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    assert torch.allclose(updates.weighted_sum(scale), scale.float() @ expected, atol=2e-5)


def test_sequences_go_through_embedding_and_recurrence() -> None:
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 7, (20, 6)))
    offsets = torch.tensor([0, 4, 9, 20])
    data = Federated("roles", tokens, tokens.roll(-1, 1), offsets, Examples(tokens, tokens), 7)
    task = task_of(lambda: CharLSTM(7, embedding=3, hidden=5, layers=2))
    for local in (PLANS["full batches"], PLANS["decay, momentum, batches"]):
        group = Group(data, np.arange(3), plan_of(local, data))
        expected = LoopEngine(task).updates(task.flatten(), group).rows()
        found = FactoredEngine(task, 100).updates(task.flatten(), group)
        assert torch.allclose(found.rows(), expected, atol=1e-5)
        assert torch.allclose(found.norms(), expected.double().norm(dim=1), rtol=1e-4)


# How parameters are held


def held(make, local: SGD, width: int = 1) -> list[object]:
    """What holds each parameter in the end."""
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.random((4 * width, 1, 16, 16), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 4 * width))
    offsets = torch.arange(5) * width
    data = Federated("equal", images, labels, offsets, Examples(images, labels), classes=3)
    task = task_of(make)
    group = Group(data, np.arange(4), local.plan(data.sizes, 0, rng))
    updates = FactoredEngine(task, 10).updates(task.flatten(), group)
    assert isinstance(updates, FactoredUpdates)
    return list(updates._stores)


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 3))


def test_single_examples_are_never_written_out() -> None:
    """DP-SGD and DP-LSGD: a factor a step, one in all where the inputs stay the same."""
    first, _, second, _ = held(wide, SGD(Constant(0.1), steps=2))
    assert isinstance(first, Factors)
    assert (first.merged, first.rank) == (True, 1)
    assert isinstance(second, Factors)
    assert (second.merged, second.rank) == (False, 2)


def test_many_factors_are_written_out() -> None:
    _, _, second, _ = held(wide, SGD(Constant(0.1), steps=5))
    assert isinstance(second, StoredRows)
    first = held(wide, SGD(Constant(0.1), steps=3), width=60)[0]
    assert isinstance(first, StoredRows)


def test_norms_are_not_fooled_by_factors_that_cancel() -> None:
    """Two opposite steps: the rest is rounding, and must not be told shorter than it may be."""
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(3, 1, size, generator=generator) for size in (50, 40))
    store = Factors(torch.zeros(40, 50), merged=False)
    store.inputs, store.slopes = torch.cat([a, a * (1 + 1e-6)], 1), torch.cat([g, -g], 1)
    store.rank = 2
    true = store.rows().double().norm(dim=1)
    assert bool((store.squares().sqrt() >= true).all())


def message_of(a: Tensor, g: Tensor, bound: Bound, report: float = 1.0) -> Tensor:
    """What a client with these factors sends, its update times `report` being bounded."""
    store = Factors(torch.zeros(g.shape[1], a.shape[1]), True, a[None], g[None], rank=len(a))
    moved = FactoredUpdates((store,), [store.shared.numel()], 1)
    updates = moved.affine(report, 0.0, torch.zeros(store.shared.numel()))
    scale = scales_of(updates.norms(), bound, bound.norms(store.shared.numel()))
    return updates.weighted_sum(scale).double()


CANCELLING = [  # rank, height of inputs and of slopes, and what is left of the latter
    (2, 755.1, 227.9, -(2.0**-6)),
    (16, 986.94, 588.86, -(2.0**-8)),
    (64, 142.65, 566.4, 2.0**-9),
    (256, 687.07, 139.4, 2.0**-12),
]


@pytest.mark.parametrize(("rank", "height", "width", "rest"), CANCELLING)
def test_a_message_of_factors_that_cancel_keeps_the_bound(
    rank: int, height: float, width: float, rest: float
) -> None:
    """float32 sums of equal products err in one direction, by more than the margin of a bound."""
    for shift in np.linspace(0, 1e-3, 10):
        a, g = torch.full((rank, 300), height * (1 + shift)), torch.full((rank, 200), width)
        g[1:] = -width / (rank - 1) * (1 + rest)
        assert 0.5 < float(message_of(a, g, Clip(1.0)).norm()) <= 1.0


EXTREMES = [
    (1e-6, 1.0, 1e36, 1e-6),  # scales that float32 cannot hold: over a large learning rate
    (1e12, 1e-20, 1e-20, 1.0),  # scales that overflow: over a tiny learning rate
    (1.0, 1e30, 1e-5, 2e-11),  # slopes that lose their digits, of huge inputs
    (1.0, 1e35, 1e-25, 3e-6),  # the same, with ordinary scales
    (1.0, 1e-40, 1e11, 1e3),  # slopes that overflow, of tiny inputs
    (1.0, 0.0, 0.0, 1.0),
]


@pytest.mark.parametrize(("report", "inputs", "slopes", "norm"), EXTREMES)
@pytest.mark.parametrize("kind", [Clip, Normalize])
def test_messages_of_extreme_updates_are_finite_and_keep_the_bound(
    kind: type[Clip] | type[Normalize], report: float, inputs: float, slopes: float, norm: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    for rank in (1, 3):
        for shrink in (1.0, 0.71, 0.3):
            a = shrink * inputs * (0.5 + torch.rand(rank, 64, generator=rng))
            g = slopes * (0.5 + torch.rand(rank, 64, generator=rng))
            assert float(message_of(a, g, kind(norm), report).norm()) <= norm  # false for NaN


# What is not served


class Standardized(nn.Module):
    """A weight that goes through other operations before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 256))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), self.weight - self.weight.mean())[:, :3]


class Transposed(nn.Module):
    """A weight that is read through a property, which gives another tensor of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 256))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.weight.T)[:, :3]


def test_a_property_that_gives_the_weight_away_is_noticed() -> None:
    with pytest.raises(UserError, match=r"this model: weight, a parameter .*, is used by T,"):
        choose("factored", task_of(Transposed), population())


def test_questions_about_a_weight_s_shape_are_answered() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(256, 3)

        def forward(self, x: Tensor) -> Tensor:
            assert self.head.weight.dtype is torch.float32
            return self.head(x.reshape(-1, self.head.weight.shape[1]))

    assert choose("factored", task_of(Asking), population()).engine.name == "factored"


def test_a_weight_used_in_another_way_falls_to_dense_and_is_named(caplog) -> None:
    caplog.set_level("INFO", logger="fedveil")
    task, data = task_of(Standardized), population()
    assert choose("auto", task, data).engine.name in ("dense", "loop")
    assert "weight, a parameter of shape" in caplog.text
    with pytest.raises(UserError, match=r"this model: weight, a parameter .*, is used by"):
        choose("factored", task, data)


def test_convolutions_of_other_kinds_fall_to_dense() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten(), nn.Linear(648, 3))

    assert choose("auto", task_of(make), population()).engine.name in ("dense", "loop")


def test_a_frozen_body_is_used_as_it_is() -> None:
    data, module = population(), seeded(mlp())
    module[1].requires_grad_(False)
    task = Task(module, "cross_entropy")
    group = Group(data, np.arange(len(SIZES)), plan_of(PLANS["full batches"], data))
    expected = LoopEngine(task).updates(task.flatten(), group).rows()
    found = FactoredEngine(task, 100).updates(task.flatten(), group)
    assert torch.allclose(found.rows(), expected, atol=1e-6)


@pytest.mark.parametrize("inputs", [784, 3072, 12_288, 150_528])
def test_norms_hold_for_inputs_whose_float32_products_would_not(inputs: int) -> None:
    """A dot product of equal numbers errs in one direction, and the more the longer it is."""
    x = torch.full((1, inputs), 0.37)
    data = Federated("flat", x, torch.zeros(1, dtype=torch.long), torch.tensor([0, 1]),
                     Examples(x, torch.zeros(1, dtype=torch.long)), 3)  # fmt: skip
    task = task_of(lambda: nn.Linear(inputs, 3))
    group = Group(data, np.arange(1), SGD(Constant(0.1), steps=2).plan(data.sizes, 0, None))
    updates = FactoredEngine(task, 4).updates(task.flatten(), group)
    scale = scales_of(updates.norms(), Normalize(1.0), within(1.0, task.dim))
    message = updates.weighted_sum(scale).double()
    assert float(message.norm()) <= 1.0
    assert float(message.norm()) > 1 - 1e-5
