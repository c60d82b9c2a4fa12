"""One client alone: what a client sends does not depend on the others, whatever its model does."""

from __future__ import annotations

import itertools
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
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine, NotServedError
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.loop import begin, bounded_rows, scales_of
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training import prepare

Forward = Callable[["Mixing", Tensor], Tensor]
FEATURES, CLASSES = 4, 3


class Mixing(nn.Module):
    """A linear layer behind a function of the whole batch."""

    def __init__(self, mix: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.mix(self, x))


class ForwardsMean(torch.autograd.Function):
    """Per example on the way forward; on the way back every example gets the batch's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g + g.mean(0)


def attend(x: Tensor) -> Tensor:
    return x + torch.softmax(x @ x.T, dim=-1) @ x


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0] += x.mean(0)
    return x + y


def branch(x: Tensor) -> Tensor:
    return x - x.mean(0) if float(x.max()) > 2 else x


MIXING: dict[str, Forward] = {
    "standardized": lambda _, x: (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3),
    "functional batch norm": lambda _, x: (
        F.batch_norm(x, None, None, training=True) if len(x) > 1 else x
    ),
    "global norm": lambda _, x: x / (x.norm() + 1e-3),
    "largest of all": lambda _, x: x - x.amax(),
    "through a view": lambda _, x: x + x.reshape(-1).mean(),
    "through a transpose": lambda _, x: x - x.T.mean(-1),
    "product over the batch": lambda _, x: x + (x.T @ x).mean(0),
    "attention across the batch": lambda _, x: attend(x),
    "cumulative": lambda _, x: x.cumsum(0),
    "sorted": lambda _, x: x.sort(0).values,
    "rolled": lambda _, x: x.roll(1, 0),
    "written in place": lambda _, x: written(x),
    "number of rows": lambda _, x: x * len(x),
    "branch": lambda _, x: branch(x),
    "einsum": lambda _, x: x + torch.einsum("nf,mf->f", x, x) / 10,
    "hidden in a gradient": lambda _, x: ForwardsMean.apply(x),
}


def people(scale: float = 1.0, outlier: float | None = None, size: int = 3) -> Federated:
    """Six clients; the third one's numbers are others if there is an outlier."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(6 * size, FEATURES)).astype(np.float32)) * scale
    labels = torch.from_numpy(rng.integers(0, CLASSES, 6 * size))
    if outlier is not None:
        inputs[2 * size : 3 * size] = outlier
    offsets = torch.arange(0, 6 * size + 1, size)
    return Federated("people", inputs, labels, offsets, Examples(inputs, labels), CLASSES)


def rows(engine: Engine, task: Task, data: Federated, clients: np.ndarray) -> Tensor:
    plan = SGD(Constant(0.1), steps=2).plan(data.sizes[clients], 0, np.random.default_rng(0))
    return engine.updates(task.flatten(), Group(data, clients, plan)).rows().clone()


def engines(task: Task) -> list[Engine]:
    return [FactoredEngine(task, 6), DenseEngine(task, 6), LoopEngine(task)]


def served(engine: Engine, task: Task, data: Federated) -> bool:
    """Whether an engine takes the module at all: to refuse it is safe."""
    try:
        rows(engine, task, data, np.arange(6))
    except (NotServedError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("size", [1, 3], ids=["example", "client"])
def test_one_client_does_not_move_another_whatever_the_model_mixes(mix: Forward, size: int) -> None:
    torch.manual_seed(0)
    task = Task(Mixing(mix), "cross_entropy")
    everyone, others = np.arange(6), np.array([0, 1, 3, 4, 5])
    for scale, outlier in itertools.product((1e-2, 1.0, 30.0), (0.0, 1e4, -3.0)):
        data, changed = people(scale, size=size), people(scale, outlier, size)
        alone = rows(LoopEngine(task), task, data, everyone)[others]
        for engine in engines(task):
            if not served(engine, task, data):
                continue
            present = rows(engine, task, data, everyone)[others]
            assert torch.equal(rows(engine, task, changed, everyone)[others], present), engine.name
            for found in (present, rows(engine, task, data, others)):
                assert float((found - alone).norm()) <= 1e-5 * (1 + float(alone.norm()))


def test_the_loop_serves_every_model_and_factored_serves_most() -> None:
    """The check above reaches the engine it is about."""
    tasks = {name: Task(Mixing(mix), "cross_entropy") for name, mix in MIXING.items()}
    for kind, least in ((LoopEngine, len(MIXING)), (DenseEngine, 14), (FactoredEngine, 14)):
        count = sum(served(kind(task, 6), task, people()) for task in tasks.values())
        assert count >= least, kind


@pytest.mark.parametrize("unit", ["client", "example"])
def test_the_sum_moves_by_one_message_under_a_model_that_standardizes(unit: str) -> None:
    """Before the bound held for each client alone, one of 60 moved the others' messages too."""
    torch.manual_seed(0)
    make = algorithms.dp_norm_fedavg if unit == "client" else algorithms.dp_sgd
    recipe = make(rate=1.0, noise_multiplier=1.0)
    task = Task(Mixing(MIXING["standardized"]), "cross_entropy")
    size = 3 if unit == "client" else 1
    sums = []
    for outlier in (None, 1e4):
        data = people(1.0, outlier, size)
        engine = choose("auto", task, data, recipe.local, 6).engine
        plan = recipe.local.plan(data.sizes, 0, np.random.default_rng(0))
        updates = engine.updates(task.flatten(), Group(data, np.arange(6), plan))
        scales = scales_of(updates.norms(), recipe.bound)
        sums.append(bounded_rows(updates, scales).double().sum(0))
    moved = float((sums[0] - sums[1]).norm())
    assert moved <= 2 * recipe.bound.norms(task.dim).l2 * (1 + 1e-6)


# State: what a module keeps between calls

KEPT: list[object] = []


def remember_globally(x: Tensor) -> None:
    KEPT[:] = [x.detach()]


def keep(name: str, value: Callable[[Mixing, Tensor], object]) -> Forward:
    def mix(module: Mixing, x: Tensor) -> Tensor:
        setattr(module, name, value(module, x))
        return x

    return mix


def write(change: Callable[[Mixing, Tensor], object]) -> Forward:
    def mix(module: Mixing, x: Tensor) -> Tensor:
        change(module, x)
        return x

    return mix


def closure() -> Forward:
    seen: list[Tensor] = []
    return write(lambda _, x: seen.append(x.detach()))


def counted_in_a_closure() -> Forward:
    ticks = itertools.count()
    return write(lambda _, x: next(ticks))


STATEFUL: dict[str, Callable[[], Forward]] = {
    "attribute": lambda: keep("last", lambda m, x: x.detach()),
    "counter": lambda: keep("calls", lambda m, x: getattr(m, "calls", 0) + 1),
    "buffer": lambda: write(lambda m, x: m.register_buffer("seen", x.detach())),
    "class attribute": lambda: write(
        lambda m, x: setattr(Mixing, "calls", getattr(Mixing, "calls", 0) + 1)
    ),
    "closure": closure,
    "iterator in a closure": counted_in_a_closure,
    "global": lambda: write(lambda m, x: remember_globally(x)),
    "through .data": lambda: write(lambda m, x: m.linear.stats.data.add_(1.0)),
    "global randomness": lambda: lambda m, x: x * torch.rand(1),
    "dropout in eval mode": lambda: lambda m, x: F.dropout(x, training=True),
    "NumPy's randomness": lambda: write(lambda m, x: np.random.rand()),  # noqa: NPY002
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_a_model_that_keeps_anything_is_refused_before_it_sees_data(
    make: Callable[[], Forward], engine: str
) -> None:
    module = Mixing(make())
    module.linear.stats = torch.zeros(2)
    with pytest.raises(UserError, match="when it is called"):
        prepare(algorithms.dp_fedavg(noise_multiplier=1.0), people(), module, 2, engine=engine)
    vars(Mixing).get("calls") and delattr(Mixing, "calls")


def test_state_that_only_rare_data_write_ends_the_round_before_it_is_released() -> None:
    """No made-up example looks like this one."""

    def rarely(module: Mixing, x: Tensor) -> Tensor:
        if float(x.abs().max()) == 77.0:
            module.seen = True
        return x

    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    training = prepare(recipe, people(outlier=77.0), Mixing(rarely), 2)
    assert training.engine.name == "loop"
    before = training.state.x.clone()
    with pytest.raises(UserError, match="changes 'seen' when it is called"):
        training.step()
    assert training.state.round == 0
    assert torch.equal(training.state.x, before)


def test_what_only_depends_on_shapes_may_be_kept() -> None:
    """A table that the first call fills, such as positions, tells nothing of anybody's data."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(FEATURES) / FEATURES
            return self.linear(x + self.table)

    result = fv.train(
        algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), people(), Positions(), rounds=2
    )
    assert len(result.records) == 2


def test_a_round_leaves_the_model_watched_on_every_thread() -> None:
    """Threads have copies of their own, made when they are first used."""
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    training = prepare(recipe, people(), Mixing(lambda m, x: x), 3, engine="factored")
    state = begin(recipe, training.state.x, training.data, 3, key=1)
    assert state.round == 0
    training.step()
    module, _ = training.task.here()
    module.mix = lambda m, x: -x
    with pytest.raises(UserError, match="'mix"):
        training.step()
