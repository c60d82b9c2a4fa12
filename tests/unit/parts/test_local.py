"""Plans: who uses which of its examples when."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.parts.local import GD, SGD, IncrementalGradient, LocalPlan, Proximal
from fedveil.parts.schedule import Constant, Decay, Steps

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def plan(local, sizes: list[int], round: int = 0, seed: int = 0) -> LocalPlan:
    return local.plan(torch.tensor(sizes), round, np.random.default_rng(seed))


def used(plan: LocalPlan, client: int) -> list[list[int]]:
    """The batches that a client really uses."""
    steps = int((plan.rates[client] > 0).sum())
    rows = plan.index[client].expand(plan.steps, -1) if plan.repeated else plan.index[client]
    return [[i for i in row.tolist() if i >= 0] for row in rows[:steps]]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batch=st.integers(1, 15), epochs=st.integers(1, 3))
def test_an_epoch_uses_every_example_once(sizes: list[int], batch: int, epochs: int) -> None:
    made = plan(SGD(Constant(0.1), epochs=epochs, batch=batch), sizes)
    for client, size in enumerate(sizes):
        batches = used(made, client)
        assert len(batches) == epochs * -(-size // batch)
        assert all(len(b) <= batch for b in batches)
        flat = [i for b in batches for i in b]
        for start in range(0, len(flat), size):
            assert sorted(flat[start : start + size]) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batch=st.integers(1, 15), steps=st.integers(1, 7))
def test_steps_cut_reshuffled_passes_without_a_gap(sizes, batch: int, steps: int) -> None:
    made = plan(SGD(Constant(0.1), steps=steps, batch=batch), sizes)
    for client, size in enumerate(sizes):
        batches = used(made, client)
        assert [len(b) for b in batches] == [min(batch, size)] * steps
        flat = [i for b in batches for i in b]
        for start in range(0, len(flat) - size + 1, size):
            assert sorted(flat[start : start + size]) == list(range(size))


def test_shuffling_differs_between_clients_and_passes() -> None:
    made = plan(SGD(Constant(0.1), epochs=2, batch=10), [10, 10])
    batches = [used(made, client) for client in (0, 1)]
    assert batches[0][0] != batches[0][1]
    assert batches[0][0] != batches[1][0]


def test_full_batch_uses_all_examples_in_every_step() -> None:
    made = plan(SGD(Constant(0.5), steps=3), [2, 4])
    assert made.repeated
    assert made.steps == 3
    assert used(made, 0) == [[0, 1]] * 3
    assert used(made, 1) == [[0, 1, 2, 3]] * 3


def test_gd_takes_t_steps_of_gamma_over_t() -> None:
    gd = GD(Constant(0.6), steps=3)
    made = plan(gd, [2, 5])
    assert torch.allclose(made.rates, torch.full((2, 3), 0.2))
    assert gd.rate(0) == 0.6


def test_incremental_gradient_is_one_cyclic_pass_of_gamma_over_n() -> None:
    made = plan(IncrementalGradient(Constant(0.6)), [2, 3])
    assert used(made, 0) == [[0], [1]]
    assert used(made, 1) == [[0], [1], [2]]
    assert torch.allclose(made.rates, torch.tensor([[0.3, 0.3, 0.0], [0.2, 0.2, 0.2]]))


def test_a_group_of_a_plan_drops_padding_only() -> None:
    whole = plan(SGD(Constant(0.1), epochs=2, batch=3), [2, 9, 4])
    part = whole.group(0, 1)
    assert part.index.shape == (1, 2, 2)
    assert used(part, 0) == used(whole, 0)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, batch=st.integers(1, 15), steps=st.integers(1, 4))
def test_joined_plans_are_each_client_s_own(sizes: list[int], batch: int, steps: int) -> None:
    local = SGD(Constant(0.1), steps=steps, batch=batch)
    alone = [plan(local, [size], seed=seed) for seed, size in enumerate(sizes)]
    joined = LocalPlan.joined(alone)
    assert [used(joined, i) for i in range(len(sizes))] == [used(one, 0) for one in alone]


def test_joined_plans_of_full_batches_stay_repeated() -> None:
    alone = [plan(SGD(Constant(0.1), steps=3), [size]) for size in (2, 4)]
    assert LocalPlan.joined(alone).repeated
    assert used(LocalPlan.joined(alone), 1) == [[0, 1, 2, 3]] * 3


def test_options_reach_the_plan() -> None:
    made = plan(Proximal(Constant(0.1), steps=1, momentum=0.9, strength=0.5), [3])
    assert (made.momentum, made.proximal) == (0.9, 0.5)
    assert plan(SGD(Constant(0.1), steps=1, weight_decay=1e-4), [3]).weight_decay == 1e-4


def test_schedules() -> None:
    assert [Decay(1.0, 0.5)(k) for k in range(3)] == [1.0, 0.5, 0.25]
    assert [Steps(1.0, (1, 3), 0.1)(k) for k in range(4)] == pytest.approx([1, 0.1, 0.1, 0.01])
    made = plan(SGD(Decay(1.0, 0.5), steps=2), [1], round=2)
    assert torch.equal(made.rates, torch.full((1, 2), 0.25))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(Constant(0.1)),
        lambda: SGD(Constant(0.1), steps=1, epochs=1),
        lambda: SGD(Constant(0.1), steps=0),
        lambda: SGD(Constant(0.1), steps=1, batch=0),
        lambda: SGD(Constant(0.1), steps=1, momentum=1.0),
        lambda: SGD(Constant(-0.1), steps=1),
        lambda: Proximal(Constant(0.1), steps=1, strength=-1.0),
        lambda: GD(Constant(0.1), steps=0),
    ],
)
def test_wrong_plans_are_refused(make) -> None:
    with pytest.raises(UserError):
        make()
