"""One client alone: what a client sends does not depend on the others, whatever its model does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fedveil as fv
from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.bounding import bounded_rows
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.isolation import made_up
from fedveil.engines.loop import LoopEngine
from fedveil.engines.operations import NotServedError
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.loop import begin
from fedveil.models.side_effects import FEW, Footprint
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from tests.unit.engines import vocabulary
from tests.unit.engines.vocabulary import Vocabulary

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
    "hidden in a gradient": lambda m, x: ForwardsMean.apply(x * m.linear.bias.sum()),
}


def people(
    scale: float = 1.0, outlier: float | None = None, size: int = 3, more: int = 0
) -> Federated:
    """Six clients; the third one's numbers are others if there is an outlier, and it has more."""
    rng = np.random.default_rng(0)
    sizes = np.full(6, size)
    inputs = torch.from_numpy(rng.normal(size=(6 * size, FEATURES)).astype(np.float32)) * scale
    labels = torch.from_numpy(rng.integers(0, CLASSES, 6 * size))
    if outlier is not None:
        inputs[2 * size : 3 * size] = outlier
    if more:
        sizes[2] += more
        extra = inputs[2 * size : 2 * size + 1].expand(more, -1)
        inputs = torch.cat([inputs[: 3 * size], extra, inputs[3 * size :]])
        own = labels[2 * size : 2 * size + 1].expand(more)
        labels = torch.cat([labels[: 3 * size], own, labels[3 * size :]])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    return Federated("people", inputs, labels, offsets, Examples(inputs, labels), CLASSES)


def rows(engine: Engine, task: Task, data: Federated, clients: np.ndarray) -> Tensor:
    plan = SGD(Constant(0.1), steps=2).plan(data.sizes[clients], 0, np.random.default_rng(0))
    return engine.updates(task.flatten(), Group(data, clients, plan)).rows().clone()


def engines(task: Task) -> list[Engine]:
    return [FactoredEngine(task, 6), DenseEngine(task, 6), LoopEngine(task)]


def served(engine: Engine, task: Task, data: Federated) -> bool:
    """Whether an engine can compute the module at all."""
    try:
        rows(engine, task, data, np.arange(6))
    except (NotServedError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("size", [1, 3], ids=["example", "client"])
def test_one_client_does_not_move_another_whatever_the_model_mixes(mix: Forward, size: int) -> None:
    """To the bit for other numbers, and up to rounding for more or fewer of them, or none.

    At a scale of 1, both sides of every branch occur. Who takes part is changed at this scale only.
    """
    torch.manual_seed(0)
    task = Task(Mixing(mix), "cross_entropy")
    everyone, others = np.arange(6), np.array([0, 1, 3, 4, 5])
    able = [engine for engine in engines(task) if served(engine, task, people(size=size))]
    for scale, outliers in ((1e-2, (1e4,)), (1.0, (0.0, 1e4)), (30.0, (0.0,))):
        data = people(scale, size=size)
        for engine in able:
            present = rows(engine, task, data, everyone)[others]
            for outlier in outliers:
                changed = rows(engine, task, people(scale, outlier, size), everyone)[others]
                assert torch.equal(changed, present), engine.name
    data, larger = people(size=size), people(1.0, 1e4, size, more=20)
    for engine in able:
        present = rows(engine, task, data, everyone)[others]
        for found in (
            rows(engine, task, larger, everyone)[others],
            rows(engine, task, data, others),
        ):
            gap = float((found - present).norm())
            assert gap <= 1e-5 * (1 + float(present.norm())), engine.name


def test_the_check_above_reaches_the_engines_that_compute_clients_together() -> None:
    tasks = [Task(Mixing(mix), "cross_entropy") for mix in MIXING.values()]
    for kind, least in ((LoopEngine, len(MIXING)), (DenseEngine, 14), (FactoredEngine, 14)):
        assert sum(served(kind(task, 6), task, people()) for task in tasks) >= least, kind


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_a_model_that_mixes_a_client_s_batch_is_computed_client_by_client(mix: Forward) -> None:
    """Single examples would be another computation; and asking for such an engine is refused."""
    task = Task(Mixing(mix), "cross_entropy")
    assert choose("auto", task, people()).engine.name == "loop"
    for name in ("factored", "dense"):
        with pytest.raises(UserError, match=f"'{name}' does not support this model"):
            choose(name, task, people())


class OfTokens(nn.Module):
    """A mean of embeddings, behind a function of the whole batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.linear, self.mix = nn.Embedding(20, 8), nn.Linear(8, CLASSES), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.mix(self.table(x)).mean(1))


def tokens(size: int = 20) -> Federated:
    """Six clients with two texts each."""
    inputs = torch.arange(72).reshape(12, 6) * 7 % size
    labels = torch.arange(12) % CLASSES
    return Federated(
        "texts", inputs, labels, 2 * torch.arange(7), Examples(inputs, labels), CLASSES
    )


OF_TOKENS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "centered": lambda: lambda h: h - h.mean(0),
    "sequence first": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
}


@pytest.mark.parametrize("make", OF_TOKENS.values(), ids=OF_TOKENS)
def test_mixing_is_found_in_models_of_tokens(make: Callable[[], Callable]) -> None:
    torch.manual_seed(0)
    task = Task(OfTokens(make()), "cross_entropy")
    assert choose("auto", task, tokens()).engine.name == "loop"
    assert (
        choose("auto", Task(OfTokens(nn.ReLU()), "cross_entropy"), tokens()).engine.name != "loop"
    )


def test_mixing_is_found_where_only_positive_numbers_have_gradients() -> None:
    torch.manual_seed(0)
    mixed = Task(Mixing(lambda _, x: x.log() - x.log().mean(0)), "cross_entropy")
    assert choose("auto", mixed, people()).engine.name == "loop"
    assert choose("auto", Task(Mixing(lambda _, x: x.log()), "cross_entropy"), people()).engine.name


def test_a_model_without_finite_gradients_is_computed_client_by_client(caplog) -> None:
    caplog.set_level("INFO", "fedveil")
    task = Task(Mixing(lambda _, x: x * torch.nan), "cross_entropy")
    assert choose("auto", task, people()).engine.name == "loop"
    assert "its gradients are not finite on any synthetic batch" in caplog.text


def test_synthetic_tokens_are_spread_over_the_range_of_the_data() -> None:
    found = made_up(tokens(17), 100, 1.0).inputs[:]
    assert sorted(set(found.flatten().tolist())) == list(range(17))
    assert not torch.equal(found, made_up(tokens(17), 100, 1.0, draw=1).inputs[:])


@pytest.mark.parametrize("unit", ["client", "example"])
def test_the_sum_moves_by_one_message_under_a_model_that_standardizes(unit: str) -> None:
    """Before, one of 60 clients moved the others' messages too: by 19.9 bounds."""
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
        limit = recipe.limits(task.dim).bounded
        rows, _ = bounded_rows(updates, updates.norms(), recipe.bound, limit)
        sums.append(rows.double().sum(0))
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


class Average:
    """Keeps a moving average on the class."""

    mean: Tensor | float = 0.0

    @classmethod
    def of(cls, x: Tensor) -> Tensor:
        cls.mean = 0.9 * cls.mean + 0.1 * x.detach().mean()
        return x + cls.mean


@functools.cache
def slate() -> dict[str, Tensor]:
    return {}


def averaged(kept: dict[str, Tensor]) -> Forward:
    """A moving average of all that was seen, in a place that a caller chooses."""

    def mix(_: Mixing, x: Tensor) -> Tensor:
        kept["mean"] = 0.9 * kept.get("mean", torch.zeros(())) + 0.1 * x.detach().mean()
        return x + kept["mean"]

    return mix


def ticking() -> Forward:
    dice = random.Random(0)
    return lambda _, x: x * (1 + 0.1 * dice.random())


def sending() -> Forward:
    def keeping():
        mean = 0.0
        while True:
            mean = 0.9 * mean + 0.1 * (yield mean)

    kept = keeping()
    next(kept)
    return lambda _, x: x + kept.send(float(x.detach().mean()))


class Noted(dict[str, float]):
    """A dictionary with an attribute."""

    mean = 0.0


def on_a_subclass() -> Forward:
    note = Noted()

    def mix(_: Mixing, x: Tensor) -> Tensor:
        note.mean = 0.9 * note.mean + 0.1 * float(x.detach().mean())
        return x + note.mean

    return mix


def initialized(module: Mixing, x: Tensor) -> Tensor:
    """Takes its constants from the first batch it sees."""
    if not hasattr(module, "first"):
        module.first = x.detach().mean(0)
    return x - module.first


def indexed(index: Callable[[float], int]) -> Forward:
    """Adds the place of its first number among all that were seen."""
    vocabulary.forget()
    return lambda _, x: x + 0.1 * index(float(x[0, 0]))


def imported(value: float) -> int:
    from tests.unit.engines import vocabulary as words

    return words.index(value)


STATEFUL: dict[str, Callable[[], Forward]] = {
    "table in another module": lambda: indexed(lambda value: vocabulary.index(value)),
    "table in an imported module": lambda: indexed(imported),
    "table in a cache": lambda: indexed(lambda value: vocabulary.slot(value)),
    "table of a class": lambda: indexed(lambda value: Vocabulary.index(value)),
    "class of one's own": lambda: lambda _, x: Average.of(x),
    "cached function": lambda: averaged(slate()),
    "partial": lambda: functools.partial(lambda kept, m, x: averaged(kept)(m, x), {}),
    "attribute of a tensor": lambda: lambda m, x: averaged(m.linear.stats.__dict__)(m, x),
    "generator of one's own": ticking,
    "coroutine": sending,
    "subclass of a dictionary": on_a_subclass,
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
    with pytest.raises(
        UserError, match=r"when it is called|gives different outputs for the same examples"
    ):
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


class Skip:
    """Skips calls after a number that no synthetic example has, and then forgets it again."""

    left = 0

    def __call__(self, x: Tensor) -> float:
        before, self.left = self.left, max(self.left - 1, 0)
        if float(x.abs().max()) == 77.0:
            self.left = 8
        return float(before == 0)


SKIPS: list[int] = [0]


def skip_by_a_global(x: Tensor) -> float:
    before, SKIPS[0] = SKIPS[0], max(SKIPS[0] - 1, 0)
    if float(x.abs().max()) == 77.0:
        SKIPS[0] = 8
    return float(before == 0)


def skip_by_numbers() -> Callable[[Tensor], float]:
    """A counter in a tensor that is written to in place, through `.data`."""
    left = torch.zeros(FEW)

    def skip(x: Tensor) -> float:
        before = float(left[0])
        left.data[0] = 8.0 if float(x.abs().max()) == 77.0 else max(before - 1, 0)
        return float(before == 0)

    return skip


RESETTING: dict[str, Callable[[], Callable[[Tensor], float]]] = {
    "attribute": Skip,
    "global": lambda: skip_by_a_global,
    "numbers of a large tensor": skip_by_numbers,
}


@pytest.mark.parametrize("make", RESETTING.values(), ids=RESETTING)
def test_state_that_is_reset_before_the_round_ends_is_found(make: Callable[[], Callable]) -> None:
    """After each client. Before, both comparisons of the round found everything as it was."""
    skip = make()
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    module = Mixing(lambda _, x: x * skip(x))
    training = prepare(recipe, people(outlier=77.0), module, 2)
    assert training.engine.name == "loop"
    with pytest.raises(UserError, match="when it is called, which would carry one client's data"):
        training.step()
    assert training.state.round == 0
    SKIPS[0] = 0


def test_a_lock_that_another_thread_holds_is_no_state() -> None:
    lock = threading.RLock()

    def locking(_: Mixing, x: Tensor) -> Tensor:
        with lock:
            return x

    footprint = Footprint.of(Mixing(locking))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.acquire).result()
        footprint.refuse_change()
        pool.submit(lock.release).result()


def test_what_other_loggers_do_is_no_state_and_an_attribute_of_one_is() -> None:
    """Any import may add a logger to those that all loggers know."""
    log = logging.getLogger("fedveil.tests.isolation")

    def logs(_: Mixing, x: Tensor) -> Tensor:
        log.debug("called")
        return x

    module = Mixing(logs)
    footprint = Footprint.of(module)
    logging.getLogger("fedveil.tests.isolation.another")
    module(torch.ones(2, FEATURES))
    footprint.refuse_change()
    log.last = 1.0  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"changes '.*log\.last'"):
        footprint.refuse_change()
    del log.last  # type: ignore[attr-defined]


def test_state_of_an_evaluation_ends_the_next_round_before_a_client_is_called() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(FEATURES, CLASSES), 0

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 18:  # as many as there are test examples
                self.seen = 1
            return self.linear(x)

    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    training = prepare(recipe, people(), Counting(), 2)
    training.task.evaluate(training.state.x, training.data.test)
    training.engine = dataclasses.replace(LoopEngine(training.task))
    object.__setattr__(training.engine, "updates", called)
    with pytest.raises(UserError, match="changes 'seen'"):
        training.step()


def called(*given: object) -> None:
    raise AssertionError("a client was called")


class Turning(nn.Module):
    """Adds what it saw a call ago, and forgets it after every third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(FEATURES, CLASSES), 0, None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.last is not None:
            out = out + self.last.sum()
        self.calls = (self.calls + 1) % 3
        self.last = x.detach() if self.calls else None
        return out


@pytest.mark.parametrize("engine", ["dense", "factored"])
def test_state_that_is_reset_between_the_steps_of_a_group_is_found(engine: str) -> None:
    """A group's clients are computed together: what one step keeps reaches all of them."""
    task = Task(Turning(), "cross_entropy")
    task.watch(made_up(people(), 2, 1.0))
    one = DenseEngine(task, 6) if engine == "dense" else FactoredEngine(task, 6)
    plan = SGD(Constant(0.1), steps=3).plan(people().sizes, 0, np.random.default_rng(0))
    task.module.calls, task.module.last = 0, None
    with pytest.raises(UserError, match="changes 'calls' when it is called"):
        one.updates(task.flatten(), Group(people(), np.arange(6), plan))


class SkippingLoss:
    """Leaves out losses after one that is large; nothing in it branches on a value."""

    def __init__(self) -> None:
        self.left = torch.zeros(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets, reduction="none")
        kept = (self.left == 0).float()
        self.left = torch.where(loss.detach() > 50, 8.0, (self.left - 1).clamp(min=0.0))
        return (loss * kept).sum()


class Averaging:
    """Divides by a moving average of all losses so far."""

    def __init__(self) -> None:
        self.mean = torch.tensor(1.0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets, reduction="none")
        self.mean = 0.9 * self.mean + 0.1 * loss.detach().mean()
        return (loss / self.mean).mean()


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("make", [SkippingLoss, Averaging])
def test_a_loss_that_keeps_anything_is_refused_by_its_name(make: type, noise: str) -> None:
    """Before, it had no footprint: a loss that skips moved the sum of 400 clients by 19.5·C."""
    with pytest.raises(UserError, match=rf"The loss \S*{make.__name__} changes '(left|mean)' when"):
        fv.train(
            algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), people(size=4),
            Mixing(lambda _, x: x), rounds=2, loss=make(), noise=noise,
        )  # fmt: skip


def test_rare_state_of_a_loss_ends_the_round_before_it_is_released() -> None:
    class Rarely:
        """Counts its calls when it is asked to."""

        calls, counts = 0, False

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += self.counts
            return F.cross_entropy(outputs, targets)

    loss = Rarely()
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    training = prepare(recipe, people(), nn.Linear(FEATURES, CLASSES), 2, loss=loss)
    Rarely.counts = True
    with pytest.raises(UserError, match=r"The loss .*Rarely changes"):
        training.step()


def test_a_model_that_fails_when_it_is_asked_again_is_refused() -> None:
    """Its state is where no footprint reaches, and of another shape."""
    task = Task(Mixing(lambda _, x: x), "cross_entropy")
    task.watch(made_up(people(), 2, 1.0))
    task.refuse_side_effects()
    task._witness[:] = [(x, made_up(people(), 2, 1.0), a[:1]) for x, _, a in task._witness]
    with pytest.raises(UserError, match="gives different outputs for the same examples"):
        task.refuse_side_effects()
    object.__setattr__(task, "_answer", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="gives different outputs for the same examples"):
        task.refuse_side_effects()


def test_a_model_that_starts_from_its_first_batch_starts_from_made_up_numbers() -> None:
    """Were it the first client's batch, that client would move every other one."""
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    first = [
        prepare(recipe, data, Mixing(initialized), 2).task.module.first
        for data in (people(), people(scale=50.0))
    ]
    assert torch.equal(*first)


def test_evaluation_leaves_the_released_model_as_it_is() -> None:
    """An embedding with max_norm rescales the rows that it looks up, also those of test data."""
    tokens = torch.arange(12).reshape(6, 2)
    data = Federated(
        "tokens", tokens, torch.zeros(6, dtype=torch.long), torch.arange(7),
        Examples(tokens[:1], torch.zeros(1, dtype=torch.long)), 2,
    )  # fmt: skip
    module = nn.Sequential(nn.Embedding(12, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 2))
    run = prepare(algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), data, module, 2)
    before = run.state.x.clone()
    run.task.evaluate(run.state.x, data.test)
    assert torch.equal(run.state.x, before)


def test_state_of_a_function_with_a_name_of_torch_s_is_found() -> None:
    """A wrapper takes over the module that the wrapped function names."""
    kept: list[Tensor] = []

    @functools.wraps(F.relu)
    def keeping(module: Mixing, x: Tensor) -> Tensor:
        kept.append(x.detach())
        return x

    module = Mixing(keeping)
    before = Footprint.of(module)
    module(torch.ones(2, FEATURES))
    with pytest.raises(UserError, match="variable kept"):
        before.refuse_change()


class Shared(nn.Linear):
    """Says that a copy of it is itself."""

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def test_a_model_whose_copies_share_a_part_is_refused() -> None:
    task = Task(nn.Sequential(Shared(FEATURES, CLASSES)), "cross_entropy")
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="share their submodule '0'"):
        pool.submit(task.here).result()


def test_a_recipe_that_accounts_for_itself_is_refused() -> None:
    class Own(Recipe):
        """Could say anything of its release."""

    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    with pytest.raises(
        UserError, match=r"class Own, which could override the accounting\. Give a Recipe"
    ):
        prepare(Own(**fields), people(), rounds=1)


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


def test_a_global_that_is_named_like_an_attribute_is_none_of_the_model_s() -> None:
    run = prepare(algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), people(), Stepping(), 3)
    for round in range(2):
        globals()["step"] = round  # as a loop variable of a user's script
        run.step()
    assert run.state.round == 2


class Stepping(nn.Module):
    """Has an attribute `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


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


class Recurrent(nn.Module):
    """torch's own recurrent layer, which lists its parameters again whenever they are set."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x[:, :, None])[0][:, -1])


class Hiding(Recurrent):
    """It hides a client's examples behind that list's name."""

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        self.cells._flat_weights = [*self.cells._flat_weights, x.detach().clone()]
        return answer


def test_torch_s_recurrent_layers_train_and_hide_nothing() -> None:
    result = fv.train(algorithms.fedavg(steps=2), people(), Recurrent(), rounds=1)
    assert len(result.records) == 1
    with pytest.raises(UserError, match="_flat_weights"):
        fv.train(algorithms.fedavg(steps=2), people(), Hiding(), rounds=1)
