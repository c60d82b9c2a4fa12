"""Malicious clients: the server takes what is well formed, and names what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.aggregator import STAGES, Aggregator, Stage
from fedveil.federation.secagg.messages import Kind, RevealReply, SharesReply
from fedveil.federation.secagg.refusals import Aborted
from fedveil.federation.secagg.shamir import PRIME
from fedveil.federation.secagg.terms import SecAggTerms
from tests.unit.federation.secagg.test_hostile_server import keys_of, weak
from tests.unit.federation.secagg.world import World, identity

ASKED: tuple[Stage, ...] = STAGES[:-1]
ME, SECOND, CORRUPT = 2, 5, 14


def honest(world: World, server: Aggregator) -> None:
    """Everybody but the corrupt client finishes the round; the sum is exact."""
    while server.stage != "done":
        for client, request in server.requests().items():
            if client != CORRUPT and client not in server._replies:
                server.take(client, world.answer(client, request))
        server.close()
    assert np.array_equal(server.total, world.sum(server.survivors))


@pytest.mark.parametrize("stage", ASKED)
def test_broken_replies_are_malformed_and_leave_the_sum_exact(stage: Stage) -> None:
    world, draw = World(), random.Random(1)
    server = world.at(stage)
    reply = world.answer(CORRUPT, server.requests()[CORRUPT])
    broken = [reply[:length] for length in range(0, len(reply), max(len(reply) // 60, 1))]
    broken += [reply[:-1], reply + b"\0", reply[::-1], b"", draw.randbytes(len(reply))]
    for content in broken:
        assert server.take(CORRUPT, content) == "malformed"
    for _ in range(100):
        assert server.take(CORRUPT, reply[:6] + draw.randbytes(draw.randrange(400))) == "malformed"
    assert server.take(CORRUPT, None) == "malformed"  # type: ignore[arg-type]
    honest(world, server)


@pytest.mark.parametrize(
    "content",
    [
        lambda: keys_of(SECOND).record,  # of another client
        lambda: keys_of(CORRUPT, round=1).record,
        lambda: replace(keys_of(CORRUPT).record, signature=bytes(64)),
    ],
)
def test_keys_that_are_not_signed_for_this_round_are_forged(content: Callable[[], object]) -> None:
    world = World()
    server = world.server()
    record = content().plain()  # type: ignore[attr-defined]
    assert server.take(CORRUPT, messages.written(Kind.KEYS_REPLY, record)) == "forged"
    honest(world, server)


def test_a_key_of_another_client_is_not_taken() -> None:
    """All clients would refuse a round in which two have the same key."""
    world = World()
    server = world.server()
    first = world.answer(ME, server.requests()[ME])
    server.take(ME, first)
    copied = weak(CORRUPT, messages.read_record(first).mask)
    assert server.take(CORRUPT, messages.written(Kind.KEYS_REPLY, copied.plain())) == "forged"
    assert server.take(CORRUPT, messages.written(Kind.KEYS_REPLY, weak(14, bytes(32)).plain())) == (
        "malformed"
    )
    honest(world, server)


def test_known_keys_that_do_not_fit_are_asked_for_again() -> None:
    world = World()
    known = {ME: keys_of(ME, round=3).record.plain(), SECOND: b"junk", CORRUPT: bytes(128)}
    server = world.server(known=known)
    assert server.requests().keys() == set(world.cohort)
    honest(world, server)


@pytest.mark.parametrize("stage", ["shares", "masked", "consistency", "reveal"])
def test_replies_of_another_session_are_not_taken(stage: Stage) -> None:
    world = World()
    server = world.at(stage)
    reply = world.answer(CORRUPT, server.requests()[CORRUPT])
    assert server.take(CORRUPT, reply[:6] + bytes(32) + reply[38:]) == "malformed"
    assert server.take(CORRUPT, reply) == "taken"
    assert server.take(CORRUPT, reply) == "duplicate"
    assert server.take(1000, reply) == "uninvited"


def test_a_reply_to_an_earlier_stage_is_late() -> None:
    world = World()
    server = world.at("masked")
    for reply in (world.replies["shares"][CORRUPT], world.replies["keys"][CORRUPT]):
        assert server.take(CORRUPT, reply) == "late"
    assert server.verdicts["late"] == 2


def test_refusals_are_kept_as_words() -> None:
    world = World()
    server = world.at("shares")
    assert server.take(CORRUPT, messages.refusal("model")) == "refused"
    assert server.refusals == {CORRUPT: "model"}
    assert server.take(CORRUPT, messages.refusal("model")[:-1] + b"\xff") == "malformed"
    honest(world, server)


def test_a_signature_on_another_list_is_forged() -> None:
    world = World()
    server = world.at("consistency")
    content = messages.written(
        Kind.CONSISTENCY_REPLY, server._session, identity(CORRUPT).sign(b"another list")
    )
    assert server.take(CORRUPT, content) == "forged"
    honest(world, server)


@pytest.mark.parametrize("lost", [(), (SECOND,)])
@pytest.mark.parametrize("value", [0, PRIME - 1])
def test_wrong_shares_abort_the_round_and_make_no_sum(lost: tuple[int, ...], value: int) -> None:
    """A revealer that lies about one share, of a survivor's seed or of a lost client's key."""
    world = World(5, SecAggTerms(4, 1, 4, 12, 7))
    server = world.at("reveal", lost={"masked": lost})
    for client, request in server.requests().items():
        reply = RevealReply.read(world.answer(client, request), 5)
        if client == CORRUPT:
            shares = list(reply.shares)
            shares[1] = value
            reply = replace(reply, shares=tuple(shares))
        server.take(client, reply.write())
    if not lost:  # the first t revealers are used, so the liar must be among them
        server._shares = {c: server._shares[c] for c in world.cohort[1:]}
    with pytest.raises(Aborted) as problem:
        server.close()
    assert problem.value.word == "shares"
    assert server.stage == "aborted"
    with pytest.raises(UserError):
        _ = server.total


def test_a_wrong_check_value_aborts_the_round() -> None:
    world = World()
    server = world.at("shares")
    reply = SharesReply.read(world.answer(CORRUPT, server.requests()[CORRUPT]), 4)
    server.take(CORRUPT, replace(reply, check=bytes(32)).write())
    world.stage(server)
    world.until("reveal", server)
    with pytest.raises(Aborted, match="14"):
        world.stage(server)


def test_next_keys_that_are_not_signed_for_the_next_round_are_dropped() -> None:
    world = World()
    server = world.at("reveal")
    reply = RevealReply.read(world.answer(CORRUPT, server.requests()[CORRUPT]), 5)
    old = keys_of(CORRUPT, round=0).record
    assert server.take(CORRUPT, replace(reply, record=old).write()) == "taken"
    world.stage(server)
    assert server.next_keys.keys() == set(world.cohort) - {CORRUPT}


def test_a_client_without_an_identity_is_not_invited() -> None:
    world = World()
    with pytest.raises(UserError, match="roster"):
        Aggregator(world.context(), {ME: world.roster[ME]}, {})
