"""What a round records equals what is computed directly, from rows, by another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.seen import Seen, direction
from fedveil.engines.task import Task
from fedveil.engines.updates import DenseUpdates, Engine, Group
from fedveil.engines.walks import EVERY, Walked
from fedveil.loop import Info, State, begin, run_round
from fedveil.models import build
from fedveil.parts.local import SGD
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Constant
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from tests.unit.engines.test_agreement import RECIPES, population

KEY = 7
CLIPPED = algorithms.clipped_fedavg(clip=0.3, clients=6, learning_rate=0.2, steps=3)
SAMPLED = algorithms.clipped_fedavg(clip=0.3, learning_rate=0.3, steps=4, batch=2)


def task_of(data: Federated, model: str = "mlp-8") -> Task:
    return Task(build(model, data, torch.Generator().manual_seed(0)), data.loss)


def played(
    recipe: Recipe, engine_of, rounds: int, diagnostics: bool = True, model: str = "mlp-8"
) -> tuple[list[State], list[Info]]:
    data = population(recipe.unit)
    task = task_of(data, model)
    states, infos = [begin(recipe, task.flatten(), data, rounds, KEY)], []
    for _ in range(rounds):
        state, info = run_round(
            recipe, states[-1], data, engine_of(task), KEY, diagnostics=diagnostics
        )
        states.append(state)
        infos.append(info)
    return states, infos


def walks(recipe: Recipe, state: State, clients: np.ndarray) -> torch.Tensor:
    """y_i − x of these clients alone, by the loop engine; for full batches only."""
    data = population(recipe.unit)
    sizes = data.sizes[torch.from_numpy(clients)]
    plan = recipe.local.plan(sizes, state.round, stream(KEY, state.round, "batches"))
    return LoopEngine(task_of(data)).updates(state.x, Group(data, clients, plan)).rows().double()


def factored(group: int):
    return lambda task: FactoredEngine(task, group)


def test_norms_angles_and_moments_are_those_of_the_rows() -> None:
    states, infos = played(CLIPPED, factored(4), 3)
    assert infos[0].seen is not None
    assert infos[0].seen.summary()["cosine"] is None
    for state, before, info in zip(states[1:], states, infos[1:], strict=False):
        seen = info.seen
        assert seen is not None
        rows = walks(CLIPPED, state, seen.clients)
        moved = (state.x - before.x).double()
        norms = rows.norm(dim=1)
        alphas = torch.tensor([min(1.0, 0.3 / float(norm)) for norm in norms]).double()
        beyond = [max(float(norm) - 0.3, 0.0) for norm in norms]
        wanted = {
            "norm_median": np.median(norms.numpy()),
            "norm_deviation": np.std(norms.numpy()),
            "cosine": torch.cosine_similarity(rows, moved[None]).mean(),
            "bias_own": 0.0,
            "bias_shared": (alphas - alphas.mean()).abs().mean(),
            "incremental_norm": np.mean(beyond),
            "second_moment": math.sqrt(np.mean(np.square(beyond))),
        }
        found = seen.summary()
        assert found["memory_error"] is None
        for name, value in wanted.items():
            assert found[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
        assert (norms > 0.3).any()


def test_an_angle_is_that_of_the_local_walk_whatever_is_reported() -> None:
    """y − x, (x − y)/η, y itself, and an error of memory all come from one walk."""
    recipes = [
        algorithms.dp_fedavg(clip=0.3, rate=0.9, steps=3, noise_multiplier=0.1),
        algorithms.model_clipped_fedavg(clip=2.0, steps=3),
        algorithms.fed_alpha_normec(rate=0.8, steps=2, noise_multiplier=0.1),
    ]
    for recipe in recipes:
        states, infos = played(recipe, factored(3), 3)
        seen = infos[2].seen
        assert seen is not None
        rows = walks(recipe, states[2], seen.clients)
        moved = (states[2].x - states[1].x).double()
        wanted = torch.cosine_similarity(rows, moved[None])
        assert torch.allclose(seen.cosines, wanted, atol=1e-4), recipe.name
        assert wanted.abs().max() > 0.05


def test_memory_error_is_what_the_memory_misses() -> None:
    recipe = algorithms.fed_alpha_normec(
        learning_rate=0.5, beta=0.4, alpha=0.1, steps=2, noise_multiplier=0.1
    )
    data, rounds = population(), 3
    states, infos = played(recipe, LoopEngine, rounds)
    everyone = np.arange(data.clients)
    remembered = torch.zeros(data.clients, len(states[0].x)).double()
    for state, info in zip(states, infos, strict=False):
        reports = walks(recipe, state, everyone) / -0.5
        missed = reports - remembered
        norms = missed.norm(dim=1)
        assert info.seen is not None
        found = info.seen.summary()["memory_error"]
        assert found == pytest.approx(float(norms.mean()), rel=1e-4)
        remembered += 0.4 * missed / (0.1 + norms)[:, None]


class Drawn:
    """u_i = mean_i + a draw of the plan's own: the expectation is known."""

    name, group_size, least_group = "drawn", 5, 1

    def updates(self, x: torch.Tensor, group: Group) -> DenseUpdates:
        noise = (group.plan.index[:, :, :1].flatten(1).double() - 9.5).mean(dim=1)
        means = 1.0 + torch.from_numpy(group.clients).double()
        rows = torch.zeros(len(group.clients), len(x))
        rows[:, 0] = means.float()
        rows[:, 1] = noise.float()
        return DenseUpdates(rows)


def test_bias_of_random_batches_compares_with_the_expected_update() -> None:
    """Each of many clients has E u = (1 + i, 0), so α̃_i = c/max(c, 1 + i); u itself is longer."""
    clients, c = 200, 20.0
    inputs = torch.zeros(clients * 20, 2)
    labels = torch.zeros(clients * 20, dtype=torch.int64)
    offsets = torch.arange(0, clients * 20 + 1, 20)
    from fedveil.data.federated import Examples

    data = Federated("drawn", inputs, labels, offsets, Examples(inputs, labels), 2)
    recipe = Recipe(
        "drawn", SGD(Constant(0.1), steps=3, batch=1), report=Difference(),
        bound=algorithms.clipped_fedavg(clip=c).bound,
    )  # fmt: skip
    engine: Engine = Drawn()
    state = begin(recipe, torch.zeros(2), data, 2, KEY)
    state, info = run_round(recipe, state, data, engine, KEY, diagnostics=True)
    seen = info.seen
    assert seen is not None
    assert seen.walked is not None
    assert len(seen.walked.places) == clients // 10
    means = 1.0 + seen.walked.places.double()
    wanted = c / means.clamp_min(c)
    error = (seen.walked.scales - wanted).abs()
    assert float(error.mean()) < 0.05
    own, shared = seen.summary()["bias_own"], seen.summary()["bias_shared"]
    taken = seen.scales[seen.walked.places]
    assert own == pytest.approx(float((taken - seen.walked.scales).abs().mean()))
    assert shared == pytest.approx(float((wanted - wanted.mean()).abs().mean()), abs=0.03)
    _, later = run_round(recipe, state, data, engine, KEY, diagnostics=True)
    assert later.seen is not None
    assert later.seen.summary()["bias_own"] is None  # only every few rounds


def test_walks_are_repeated_every_few_rounds_and_agree_between_engines() -> None:
    _, slow = played(SAMPLED, LoopEngine, EVERY + 1)
    _, quick = played(SAMPLED, factored(2), EVERY + 1)
    for one, other in zip(slow, quick, strict=True):
        assert one.seen is not None
        assert other.seen is not None
        assert (one.seen.summary()["bias_shared"] is None) == bool(one.round % EVERY)
        for name, value in one.seen.summary().items():
            assert other.seen.summary()[name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=lambda number: RECIPES[number].name)
def test_engines_and_groupings_record_the_same(number: int) -> None:
    """Groups of four, and either all at once or rows in groups of three, in turn."""
    recipe, others = RECIPES[number], (factored(100), lambda task: DenseEngine(task, 3))
    _, reference = played(recipe, LoopEngine, 2)  # angles begin with the second round
    for engine_of in (factored(4), others[number % 2]):
        _, infos = played(recipe, engine_of, 2)
        for one, other in zip(reference, infos, strict=True):
            if one.seen is None or other.seen is None:
                assert one.aborted
                continue
            assert np.array_equal(one.seen.clients, other.seen.clients)
            for field in ("norms", "scales", "cosines"):
                pair = getattr(one.seen, field), getattr(other.seen, field)
                assert torch.allclose(*pair, atol=1e-3, rtol=1e-3, equal_nan=True), field


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_recording_changes_nothing(recipe: Recipe) -> None:
    """Walks are in the first round, angles from the second on; the third would show either."""
    on, _ = played(recipe, factored(4), 3, diagnostics=True)
    off, infos = played(recipe, factored(4), 3, diagnostics=False)
    assert all(info.seen is None for info in infos)
    for one, other in zip(on, off, strict=True):
        assert one.x.numpy().tobytes() == other.x.numpy().tobytes()
        assert one.model.numpy().tobytes() == other.model.numpy().tobytes()


@pytest.mark.parametrize(
    ("model", "rounding"),
    [("softmax", 1e-5), ("mlp-8", 1e-5), ("cnn", 1e-5), ("resnet20", 1e-2)],
)
def test_dots_are_those_of_the_rows_on_every_engine(model: str, rounding: float) -> None:
    """Factors, written weights, reordered convolutions and decayed parameters alike.

    Of ResNet-20's ReLUs, one has an input of 1.3e-8, whose sign depends on the order of a sum. Its
    flip changes an update by 3e-3 of its norm, so rows of two engines are compared with that slack.
    """
    data = population()
    task, clients = task_of(data, model), np.arange(data.clients)
    vector = torch.randn(task.dim, generator=torch.Generator().manual_seed(1))
    for local in (
        SGD(Constant(0.1), steps=2, weight_decay=0.1, momentum=0.5),
        SGD(Constant(0.1), epochs=1, batch=3),
    ):
        plan = local.plan(data.sizes, 0, np.random.default_rng(0))
        group = Group(data, clients, plan)
        wanted = LoopEngine(task).updates(task.flatten(), group).rows()
        for engine in (DenseEngine(task, 9), FactoredEngine(task, 9), LoopEngine(task)):
            updates = engine.updates(task.flatten(), group)
            rows, dots = updates.rows(), updates.dots(vector)
            assert dots.dtype == torch.float64
            assert torch.allclose(dots, (rows @ vector).double(), atol=1e-4, rtol=1e-4), engine.name
            assert ((rows - wanted).norm(dim=1) < rounding * wanted.norm(dim=1)).all(), engine.name
            scaled = updates.affine(-3.0, 0.0, task.flatten())
            assert torch.allclose(scaled.dots(vector), -3 * dots, atol=1e-4, rtol=1e-4)


def test_edge_cases() -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    empty = Seen(np.arange(0), nothing, nothing, nothing, clip=1.0)
    assert set(empty.summary().values()) == {None}
    nan = torch.tensor([math.nan, 2.0]).double()
    one = Seen(np.arange(2), nan, torch.tensor([0.0, 0.5]).double(), nan * math.nan, clip=1.0)
    assert one.summary()["norm_median"] == 2.0
    assert one.summary()["bias_shared"] == 0.0
    assert one.summary()["cosine"] is None
    lost = Walked(torch.tensor([0, 1]), torch.tensor([math.nan, 0.25]).double())
    walked = Seen(np.arange(2), nan, torch.tensor([0.0, 0.5]).double(), nan, clip=1.0, walked=lost)
    assert walked.summary()["bias_own"] == 0.25
    assert direction(None) is None
    assert direction(torch.zeros(3)) is None
    assert direction(torch.full((3,), math.inf)) is None
    assert direction(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
