"""One round: rejections, denominators, memory, empty cohorts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.updates import DenseUpdates, Group
from fedveil.loop import Info, State, begin, run_round
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import NoNoise
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.wire import Wire

DIM = 3


class Scripted:
    """An engine whose clients answer with given differences y_i − x."""

    name, group_size, least_group = "scripted", 2, 1

    def __init__(self, answers: list[Tensor]) -> None:
        self.answers = answers

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        return DenseUpdates.of([self.answers[client] for client in group.clients], len(x))


def people(count: int) -> Federated:
    inputs, labels = torch.zeros(count, 1), torch.zeros(count, dtype=torch.long)
    return Federated("people", inputs, labels, torch.arange(count + 1), Examples(inputs, labels), 2)


def play(recipe: Recipe, answers: list[Tensor], rounds: int = 1) -> tuple[State, Info]:
    data = people(len(answers))
    state = begin(recipe, torch.zeros(DIM), data, rounds, key=0)
    for _ in range(rounds):
        state, info = run_round(recipe, state, data, Scripted(answers), key=0)
    return state, info


GOOD = torch.tensor([0.3, 0.0, 0.4])
BROKEN = [
    torch.tensor([math.nan, 0.0, 0.0]),
    torch.tensor([0.0, math.inf, 0.0]),
    torch.tensor([-math.inf, 1.0, 1.0]),
    torch.zeros(DIM + 1),
    torch.zeros(2, DIM),
    torch.zeros(DIM, dtype=torch.long),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda t: f"{t.dtype}{list(t.shape)}{t.tolist()}")
@pytest.mark.parametrize(
    "recipe",
    [
        algorithms.clipped_fedavg(clip=1.0),
        algorithms.fedavg(),
        algorithms.norm_fedavg(),
        algorithms.alpha_normec(),
        dataclasses.replace(
            algorithms.dp_norm_fedavg_binomial(clients=3, trials=2, levels=2**20), noise=NoNoise()
        ),
    ],
    ids=lambda r: r.name,
)
def test_broken_updates_are_rejected_counted_and_never_summed(recipe, broken: Tensor) -> None:
    state, info = play(recipe, [GOOD, broken, GOOD])
    clean, _ = play(recipe, [GOOD, torch.zeros(DIM), GOOD])
    assert info.rejected == 1
    assert info.participants == 3
    assert torch.isfinite(state.x).all()
    assert torch.allclose(state.x, clean.x, atol=1e-5)


def test_a_broken_update_does_not_poison_its_client_s_memory() -> None:
    recipe = algorithms.alpha_normec(beta=0.5)
    state, _ = play(recipe, [GOOD, BROKEN[0], GOOD], rounds=2)
    assert state.memory is not None
    assert torch.equal(state.memory[np.array([1])], torch.zeros(1, DIM))
    assert (state.memory[np.array([0])] != 0).any()


def test_the_denominator_is_the_expected_cohort_not_who_came() -> None:
    recipe = dataclasses.replace(
        algorithms.clipped_fedavg(clip=10.0, server_rate=1.0), cohort=Poisson(0.5)
    )
    state, info = play(recipe, [GOOD] * 40)
    assert info.participants != 20  # the seed draws another number
    assert torch.allclose(state.x, GOOD * info.participants / 20)


def test_an_empty_cohort_releases_noise_alone() -> None:
    recipe = algorithms.dp_fedavg(clip=1.0, rate=1e-9, noise_multiplier=1.0, server_rate=1.0)
    state, info = play(recipe, [GOOD] * 5)
    assert info.participants == 0
    assert info.signal == 0
    assert info.noise > 0
    assert (state.x != 0).all()


def test_a_population_of_one_can_be_trained_on() -> None:
    state, info = play(algorithms.clipped_fedavg(clip=1.0), [GOOD])
    assert info.participants == 1
    assert torch.allclose(state.x, GOOD)


@pytest.mark.parametrize("update", ["everyone", "participants"])
def test_who_updates_its_memory(update) -> None:
    recipe = dataclasses.replace(
        algorithms.alpha_normec(), cohort=FixedSize(2), memory=ErrorCompensation(0.1, update)
    )
    state, info = play(recipe, [GOOD] * 6)
    assert info.participants == 2
    moved = (state.memory[np.arange(6)] != 0).any(dim=1)
    assert int(moved.sum()) == (6 if update == "everyone" else 2)


def test_error_compensation_follows_the_algorithm_line_by_line() -> None:
    """Shulgin et al. 2025, Alg. 1, lines 5, 6, 11, 12 with constant local answers."""
    beta, alpha, gamma = 0.2, 0.5, 0.1
    answers = [torch.tensor([0.3, 0.0, 0.0]), torch.tensor([0.0, -0.1, 0.2])]
    recipe = algorithms.alpha_normec(beta, alpha, learning_rate=gamma, server_rate=0.05)
    state, _ = play(recipe, answers, rounds=3)
    v, server, x = torch.zeros(2, DIM), torch.zeros(DIM), torch.zeros(DIM)
    for _ in range(3):
        error = torch.stack(answers) / -gamma - v
        delta = error / (alpha + error.norm(dim=1, keepdim=True))
        v += beta * delta
        server += beta * delta.mean(dim=0)
        x -= 0.05 * server / server.norm()
    assert torch.allclose(state.x, x, atol=1e-6)
    assert torch.allclose(state.memory[np.arange(2)], v, atol=1e-6)
    assert torch.allclose(state.parts["memory"]["direction"], server, atol=1e-6)


def test_info_tells_norms_and_the_fraction_that_shrank() -> None:
    answers = [GOOD, 10 * GOOD, 0.1 * GOOD, 20 * GOOD]
    _, info = play(algorithms.clipped_fedavg(clip=1.0), answers)
    assert info.clipped_fraction == 0.5
    assert info.norm == pytest.approx(0.5 * (1 + 10 + 0.1 + 20) / 4)


@pytest.mark.parametrize("cohort", [Everyone(), Poisson(0.3), FixedSize(3)], ids=repr)
def test_removing_one_client_moves_the_sum_by_at_most_the_sensitivity(cohort) -> None:
    """Same randomness, one client's answer blanked or replaced: the pre-noise sum moves ≤ Δ."""
    base = algorithms.dp_fedavg(clip=0.7, noise_multiplier=1.0, server_rate=1.0)
    recipe = dataclasses.replace(base, cohort=cohort)
    rng = np.random.default_rng(0)
    answers = [torch.from_numpy(rng.normal(size=DIM)).float() * 5 for _ in range(10)]
    message = recipe.message(DIM)
    reach = message.sensitivity(cohort.adjacency).l2 / cohort.expected(10)
    moved = []
    for client in range(10):
        changed = list(answers)
        changed[client] = (
            -5 * answers[client] if isinstance(cohort, FixedSize) else torch.zeros(DIM)
        )
        difference = play(recipe, answers)[0].x - play(recipe, changed)[0].x
        moved.append(float(difference.norm()))
    assert max(moved) <= reach * (1 + 1e-5)
    assert max(moved) > 0.9 * reach  # the bound is met, so a smaller one would be caught


# Messages of whole numbers


def test_messages_of_few_bits_are_packed_and_their_bytes_measured() -> None:
    recipe = algorithms.dp_norm_fedavg_discrete(4, levels=5, sigma=2.0, support=10)
    wire = recipe.wire(DIM, 9)
    assert wire == Wire(5, low=-15)  # ±(5 + 10)
    _, info = play(recipe, [GOOD] * 9)
    assert info.sent == 4 * 2  # four messages of ⌈3·5/8⌉ bytes
    _, plain = play(algorithms.clipped_fedavg(clip=1.0), [GOOD] * 9)
    assert plain.sent == 9 * 4 * DIM


@pytest.mark.parametrize("view", ["sum", "messages"])
def test_what_the_server_adds_up_is_what_the_clients_sent(view) -> None:
    """The model moves by the sum of the clients' whole numbers and their noise, nothing else."""
    recipe = dataclasses.replace(
        algorithms.dp_norm_fedavg_discrete(4, levels=5, sigma=2.0, support=10, learning_rate=1.0),
        view=view,
    )
    answers = [-GOOD, GOOD, GOOD.flip(0), -GOOD, GOOD, GOOD.flip(0)]
    state, info = play(recipe, answers)
    noise = sum(
        recipe.noise.each(recipe.message(DIM), stream(0, 0, f"noise of {client}"))
        for client in recipe.cohort.draw(6, stream(0, 0, "cohort"))
    )
    steps = -state.x.double() * 4 * 5  # x ← x − Σ/4, a step is 1/5
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    clean = steps - torch.from_numpy(noise)
    assert float(clean.norm()) == pytest.approx(info.signal * 4 * 5, abs=1e-3)
    assert float(np.linalg.norm(noise)) == pytest.approx(info.noise * 4 * 5, abs=1e-3)


def test_residues_alone_are_not_the_messages_but_their_sum_is() -> None:
    recipe = algorithms.dp_norm_fedavg_secagg(4, levels=5, sigma=2.0, support=10)
    wire = recipe.wire(DIM, 9)
    assert wire == Wire(7, modular=True)  # 5 bits, and 2 for the sum of four
    residues = wire.receive(wire.send(np.array([[-15, 0, 15]] * 4)), 3)
    assert residues.min() >= 0
    assert wire.settle(residues.sum(axis=0)).tolist() == [-60, 0, 60]


def test_a_round_with_too_few_for_the_promised_noise_is_void_but_counts() -> None:
    recipe = algorithms.dp_norm_fedavg_secagg(rate=0.5, honest=9, sigma=2.0, support=10)
    state, info = play(recipe, [GOOD] * 10)
    assert info.aborted
    assert info.participants < 9
    assert (state.x == 0).all()
    assert state.round == 1
    enough = dataclasses.replace(recipe, cohort=Poisson(0.5, honest=2))
    state, info = play(enough, [GOOD] * 10)
    assert not info.aborted
    assert (state.x != 0).any()


def test_nobody_takes_part_more_often_than_the_cap() -> None:
    for cohort in (Poisson(0.7, cap=3), FixedSize(4, cap=3)):
        recipe = dataclasses.replace(algorithms.clipped_fedavg(clip=1.0), cohort=cohort)
        data, answers = people(6), [GOOD] * 6
        state = begin(recipe, torch.zeros(DIM), data, 20, key=0)
        came = 0
        for _ in range(20):
            state, info = run_round(recipe, state, data, Scripted(answers), key=0)
            came += info.participants
        assert state.parts["cohort"]["taken"] is not None
        assert int(state.parts["cohort"]["taken"].max()) == 3
        assert came == int(state.parts["cohort"]["taken"].sum()) <= 18


# Adaptive clip


def lengths(count: int) -> list[Tensor]:
    """Answers whose lengths on the gradient scale run evenly from 1 to 3; the median is 2."""
    return [GOOD / 0.5 * length * 0.1 for length in np.linspace(1, 3, count)]


@pytest.mark.parametrize("start", [0.02, 2.0, 200.0])
def test_the_threshold_finds_the_median_from_afar(start: float) -> None:
    """Within 15%, which is eight deviations.

    log C moves by 0.2·(count − ½) a round, and the count has noise of 1/20: near the median, where
    one more log C is one more count, log C has a deviation of 0.01/√(1 − 0.8²) = 0.017. From afar,
    it takes log(100)/0.1 = 46 rounds to come near.
    """
    recipe = algorithms.dp_fedavg_adaptive(
        start=start, rate=0.9, learning_rate=0.1, noise_multiplier=1.0
    )
    state, _ = play(recipe, lengths(60), rounds=80)
    assert 1.7 < float(state.parts["bound"]["threshold"]) < 2.3


def test_the_noise_follows_the_threshold_of_its_own_round() -> None:
    for start in (0.01, 100.0):
        recipe = algorithms.dp_fedavg_adaptive(
            start=start, rate=0.9, learning_rate=0.1, noise_multiplier=1.0
        )
        data = people(50)
        state = begin(recipe, torch.zeros(DIM), data, 30, key=0)
        ratios = []
        for _ in range(30):
            state, info = run_round(recipe, state, data, Scripted(lengths(50)), key=0)
            ratios.append(info.noise * 45 / info.threshold)
        # The norm of three unit Gaussians, whatever the threshold was.
        assert 1.2 < np.mean(ratios) < 2.0


def test_updates_that_are_not_finite_count_as_long() -> None:
    recipe = algorithms.dp_fedavg_adaptive(
        start=1.0, rate=1.0, learning_rate=0.1, noise_multiplier=1.0, count_noise=1e-2
    )
    state, _ = play(recipe, [BROKEN[0]] * 40)
    assert float(state.parts["bound"]["threshold"]) == pytest.approx(math.exp(0.2 * 0.5), rel=1e-3)
