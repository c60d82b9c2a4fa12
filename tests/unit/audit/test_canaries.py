"""Canaries in a run: they send what was chosen, all else is as it would be, nothing is missed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.audit.canaries import LONG, Canaries, CanaryEngine, with_canaries, with_mislabelled
from fedveil.audit.listening import Heard, listening
from fedveil.data.federated import Federated
from fedveil.loop import begin, run_round
from fedveil.parts.bound import AdaptiveClip
from fedveil.parts.cohort import Poisson
from fedveil.recipe import Recipe, observed
from fedveil.testing.bounds import bounded
from fedveil.testing.recipes import RecordedKey
from fedveil.testing.replay import Scripted, WatchedNoise, normal_answers
from tests.contracts.examples import PRIVATE
from tests.statistics.audit.chances import DEVIATIONS

DIM, COUNT = 30, 12


def test_directions_are_unit_vectors_drawn_afresh_and_found_again() -> None:
    dim = 400  # so that six deviations of a cosine are far below 1, which equal directions have
    canaries = Canaries(np.arange(200), np.ones(200), dim, key=0)
    first, second = canaries.directions(0), canaries.directions(1)
    others = Canaries(np.arange(200), np.ones(200), dim, key=1).directions(0)
    assert np.linalg.norm(first, axis=1) == pytest.approx(np.ones(200), abs=1e-5)
    for cosines in ((first * second).sum(axis=1), (first * others).sum(axis=1)):
        assert np.abs(cosines).max() < 6 / math.sqrt(dim) < 0.5
    assert np.array_equal(canaries.directions(0), first)
    assert first.mean(axis=0) == pytest.approx(np.zeros(dim), abs=6 / math.sqrt(200 * dim))


def test_canaries_draw_from_streams_of_their_own() -> None:
    """Directions that came from the noise's stream would be found in the noise."""
    recipe, key = PRIVATE["dp_fedavg"], RecordedKey()
    data, places = with_canaries(_people(8), COUNT, np.random.default_rng(3))
    canaries = Canaries(places, np.ones(COUNT), DIM, key)
    engine = CanaryEngine(Scripted(normal_answers(data.clients, DIM)), canaries, recipe)
    state = begin(recipe, torch.zeros(DIM), data, 2, key)
    for k in range(2):
        engine.begin(k, state.x, data)
        state, _ = run_round(recipe, state, data, engine, key)
    assert (1, "canaries") in key.opened
    assert {stream for stream, times in key.opened.items() if times > 1} == set()


def test_canaries_are_found_among_units() -> None:
    canaries = Canaries(np.array([2, 5, 9]), np.ones(3), DIM, key=0)
    which, who = canaries.among(np.array([0, 5, 6, 9, 11]))
    assert which.tolist() == [False, True, False, True, False]
    assert who.tolist() == [1, 2]


def test_data_stay_as_they_are_around_the_canaries(blobs: Federated) -> None:
    mixed, places = with_canaries(blobs, COUNT, np.random.default_rng(0))
    assert mixed.clients == blobs.clients + COUNT
    assert len(set(places.tolist())) == COUNT
    rest = np.setdiff1d(np.arange(mixed.clients), places)
    for old, new in enumerate(rest):
        assert torch.equal(mixed.client(int(new)).inputs, blobs.client(old).inputs)
        assert torch.equal(mixed.client(int(new)).labels, blobs.client(old).labels)
    assert all(int(mixed.sizes[place]) == int(blobs.sizes.max()) for place in places)


def test_mislabelled_canaries_have_wrong_labels(blobs: Federated) -> None:
    data = blobs.by_example()
    mixed, places = with_mislabelled(data, 40, np.random.default_rng(0))
    for place in places:
        canary = mixed.client(int(place))
        source = (data.inputs == canary.inputs[0]).all(dim=1).nonzero().flatten()
        assert len(source) == 1
        assert int(canary.labels[0]) != int(data.labels[int(source[0])])


# ------------------------------------------------------------------- one round, overheard


def heard_round(
    recipe: Recipe, noise: str = "none", rounds: int = 1, signs: float = 1.0, removed: bool = False
) -> tuple[Heard, CanaryEngine, float]:
    """The last of some rounds with scripted others; how long a message may be in it."""
    people = 8
    data, places = with_canaries(_people(people), COUNT, np.random.default_rng(3))
    rest = np.setdiff1d(np.arange(data.clients), places)
    answers = {int(c): row for c, row in zip(rest, normal_answers(people, DIM), strict=True)} | {
        int(c): torch.full((DIM,), torch.nan) for c in places
    }
    canaries = Canaries(places, np.full(COUNT, signs), DIM, key=0, removed=removed)
    engine = CanaryEngine(Scripted([answers[c] for c in range(data.clients)]), canaries, recipe)
    heard = Heard(canaries, engine, recipe.cohort.expected(data.clients))
    silenced: Any = {"noise": WatchedNoise(recipe.noise, noise)}
    played = listening(observed(recipe, **silenced), heard)
    state = begin(recipe, torch.zeros(DIM), data, 3, key=0)
    for k in range(rounds):
        length = recipe.message(DIM).l2
        if isinstance(recipe.bound, AdaptiveClip) and state.parts["bound"]["threshold"] is not None:
            length = recipe.message(DIM, recipe.bound.at(state.parts["bound"])).l2
        engine.begin(k, state.x, data)
        state, _ = run_round(played, state, data, engine, 0)
    return heard, engine, length


def _people(count: int) -> Federated:
    from fedveil.testing.replay import people

    return people(count)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", [name for name in PRIVATE if not PRIVATE[name].by_record])
def test_without_noise_the_canaries_are_all_that_is_heard(name: str, rounds: int) -> None:
    """The others' messages are known exactly, and a canary's is as long as any can be."""
    recipe = PRIVATE[name]
    heard, engine, length = heard_round(recipe, rounds=rounds)
    if heard.release is None:
        return  # too few came
    directions = engine.canaries.directions(engine.round)[heard.who]
    found = heard.release * heard.denominator / recipe.memory.rate
    bound = recipe.message(DIM)
    coarse = 0.0 if bound.grid is None else math.sqrt(len(directions)) * bound.grid
    long = torch.from_numpy(directions) * (LONG * recipe.bound.norms(DIM).l2)
    sent = bounded(recipe.bound, long).double().sum(dim=0).numpy()  # not radial: not along them
    sent *= length / bound.l2
    assert found == pytest.approx(sent, abs=4 * coarse + 1e-4 * length * (1 + len(directions)))


def test_canaries_that_are_left_out_send_nothing_and_opposite_ones_the_opposite() -> None:
    recipe = PRIVATE["dp_fedavg"]
    silent, _, _ = heard_round(recipe, signs=0.0)
    there, _, _ = heard_round(recipe)
    opposite, _, _ = heard_round(recipe, signs=-1.0)
    assert silent.release is not None
    assert there.release is not None
    assert opposite.release is not None
    assert np.abs(silent.release).max() < 1e-5
    assert there.release == pytest.approx(-opposite.release, abs=1e-5)
    assert np.linalg.norm(there.release) > 0.1


def test_canaries_that_are_removed_are_in_no_cohort_and_change_nothing_else() -> None:
    recipe = replace(PRIVATE["dp_fedavg_adaptive"], cohort=Poisson(1.0))
    removed, _, _ = heard_round(recipe, signs=0.0, removed=True)
    silent, _, _ = heard_round(recipe, signs=0.0)
    there, _, _ = heard_round(recipe, removed=True)
    assert removed.release is not None
    assert np.abs(removed.release).max() < 1e-5
    assert (len(removed.who), len(silent.who), len(there.who)) == (0, COUNT, COUNT)


def test_what_is_heard_holds_the_noise() -> None:
    recipe = algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=50.0)
    heard, _, length = heard_round(recipe, noise="real")
    assert heard.release is not None
    found = float(np.std(heard.release)) * heard.denominator
    assert 0.4 < found / (50 * length) < 1.8  # 30 numbers: beyond five errors


def test_each_canary_s_message_is_heard_with_its_own_noise() -> None:
    recipe = replace(PRIVATE["dp_norm_fedavg_discrete"], cohort=Poisson(1.0))
    clean, engine, _ = heard_round(recipe)
    noisy, _, _ = heard_round(recipe, noise="real")
    assert len(clean.messages) == len(clean.noise) == len(clean.who) == COUNT
    directions = engine.canaries.directions(0)[clean.who]
    for direction, message, silence in zip(directions, clean.messages, clean.noise, strict=True):
        assert not silence.any()
        assert float(direction @ message) / np.linalg.norm(message) > 0.99
    for message, other in zip(clean.messages, noisy.messages, strict=True):
        assert np.array_equal(message, other)
    spread = DEVIATIONS / math.sqrt(2 * COUNT * DIM)
    assert float(np.std(np.stack(noisy.noise))) == pytest.approx(200.0, rel=1.1 * spread)
    assert noisy.release is not None
    assert clean.release is not None
    grid = recipe.message(DIM).grid
    assert grid is not None
    own = np.sum(noisy.noise, axis=0) * grid / noisy.denominator
    assert np.linalg.norm(noisy.release - clean.release) >= 0.3 * np.linalg.norm(own)
