"""Placement, proved without a GPU: whole rounds on a pretend device that refuses CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.data.fields import Layout
from fedveil.engines import devices, updates
from fedveil.engines.dense import DenseEngine
from fedveil.engines.devices import CPU, PlacedEngine, device_of, refuse_float64, room
from fedveil.engines.dropout import DropoutStreams
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.models import build, lora
from fedveil.models.gpt import GPT
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.recipe import Recipe
from fedveil.training import prepare as preparing
from fedveil.training.settings import Settings, read_settings
from tests.unit.engines.pretend import WAITED, MixedDevicesError, OnDevice, pretending
from tests.unit.engines.test_agreement import RECIPES, population

ENGINES: dict[str, Callable[[Task], Engine]] = {
    "loop": LoopEngine,
    "dense": lambda task: DenseEngine(task, 4),
    "factored": lambda task: FactoredEngine(task, 4),
}


def played(recipe: Recipe, engine_of: Callable[[Task], Engine], device: torch.device) -> Tensor:
    data = population(recipe.unit)
    task = Task(build("softmax", data, torch.Generator().manual_seed(0)), "cross_entropy").to(
        device
    )
    state = begin(recipe, task.flatten(), data, 1, key=7)
    engine = PlacedEngine.on(engine_of(task), device)
    state, _ = run_round(recipe, state, data, engine, key=7, diagnostics=True)
    return state.x


@functools.cache
def on_the_cpu(recipe: Recipe) -> Tensor:
    """By the factored engine; test_agreement.py holds all engines equal there."""
    return played(recipe, ENGINES["factored"], CPU)


EVERY = [
    (recipe, kind)
    for number, recipe in enumerate(RECIPES)
    for kind in ("factored", ("dense", "loop")[number % 2])
]


@pytest.mark.parametrize(
    ("recipe", "kind"), EVERY, ids=[f"{recipe.name}-{kind}" for recipe, kind in EVERY]
)
def test_a_round_of_every_recipe_and_engine_keeps_its_tensors_together(
    recipe: Recipe, kind: str
) -> None:
    """Every algorithm with both kinds of updates: as factors, and as the rows of two engines."""
    with pretending() as device:
        found = played(recipe, ENGINES[kind], device)
    assert found.device == CPU
    assert torch.allclose(found, on_the_cpu(recipe), atol=1e-5, rtol=0)


OFFSETS = torch.tensor([0, 1, 4, 6])  # of three clients


def text() -> Federated:
    rng = np.random.default_rng(0)
    inputs, labels = torch.from_numpy(rng.integers(0, 12, (2, 6, 4)))
    return Federated("text", inputs, labels, OFFSETS, Examples(inputs, labels), 12)


def images() -> Federated:
    every = population()
    inputs, labels = every.inputs[:6], every.labels[:6]
    return Federated("images", inputs, labels, OFFSETS, Examples(inputs, labels), 3)


class Words(nn.Module):
    """Tied embeddings and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.drop(self.tokens(x)), self.tokens.weight)


class Encoder(nn.Module):
    """Tied embeddings, dropout and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(self.tokens(x)), self.tokens.weight)


class Recurrent(Encoder):
    """With a recurrence after it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(8, 8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.memory(self.layer(self.tokens(x)))[0], self.tokens.weight)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(4, 4, 3, groups=2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federated]]] = {
    "convolutions": (convolutions, images),
    "encoder with a recurrence": (Recurrent, text),
    "gpt": (lambda: GPT(12, 1, 16), text),
    "adapters": (lambda: lora(GPT(12, 1, 16), 2), text),
}
PLANS = {
    "batches": SGD(Constant(0.1), epochs=2, batch=2, momentum=0.9, weight_decay=0.01),
    "full": SGD(Constant(0.1), steps=2),
}


def moved(name: str, kind: str, plan: str, device: torch.device, float64: bool = True) -> Tensor:
    make, data_of = MODELS[name]
    data = data_of()
    task = Task(construct(make, seed=1), "cross_entropy").to(device)
    engine = PlacedEngine(ENGINES[kind](task), device, float64)
    local = PLANS[plan].plan(data.sizes, 0, np.random.default_rng(0))
    clients = np.arange(data.clients)
    found = engine.updates(
        task.flatten(), Group(data, clients, local, DropoutStreams(1, 2, clients))
    )
    scale = torch.linspace(0.0, 1.0, data.clients, dtype=torch.float64)
    return torch.cat([found.weighted_sum(scale), found.norms().float(), found.rows().flatten()])


@functools.cache
def not_moved(name: str, kind: str, plan: str) -> Tensor:
    return moved(name, kind, plan, CPU)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("loop", "batches"), ("dense", "batches"), ("factored", "batches"), ("factored", "full")],
)
@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_same_numbers_on_the_device(name: str, kind: str, plan: str) -> None:
    """Dropout masks included: they are the same on every device.

    Only the factored engine treats full batches differently.
    """
    wanted = not_moved(name, kind, plan)
    with pretending() as device:
        assert torch.allclose(moved(name, kind, plan, device), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_a_device_without_float64_is_never_asked_for_it(name: str, kind: str) -> None:
    """As MPS."""
    with pretending(torch.float64) as device:
        found = moved(name, kind, "batches", device, float64=False)
    assert torch.allclose(found, not_moved(name, kind, "batches"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_device_without_float64_notices_when_it_is_asked_for_it(kind: str) -> None:
    """So that the check above has power."""
    with pretending(torch.float64) as device, pytest.raises(TypeError, match=r"no torch\.float64"):
        moved("gpt", kind, "batches", device)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_run_on_a_device_without_float64_never_asks_for_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks, choice of an engine, diagnostics, rounds and evaluation."""
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    with pretending(torch.float64) as device:
        monkeypatch.setattr(preparing, "device_of", lambda name: device)
        monkeypatch.setattr(devices, "has_float64", lambda device: False)
        training = preparing.prepare(recipe, text(), construct(Words, seed=1), 1, engine=engine)
        training.step()
    assert training.state.round == 1


class Precise(Words):
    """With a table of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1, dtype=torch.float64))


def test_float64_is_refused_where_the_device_has_none() -> None:
    mps = torch.device("mps")
    refuse_float64(Task(Words(), "cross_entropy"), mps)
    with pytest.raises(UserError, match=r"'mps' has no float64, .* of 'table' of the model"):
        refuse_float64(Task(Precise(), "cross_entropy"), mps)
    refuse_float64(Task(Precise(), "cross_entropy"), CPU)
    layout = Layout.of({"x": torch.ones(2, 1), "scale": torch.ones(2, 1, dtype=torch.float64)})
    with pytest.raises(UserError, match="of the input 'scale'"):
        refuse_float64(Task(Words(), "cross_entropy", layout), mps)


@pytest.fixture
def on_pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`prepare` with the pretend device, whatever is asked for."""
    with pretending() as device:
        monkeypatch.setattr(preparing, "device_of", lambda name: device)
        yield


@pytest.mark.usefixtures("on_pretend")
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_run_is_checked_trained_and_evaluated_on_the_device(engine: str) -> None:
    """`auto` tries the factored and the dense engine, and trains on the factored one."""
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    training = preparing.prepare(recipe, text(), construct(Words, seed=1), 2, engine=engine)
    assert all(isinstance(leaf.data, OnDevice) for leaf in training.task.module.parameters())
    training.step()
    training.step()
    assert training.state.x.device == CPU
    assert training.records[-1].loss is not None


def test_attention_is_evaluated_on_the_device() -> None:
    """By the kernels that training does not use."""
    task, examples = Task(construct(Encoder, seed=1), "cross_entropy"), text().test
    wanted = task.evaluate(task.flatten(), examples)
    with pretending() as device:
        assert task.to(device).evaluate(task.flatten(), examples) == pytest.approx(wanted)


def test_seed_key_and_noise_do_not_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    on_cpu = preparing.prepare(recipe, text(), construct(Words, seed=1), 1, engine="dense")
    on_cpu.step()
    with pretending() as device:
        monkeypatch.setattr(preparing, "device_of", lambda name: device)
        there = preparing.prepare(recipe, text(), construct(Words, seed=1), 1, engine="dense")
        there.step()
    assert there.key == on_cpu.key
    assert torch.allclose(there.state.x, on_cpu.state.x, atol=1e-5)


def forget_batches(patch: pytest.MonkeyPatch) -> None:
    """Batches stay on the CPU."""
    patch.setattr(updates.Group, "_placed", lambda self, part: part)


def forget_sums(patch: pytest.MonkeyPatch) -> None:
    """`.cpu()` is forgotten where sums come back."""
    held = devices.PlacedUpdates
    patch.setattr(held, "weighted_sum", lambda self, s: self.held.weighted_sum(s.to(self.device)))


def forget_scales(patch: pytest.MonkeyPatch) -> None:
    """Scales are not copied to the device."""
    held = devices.PlacedUpdates
    patch.setattr(held, "weighted_sum", lambda self, s: self.held.weighted_sum(s).to(CPU))


@pytest.mark.parametrize("plant", [forget_batches, forget_sums, forget_scales])
@pytest.mark.parametrize("kind", ENGINES)
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    plant(monkeypatch)
    with pretending() as device, pytest.raises(MixedDevicesError):
        played(recipe, ENGINES[kind], device)


def waits(kind: str, clients: int) -> int:
    """How often the CPU waits for the device, in a group of so many clients."""
    data = population()
    with pretending() as device:
        task = Task(build("mlp-8", data, torch.Generator()), "cross_entropy").to(device)
        local = SGD(Constant(0.1), steps=2).plan(data.sizes[:clients], 0, np.random.default_rng(0))
        group = Group(data, np.arange(clients), local)
        WAITED.clear()
        found = PlacedEngine.on(ENGINES[kind](task), device).updates(task.flatten(), group)
        found.norms()
        found.weighted_sum(torch.ones(clients, dtype=torch.float64))
    return len(WAITED)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_round_never_waits_for_the_device_for_each_client(kind: str) -> None:
    assert 2 <= waits(kind, 2) == waits(kind, 4) <= 6


def test_groups_follow_the_free_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, free = torch.device("cuda", 1), {"bytes": 8_000_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 10**10))
    task = Task(build("mlp-8", population(), torch.Generator()), "cross_entropy")
    assert room(CPU) is None
    assert room(gpu) == 1_000_000
    small = DenseEngine.sized(task, room(gpu)).group_size
    free["bytes"] *= 4
    assert DenseEngine.sized(task, room(gpu)).group_size == pytest.approx(4 * small, abs=4)


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device_of("auto") == device_of("cuda") == torch.device("cuda", 0)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of("cuda") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"'cuda:5' is not available: torch finds 2"):
        device_of("cuda:5")
    for wrong in ("gpu", "cuda:x", "cuda1", ""):
        with pytest.raises(UserError, match=f"no device '{wrong}'"):
            device_of(wrong)
    monkeypatch.setattr(devices, "_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device_of("auto") == CPU
    with pytest.raises(UserError, match="'mps' is not available"):
        device_of("mps")


def test_the_device_is_a_setting_that_recipe_toml_repeats() -> None:
    assert read_settings(None, {"device": "cpu"}).device == "cpu"
    assert Settings().device == "auto"
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    named = preparing.prepare(recipe, text(), GPT(12, 1, 8, 2), 1, device="cpu")
    assert named.spec.plain()["device"] == "cpu"
    assert "device" not in preparing.prepare(recipe, text(), GPT(12, 1, 8, 2), 1).spec.plain()
