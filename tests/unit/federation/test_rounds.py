"""Served rounds: equal to the simulation's, charged on both sides, and no more than was agreed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedveil.engines.loop import LoopEngine
from fedveil.federation.founding import Trust
from fedveil.federation.rounds import COUNTED
from fedveil.federation.serve import opened, serve
from fedveil.loop import run_round
from fedveil.recipe import Recipe
from fedveil.runs.saved import SavedRun
from fedveil.training.checkpoint import write_round
from fedveil.training.start import finish
from tests.unit.federation.hall import (
    ADAPTIVE,
    CLIENTS,
    CONTROLS,
    CORRELATED,
    MEMORY,
    MESSAGES,
    MODELS,
    PLAIN,
    ROUNDS,
    SECAGG,
    Hall,
    founded,
)

RECIPES = {
    "sum": SECAGG, "messages": MESSAGES, "models": MODELS, "adaptive": ADAPTIVE,
    "correlated": CORRELATED, "controls": CONTROLS,
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_served_run_is_the_simulated_one_bit_for_bit(recipe: Recipe, tmp_path: Path) -> None:
    """On a grid, with every client drawing from the simulation's streams.

    Clients are computed one by one: in a group, the last bits of an update may be others, which a
    grid hides unless the update is next to the middle of two of its points.
    """
    made = founded(tmp_path, recipe)
    people = made.participants()
    hall = Hall({client: one.handle for client, one in enumerate(people)})
    training = opened(made.directory, hall)
    for one in people:
        one._key = lambda opening: training.key  # type: ignore[method-assign]
        one._engine = LoopEngine(one._task)
    state, engine = training.state, people[0]._engine
    for _ in range(ROUNDS):
        training.step()
        state, _ = run_round(training.recipe, state, made.data, engine, training.key)
        assert torch.equal(training.state.x, state.x)
        assert training.state.parts["bound"] == state.parts["bound"]
        for name in recipe.memory.shared:
            mine, theirs = training.state.parts["memory"][name], state.parts["memory"][name]
            assert torch.equal(mine, theirs)
            assert float(mine.norm()) > 0
    training.close()


def test_a_memory_advances_only_when_its_message_was_counted(tmp_path: Path) -> None:
    made = founded(tmp_path, replace(MEMORY, cohort=replace(MEMORY.cohort, rate=1.0)))
    people = made.participants()
    lost = {1: {2}}  # round 1: client 2's message does not arrive

    def answering(client: int):
        def answer(request: bytes) -> bytes:
            reply = people[client].handle(request)
            if client in lost.get(training.state.round, ()):
                raise ConnectionError
            return reply

        return answer

    hall = Hall({client: answering(client) for client in range(CLIENTS)})
    training = opened(made.directory, hall)
    for one in people:
        one._key = lambda opening: training.key  # type: ignore[method-assign]
    training.step()
    first = people[2]._memory._pending
    training.step()  # its message is lost
    training.step()
    assert first is not None
    assert torch.equal(people[2]._memory._v, first.after)  # as if round 1 had not been
    assert not torch.equal(people[1]._memory._v, people[1]._memory._v * 0)
    assert training.state.parts["memory"][COUNTED].tolist() == [2] * CLIENTS
    training.close()


def test_a_served_run_is_saved_stated_and_charged_like_any_other(tmp_path: Path) -> None:
    made = founded(tmp_path, SECAGG, Trust(1, 1))
    people = made.participants()
    hall = Hall({client: one.handle for client, one in enumerate(people)})
    training = opened(made.directory, hall)
    result = finish(training)
    assert len(result.records) == ROUNDS
    assert result.records[0].norm is None  # clients keep their norms to themselves
    assert result.records[0].signal is None
    text = (made.directory / "run" / "privacy.txt").read_text()
    assert made.agreement.hash[:16] in text
    assert (
        f"At most 1 of the {made.agreement.clients} clients may collude with the server. No client"
        in text
    )
    assert "Drawn as integers from the operating system's randomness" in text
    assert SavedRun(made.directory / "run").rows
    assert people[0].spent() == pytest.approx(result.guarantee.epsilon, rel=1e-6)


def test_a_run_that_stopped_resumes_and_redrawn_rounds_are_charged_again(tmp_path: Path) -> None:
    made = founded(tmp_path, MESSAGES)
    people = made.participants()
    hall = Hall({client: one.handle for client, one in enumerate(people)})
    first = opened(made.directory, hall)
    first.step()  # published, but the process ends before a checkpoint is written
    first.close()
    before = people[0].spent()
    assert serve(made.directory, hall) == 0
    assert people[0].spent() > before
    again = SavedRun(made.directory / "run").summary["privacy"]["course"]
    assert again["redrawn"] == 1


def test_correlated_noise_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The server's past noise is in its checkpoint; nobody is invited before the separation."""
    made = founded(tmp_path, CORRELATED, rounds=6)
    people = made.participants()
    invited: list[tuple[int, int]] = []

    def answering(client: int):
        def answer(request: bytes) -> bytes:
            invited.append((client, training.state.round))
            return people[client].handle(request)

        return answer

    hall = Hall({client: answering(client) for client in range(CLIENTS)})
    training = opened(made.directory, hall)
    for _ in range(3):
        record = training.step()
    write_round(training, record)
    past = training.state.parts["noise"]["past"]
    training.close()
    training = opened(made.directory, hall)
    assert torch.equal(training.state.parts["noise"]["past"], past)
    result = finish(training)
    assert len(result.records) == 6
    assert "Separated: 2 clients per round, each at least 2 rounds apart" in result.statement.text()
    for client in range(CLIENTS):
        mine = sorted(round for who, round in invited if who == client)
        assert all(later - before >= 2 for before, later in itertools.pairwise(mine))
    assert len(invited) == 12


def test_a_run_without_privacy_says_so(tmp_path: Path) -> None:
    made = founded(tmp_path, PLAIN)
    hall = Hall({client: one.handle for client, one in enumerate(made.participants())})
    result = finish(opened(made.directory, hall))
    assert not result.guarantee.private
    assert result.records[0].norm is not None
