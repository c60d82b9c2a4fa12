"""Rounds of secure aggregation: the sum is exact, whoever is lost at whatever stage."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.federation.secagg.aggregator import STAGES, Aggregator, Stage
from fedveil.federation.secagg.refusals import Aborted
from fedveil.federation.secagg.terms import SecAggTerms, least_threshold
from tests.unit.federation.secagg.world import MODEL, World

ASKED: tuple[Stage, ...] = STAGES[:-1]
SCHEDULES = 120


def drawn_terms(draw: random.Random, clients: int) -> SecAggTerms:
    corrupt = draw.randrange((clients + 1) // 2)
    least = least_threshold(clients, corrupt)
    threshold = draw.randint(least, clients) if least <= clients else clients
    corrupt = min(corrupt, 2 * threshold - clients - 1)
    bits = draw.choice([1, 5, 8, 9, 16, 17, 31, 32, 33, 62])
    return SecAggTerms(threshold, corrupt, draw.randint(corrupt + 1, clients), bits, 9)


class Schedule:
    """Random losses at random stages over three rounds, and the outcome that follows from them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        clients = self.draw.randint(2, 6)
        self.world = World(clients, drawn_terms(self.draw, clients), seed)
        self.loss = self.draw.choice([0.0, 0.05, 0.15, 0.3])
        self.known: dict[int, bytes] = {}
        self.restarted: set[int] = set()
        self.outcomes: list[str] = []

    def play(self) -> list[str]:
        for round in range(3):
            self.restart_some()
            self.play_round(round)
        return self.outcomes

    def restart_some(self) -> None:
        self.restarted = {c for c in self.world.cohort if self.draw.random() < self.loss}
        for client in self.restarted:
            self.world.members[client] = self.world.member(client)

    def play_round(self, round: int) -> None:
        world, server = self.world, self.world.server(round, self.known)
        there = set(world.cohort)
        in_sum: set[int] = set()
        while server.stage != "done":
            stage = server.stage
            there = self.one_stage(stage, server, there)
            if stage == "masked":
                in_sum = set(there)
            needed = world.terms.needed if stage in ASKED[:3] else world.terms.threshold
            if len(there) < needed:
                with pytest.raises(Aborted):
                    server.close()
                self.known = server.next_keys
                self.outcomes.append(f"aborted in {stage}")
                return
            server.close()
        assert server.survivors == tuple(sorted(in_sum))
        assert np.array_equal(server.total, world.sum(in_sum))
        self.known = server.next_keys
        self.outcomes.append("exact")

    def one_stage(self, stage: Stage, server: Aggregator, there: set[int]) -> set[int]:
        """Ask, lose some requests and some replies; those who are left."""
        asked = server.requests()
        assert asked.keys() <= there
        lost = {client for client in asked if self.draw.random() < self.loss}
        for client in self.draw.sample(sorted(asked), len(asked)):
            if client in lost and self.draw.random() < 0.5:
                continue  # the request is lost; or else the reply
            reply = self.world.replied(client, asked[client])
            if client not in lost:
                expected = "taken"
                if stage == "shares" and client in self.restarted and client in self.known:
                    expected = "refused"  # its keys are gone
                    lost.add(client)
                assert server.take(client, reply) == expected
        return there - lost


def test_sums_are_exact_over_random_losses_at_every_stage() -> None:
    """120 schedules of three rounds: every sum equals the plain modular sum, bit for bit."""
    outcomes = [outcome for seed in range(SCHEDULES) for outcome in Schedule(seed).play()]
    assert len(outcomes) == 3 * SCHEDULES
    assert outcomes.count("exact") > SCHEDULES
    for stage in ASKED:
        assert f"aborted in {stage}" in outcomes


@pytest.mark.parametrize("stage", ASKED)
def test_one_client_is_lost(stage: Stage) -> None:
    for lost in World().cohort:
        world = World()
        server = world.at("done", lost={stage: [lost]})
        in_sum = stage in ("consistency", "reveal")
        assert server.survivors == tuple(c for c in world.cohort if in_sum or c != lost)
        assert np.array_equal(server.total, world.sum(server.survivors))


@pytest.mark.parametrize("stage", ASKED)
def test_a_stage_with_too_few_aborts_the_round(stage: Stage) -> None:
    world = World()
    server = world.at(stage)
    with pytest.raises(Aborted) as problem:
        world.stage(server, lost=world.cohort[:2])
    assert problem.value.word == "too-few"
    assert server.stage == "aborted"


def test_next_rounds_keys_travel_with_the_reveal() -> None:
    """The first round asks for keys; the second has four stages; a lost client is asked again."""
    world = World()
    first = world.at("done", lost={"reveal": world.cohort[:1]})
    assert first.next_keys.keys() == set(world.cohort[1:])
    second = world.server(1, first.next_keys)
    assert second.requests().keys() == {world.cohort[0]}
    world.until("done", second)
    assert second.next_keys.keys() == set(world.cohort)
    third = world.server(2, second.next_keys)
    assert third.stage == "shares"
    world.until("done", third)
    assert np.array_equal(third.total, world.sum(world.cohort))


def test_keys_are_fresh_in_every_round() -> None:
    world, seen = World(), set()
    known: dict[int, bytes] = {}
    for round in range(3):
        server = world.until("done", world.server(round, known))
        known = server.next_keys
        seen |= {record[at : at + 32] for record in known.values() for at in (0, 32)}
    assert len(seen) == 3 * 2 * len(world.cohort)


def test_a_late_message_is_not_in_the_sum() -> None:
    world = World()
    server = world.at("masked")
    late = world.cohort[2]
    reply = world.answer(late, server.requests()[late])
    world.until("reveal", server, {"masked": [late]})
    assert server.take(late, reply) == "uninvited"
    world.until("done", server)
    assert np.array_equal(server.total, world.sum(set(world.cohort) - {late}))
    assert server.take(late, reply) == "late"


def test_a_subset_of_the_roster_is_a_cohort() -> None:
    world = World(6)
    world.cohort = world.cohort[1:]
    server = world.at("done")
    assert np.array_equal(server.total, world.sum(world.cohort))


def test_there_is_no_sum_before_the_end() -> None:
    world = World()
    for stage in ASKED:
        with pytest.raises(UserError, match="no sum"):
            _ = world.at(stage).total
        world = World()


def test_a_round_that_is_over_stays_over() -> None:
    world = World()
    server = world.at("done")
    assert server.requests() == {}
    with pytest.raises(UserError, match="over"):
        server.close()


def test_repeated_requests_get_the_same_reply_and_compute_once() -> None:
    world, calls = World(), []

    def levels(_: object) -> np.ndarray:
        calls.append(1)
        return np.zeros(7, int)

    server = world.server()
    while server.stage != "done":
        for client, request in server.requests().items():
            replies = {world.members[client].answer(request, MODEL, levels) for _ in range(2)}
            assert len(replies) == 1
            assert server.take(client, replies.pop()) == "taken"
        server.close()
    assert len(calls) == len(world.cohort)


def test_a_message_is_computed_at_most_once_even_if_it_fails() -> None:
    """`levels` charges the client's ledger, so it must not be called again."""
    world, calls = World(), []
    server = world.at("masked")
    client = world.cohort[0]
    request = server.requests()[client]

    def fails(_: object) -> np.ndarray:
        calls.append(1)
        raise UserError("The budget is used up.")

    for _ in range(2):
        with pytest.raises(UserError):
            world.members[client].answer(request, MODEL, fails)
    assert calls == [1]


@pytest.mark.parametrize("levels", [np.zeros(7), np.zeros(6, int), np.zeros((1, 7), int)])
def test_levels_of_the_wrong_kind_are_refused(levels: np.ndarray) -> None:
    world = World()
    server = world.at("masked")
    client = world.cohort[0]
    with pytest.raises(UserError, match="whole numbers"):
        world.members[client].answer(server.requests()[client], MODEL, lambda _: levels)
