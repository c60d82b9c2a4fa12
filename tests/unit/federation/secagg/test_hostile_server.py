"""An active server: every request that is not as agreed is refused, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedveil.federation.secagg import messages
from fedveil.federation.secagg.aggregator import STAGES, Aggregator, Stage
from fedveil.federation.secagg.derived import survivors_text
from fedveil.federation.secagg.keys import KeyRecord, RoundKeys, context_place
from fedveil.federation.secagg.messages import Kind, RevealReply, SharesRequest
from fedveil.federation.secagg.primitives import CURVE, LOW_ORDER
from fedveil.federation.secagg.refusals import WORDS
from fedveil.federation.secagg.terms import SecAggTerms, place
from tests.unit.federation.secagg.world import (
    AGREEMENT,
    MODEL,
    OPENING,
    OTHER,
    World,
    identity,
    refused,
)

ASKED: tuple[Stage, ...] = STAGES[:-1]
ME, SECOND, THIRD, FOURTH, CORRUPT = 2, 5, 8, 11, 14  # the cohort of a world of five


def finishes(world: World, server: Aggregator) -> None:
    """The honest round goes on: what was refused has changed nothing."""
    world.until("done", server)
    assert np.array_equal(server.total, world.sum(server.survivors))
    assert server.survivors == world.cohort


def keys_of(client: int, round: int = 0, seed: int = 77, signer: int | None = None) -> RoundKeys:
    """Keys that a corrupt client, or a restarted one, makes beside those it has sent."""
    where, signs = place(AGREEMENT, OPENING, round), identity(client if signer is None else signer)
    return RoundKeys.draw(where, round, client, signs, random.Random(seed).randbytes)


def weak(client: int, point: bytes) -> KeyRecord:
    """A record that its client has really signed, with a point of its choice."""
    good = keys_of(client)
    text = b"fedveil/secagg/1/keys" + place(AGREEMENT, OPENING, 0) + client.to_bytes(4, "big")
    return KeyRecord(good.record.box, point, identity(client).sign(text + good.record.box + point))


MINE = keys_of(CORRUPT).mask.public  # a key whose private half the server knows
Change = Callable[[World, SharesRequest], SharesRequest]


def with_context(**changes: object) -> Change:
    return lambda world, asked: replace(asked, context=replace(asked.context, **changes))


def with_terms(**changes: int) -> Change:
    return lambda world, asked: with_context(terms=replace(world.terms, **changes))(world, asked)


def with_record(client: int, make: Callable[[SharesRequest], KeyRecord]) -> Change:
    return lambda world, asked: replace(asked, records={**asked.records, client: make(asked)})


def only(*clients: int) -> Change:
    return lambda world, asked: replace(
        asked, records={c: r for c, r in asked.records.items() if c in clients}
    )


ENTRIES: dict[str, tuple[Change, str]] = {
    "another agreement": (with_context(agreement=OTHER), "agreement"),
    "another opening": (with_context(opening=b"p" * 16), "opening"),
    "another round": (with_context(round=1), "keys"),
    "another model": (with_context(model=OTHER), "model"),
    "a higher threshold": (with_terms(threshold=5), "terms"),
    "fewer survivors": (with_terms(enough=2), "terms"),
    "fewer corrupt clients": (with_terms(corrupt=0), "terms"),
    "another width": (with_terms(bits=13), "terms"),
    "another size": (with_terms(dim=8), "terms"),
    "a cohort without this client": (
        lambda world, asked: replace(
            only(*world.cohort[1:])(world, asked),
            context=replace(asked.context, cohort=(*world.cohort[1:], 1000)),
        ),
        "cohort",
    ),
    "a client without an identity": (
        with_context(cohort=(ME, SECOND, THIRD, FOURTH, 999)),
        "cohort",
    ),
    "swapped keys": (
        with_record(SECOND, lambda asked: replace(asked.records[SECOND], mask=MINE)),
        "signature",
    ),
    "keys signed by another client": (
        with_record(SECOND, lambda _: keys_of(SECOND, signer=CORRUPT).record),
        "signature",
    ),
    "keys of an old round": (
        with_record(SECOND, lambda _: keys_of(SECOND, round=7).record),
        "signature",
    ),
    "one's own keys exchanged": (with_record(ME, lambda _: keys_of(ME).record), "keys"),
    "one client's keys given to another": (
        with_record(SECOND, lambda asked: asked.records[THIRD]),
        "keys",
    ),
    "too few keys": (only(ME, SECOND, THIRD), "too-few"),
    "no key of one's own": (only(SECOND, THIRD, FOURTH, CORRUPT), "keys"),
    "keys of a client outside the cohort": (
        with_record(1000, lambda _: keys_of(1000).record),
        "keys",
    ),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_a_round_that_is_not_as_agreed_is_not_entered(case: str) -> None:
    change, word = ENTRIES[case]
    world = World()
    server = world.at("shares")
    asked = SharesRequest.read(server.requests()[ME])
    assert refused(world, ME, change(world, asked).write()) == word
    finishes(world, server)


@pytest.mark.parametrize("changes", [{"threshold": 3}, {"corrupt": 4}, {"enough": 6}])
def test_terms_that_cannot_hold_are_refused_by_the_parser(changes: dict[str, int]) -> None:
    """2t > n + corrupt and enough ≤ n; such terms cannot even be written down as a context."""
    world = World()
    server = world.at("shares")
    numbers = {"threshold": 0, "corrupt": 1, "enough": 2}
    (name, value), content = next(iter(changes.items())), bytearray(server.requests()[ME])
    at = 6 + len(place(AGREEMENT, OPENING, 0)) + 32 + 4 * numbers[name]
    content[at : at + 4] = value.to_bytes(4, "big")
    assert refused(world, ME, bytes(content)) == "terms"
    finishes(world, server)


def test_a_larger_cohort_does_not_weaken_the_threshold() -> None:
    """The agreed t was enough for the agreed cohort; with more clients, 2t > n + corrupt fails."""
    world = World(7, SecAggTerms(4, 1, 3, 12, 7))
    small = SharesRequest(replace(World(6).context(), terms=world.terms), {}).write()
    at = 6 + len(place(AGREEMENT, OPENING, 0)) + 32 + 20
    large = small[:at] + messages.write_clients(world.cohort) + small[at + 4 + 6 * 4 :]
    assert refused(world, ME, small) == "keys"  # its terms hold
    assert refused(world, ME, large) == "terms"


@pytest.mark.parametrize("point", sorted(LOW_ORDER))
def test_points_of_low_order_are_refused(point: int) -> None:
    """Even if their client has signed them: the shared secret would be zero, known to all."""
    world = World()
    server = world.at("shares")
    asked = SharesRequest.read(server.requests()[ME])
    record = weak(CORRUPT, point.to_bytes(32, "little"))
    assert record.signed(context_place(asked.context), CORRUPT, world.roster[CORRUPT])
    change = with_record(CORRUPT, lambda _: record)
    assert refused(world, ME, change(world, asked).write()) == "keys"
    finishes(world, server)


@pytest.mark.parametrize("number", [CURVE, CURVE + 1, CURVE + 9, 2**255 + 9, 2**256 - 1])
def test_points_with_a_second_form_are_refused(number: int) -> None:
    world = World()
    asked = SharesRequest.read(world.at("shares").requests()[ME])
    record = weak(CORRUPT, number.to_bytes(32, "little"))
    assert (
        refused(world, ME, with_record(CORRUPT, lambda _: record)(world, asked).write()) == "keys"
    )


def boxes_for(server: Aggregator, client: int) -> dict[int, bytes]:
    return messages.read_table(server.requests()[client], Kind.MASKED, messages.BOX)[1]


Boxes = dict[int, bytes]
BOXES: dict[str, tuple[Callable[[Aggregator, Boxes], Boxes], str]] = {
    "two senders exchanged": (lambda _, b: {**b, SECOND: b[THIRD], THIRD: b[SECOND]}, "boxes"),
    "one box twice": (lambda _, b: {**b, SECOND: b[THIRD]}, "boxes"),
    "one's own box reflected": (
        lambda server, b: {**b, SECOND: boxes_for(server, SECOND)[ME]},
        "boxes",
    ),
    "a box for another client": (
        lambda server, b: {**b, SECOND: boxes_for(server, THIRD)[SECOND]},
        "boxes",
    ),
    "a changed bit": (
        lambda _, b: {**b, SECOND: bytes([b[SECOND][0] ^ 1]) + b[SECOND][1:]},
        "boxes",
    ),
    "a box from oneself": (lambda _, b: {**b, ME: b[SECOND]}, "boxes"),
    "a box from outside": (lambda _, b: {**b, 1000: b[SECOND]}, "boxes"),
    "too few boxes": (lambda _, b: {SECOND: b[SECOND], THIRD: b[THIRD]}, "too-few"),
}


@pytest.mark.parametrize("case", BOXES)
def test_no_message_is_sent_unless_every_box_opens(case: str) -> None:
    """A box that opens proves that its sender is in the same session, with the same model."""
    change, word = BOXES[case]
    world = World()
    server = world.at("masked")
    boxes = change(server, boxes_for(server, ME))
    request = messages.written(Kind.MASKED, server._session, messages.write_table(boxes))
    assert refused(world, ME, request) == word
    finishes(world, server)


def test_another_model_after_the_round_was_entered_is_refused() -> None:
    world = World()
    server = world.at("masked")
    assert refused(world, ME, server.requests()[ME], model=OTHER) == "model"
    finishes(world, server)


def split(world: World, other: tuple[int, ...]) -> tuple[Aggregator, Aggregator]:
    """Two servers with the same keys; the clients in `other` are shown another model."""
    first = world.at("shares")
    known = {client: record.plain() for client, record in first._records.items()}
    second = Aggregator(world.context(model=OTHER), world.roster, known)
    for client in world.cohort:
        server, model = (second, OTHER) if client in other else (first, MODEL)
        server.take(client, world.answer(client, server.requests()[client], model))
    return first, second


def test_clients_with_different_models_cannot_be_used_together() -> None:
    """Keys sent ahead are the same for both models; boxes and masks made of them are not."""
    world = World()
    first, second = split(world, (SECOND,))
    first._shared[SECOND] = replace(second._shared[SECOND], session=first._session)
    first.close()
    for client in (ME, THIRD, FOURTH, CORRUPT):
        assert refused(world, client, first.requests()[client]) == "boxes"


def test_clients_with_different_keys_cannot_be_used_together() -> None:
    """A client that has signed two records, after a restart, is seen with one of them only."""
    world = World()
    first = world.at("shares")
    again = keys_of(SECOND).record
    for client in world.cohort:
        asked = SharesRequest.read(first.requests()[client])
        if client == THIRD:
            asked = replace(asked, records={**asked.records, SECOND: again})
        reply = world.answer(client, asked.write())
        verdict = first.take(client, reply)
        assert verdict == ("malformed" if client == THIRD else "taken")
    theirs = messages.SharesReply.read(world.answer(THIRD, asked_of(world, first, again)), 4)
    first._shared[THIRD] = replace(theirs, session=first._session)
    first.close()
    assert refused(world, ME, first.requests()[ME]) == "boxes"


def asked_of(world: World, server: Aggregator, record: KeyRecord) -> bytes:
    asked = SharesRequest.read(server.requests()[THIRD])
    return replace(asked, records={**asked.records, SECOND: record}).write()


def test_a_second_session_in_the_same_round_is_not_entered() -> None:
    """The same keys never serve two contexts, so no secret is shared twice."""
    world = World()
    first = world.at("masked")
    other = Aggregator(
        world.context(model=OTHER),
        world.roster,
        {client: record.plain() for client, record in first._records.items()},
    )
    assert refused(world, ME, other.requests()[ME], model=OTHER) == "keys"
    finishes(world, first)


def asked_to_sign(server: Aggregator, survivors: tuple[int, ...]) -> bytes:
    return messages.written(Kind.CONSISTENCY, server._session, messages.write_clients(survivors))


@pytest.mark.parametrize(
    ("survivors", "word"),
    [
        ((ME, SECOND, THIRD), "too-few"),  # fewer than enough
        ((SECOND, THIRD, FOURTH, CORRUPT), "survivors"),  # without this client
        ((ME, SECOND, THIRD, FOURTH, 1000), "survivors"),
        ((ME, ME, SECOND, THIRD, FOURTH), "malformed"),
        ((SECOND, ME, THIRD, FOURTH), "malformed"),
        ((), "survivors"),
    ],
)
def test_survivors_that_do_not_fit_are_not_signed(survivors: tuple[int, ...], word: str) -> None:
    world = World()
    server = world.at("consistency")
    assert refused(world, ME, asked_to_sign(server, survivors)) == word
    finishes(world, server)


def test_enough_survivors_are_awaited_even_if_the_threshold_is_lower() -> None:
    """The noise relies on honest + corrupt survivors: clients enforce it, not the server."""
    world = World(5, SecAggTerms(threshold=4, corrupt=1, enough=5, bits=12, dim=7))
    server = world.at("consistency")
    assert refused(world, ME, asked_to_sign(server, (ME, SECOND, THIRD, FOURTH))) == "too-few"
    finishes(world, server)


def test_survivors_without_shares_are_not_signed() -> None:
    """A client that has sent no boxes can have no masks that cancel."""
    world = World()
    server = world.at("consistency", lost={"shares": [CORRUPT]})
    assert refused(world, ME, asked_to_sign(server, world.cohort)) == "survivors"


def test_a_second_list_of_survivors_is_not_signed() -> None:
    world = World()
    server = world.at("consistency")
    world.answer(ME, server.requests()[ME])
    assert refused(world, ME, asked_to_sign(server, (ME, SECOND, THIRD, FOURTH))) == "repeated"
    finishes(world, server)


def signed(world: World, client: int, server: Aggregator, survivors: tuple[int, ...]) -> bytes:
    """The signature of a corrupt client, on whatever list."""
    sharers = tuple(sorted(server._shared))
    return identity(client).sign(survivors_text(server._session, client, sharers, survivors))


def to_reveal(server: Aggregator, signatures: dict[int, bytes]) -> bytes:
    return messages.written(Kind.REVEAL, server._session, messages.write_table(signatures))


def test_split_lists_of_survivors_reveal_nothing() -> None:
    """Honest clients sign one list each and the corrupt one signs both: neither list gets t."""
    world = World()
    server = world.at("consistency")
    lists = {world.cohort: (ME, SECOND), (ME, SECOND, THIRD, FOURTH): (THIRD, FOURTH)}
    for survivors, victims in lists.items():
        signatures = {CORRUPT: signed(world, CORRUPT, server, survivors)}
        for client in victims:
            reply = world.answer(client, asked_to_sign(server, survivors))
            signatures[client] = messages.read_signature(reply)[1]
        if CORRUPT not in survivors:
            del signatures[CORRUPT]
        for client in victims:
            assert refused(world, client, to_reveal(server, signatures)) == "too-few"


@pytest.mark.parametrize(
    "forge",
    [
        lambda world, server, good: good[SECOND],  # another client's signature
        lambda world, server, good: bytes(64),
        lambda world, server, good: signed(world, CORRUPT, server, (ME, SECOND, THIRD, CORRUPT)),
        lambda world, server, good: identity(CORRUPT).sign(
            survivors_text(bytes(32), CORRUPT, world.cohort, world.cohort)
        ),  # of another session
        lambda world, server, good: identity(CORRUPT).sign(
            survivors_text(server._session, CORRUPT, world.cohort[1:], world.cohort)
        ),  # with other boxes
        lambda world, server, good: signed(world, SECOND, server, world.cohort),
    ],
)
def test_a_list_that_is_not_signed_by_t_survivors_reveals_nothing(
    forge: Callable[[World, Aggregator, dict[int, bytes]], bytes],
) -> None:
    world = World()
    server = world.at("reveal")
    good = dict(server._signatures)
    bad = {client: good[client] for client in (ME, SECOND, THIRD)}
    bad[CORRUPT] = forge(world, server, good)
    assert refused(world, ME, to_reveal(server, bad)) == "signature"
    finishes(world, server)


def test_too_few_or_foreign_signatures_reveal_nothing() -> None:
    world = World()
    server = world.at("reveal", lost={"masked": [CORRUPT]})
    good = dict(server._signatures)
    few = {client: good[client] for client in (ME, SECOND, THIRD)}
    assert refused(world, ME, to_reveal(server, few)) == "too-few"
    foreign = {**few, CORRUPT: signed(world, CORRUPT, server, server.survivors)}
    assert refused(world, ME, to_reveal(server, foreign)) == "survivors"
    outside = {**few, 1000: signed(world, 1000, server, server.survivors)}
    assert refused(world, ME, to_reveal(server, outside)) == "survivors"
    world.until("done", server)


def test_shares_are_revealed_once() -> None:
    """The same request gets the same reply; one with other signatures gets none."""
    world = World()
    server = world.at("reveal")
    usual = server.requests()[ME]
    reply = world.answer(ME, usual)
    assert world.answer(ME, usual) == reply
    others = {client: server._signatures[client] for client in world.cohort[1:]}
    assert refused(world, ME, to_reveal(server, others)) == "repeated"
    assert refused(world, ME, asked_to_sign(server, (ME, SECOND, THIRD, FOURTH))) == "repeated"
    finishes(world, server)


def test_one_share_of_each_client_and_never_the_other() -> None:
    """Alive and dead lists cannot overlap: the server sends survivors, the rest follows from it."""
    world = World()
    server = world.at("reveal", lost={"masked": [CORRUPT]})
    seat = world.members[ME]._seat
    assert seat is not None
    held = dict(seat._held)
    reply = RevealReply.read(world.answer(ME, server.requests()[ME]), 5)
    assert reply.shares[:4] == tuple(held[client].self_mask for client in world.cohort[:4])
    assert reply.shares[4] == held[CORRUPT].mask
    hidden = {held[c].mask for c in world.cohort[:4]} | {held[CORRUPT].self_mask}
    assert not hidden & set(reply.shares)


def test_secrets_are_erased_when_no_later_stage_needs_them() -> None:
    world = World()
    world.at("done")
    for member in world.members.values():
        seat = member._seat
        assert seat is not None
        assert seat._secrets is None
        assert seat._held == {}
        assert member._ahead is not None
        assert member._ahead.round == 1
    server = world.server(5)
    world.stage(server)
    assert all(member._seat is None for member in world.members.values())


def test_old_rounds_are_not_entered_again() -> None:
    world = World()
    first = world.at("done")
    old = messages.keys_request(AGREEMENT, OPENING, 0)
    assert refused(world, ME, old) == "round"
    records = {client: record.plain() for client, record in first._records.items()}
    again = Aggregator(world.context(model=OTHER), world.roster, records)
    assert refused(world, ME, again.requests()[ME], model=OTHER) == "keys"
    world.until("done", world.server(4, first.next_keys))
    assert refused(world, ME, messages.keys_request(AGREEMENT, OPENING, 3)) == "round"


def test_old_keys_do_not_serve_another_round() -> None:
    """Keys of round 0 for SECOND, among the keys of round 1."""
    world = World()
    first = world.at("done")
    second = world.server(1, first.next_keys)
    asked = SharesRequest.read(second.requests()[ME])
    stale = replace(asked, records={**asked.records, SECOND: first._records[SECOND]})
    assert refused(world, ME, stale.write()) == "signature"
    finishes(world, second)


@pytest.mark.parametrize("stage", ASKED)
def test_requests_out_of_order_are_refused(stage: Stage) -> None:
    """At each stage, every other stage's request of the same round."""
    requests = {}
    world = World()
    server = world.server()
    while server.stage != "done":
        requests[server.stage] = server.requests()[ME]
        world.stage(server)
    fresh = World()
    now = fresh.at(stage)
    for other, request in requests.items():
        if ASKED.index(other) > ASKED.index(stage):
            assert refused(fresh, ME, request) in ("stage", "keys")
    finishes(fresh, now)


@pytest.mark.parametrize("stage", ASKED)
def test_broken_requests_are_refused_with_a_word_of_the_list(stage: Stage) -> None:
    """Cut at every length, one byte too long, and with random bytes changed."""
    world, draw = World(), random.Random(0)
    server = world.at(stage)
    request = server.requests()[ME]
    broken = [request[:length] for length in range(0, len(request), max(len(request) // 120, 1))]
    broken += [request[:-1], request + b"\0", request + request, b"", request[::-1]]
    broken += [draw.randbytes(len(request)) for _ in range(5)]
    broken += [request[:6] + draw.randbytes(draw.randrange(400)) for _ in range(100)]
    for content in broken:
        assert refused(world, ME, content) in WORDS
    for _ in range(150):
        changed = bytearray(request)
        changed[draw.randrange(len(request))] ^= 1 << draw.randrange(8)
        if bytes(changed) != request and stage != "keys":
            assert refused(world, ME, bytes(changed)) in WORDS
    finishes(world, server)


@pytest.mark.parametrize("content", [None, 7, "fvsa", bytearray(b"fvsa\1\1"), b"fvsa\1\x11"])
def test_what_is_no_request_is_refused(content: object) -> None:
    assert refused(World(), ME, content) in ("malformed", "stage")  # type: ignore[arg-type]


def test_another_session_is_refused_at_every_later_stage() -> None:
    world = World()
    server = world.at("masked")
    while server.stage != "done":
        request = server.requests()[ME]
        changed = request[:6] + bytes(32) + request[38:]
        assert refused(world, ME, changed) == "session"
        world.stage(server)


def test_a_refusal_tells_the_server_one_word() -> None:
    """Seven bytes: nothing of the sentence, which is for the owner."""
    for word in WORDS:
        content = messages.refusal(word)
        assert len(content) == 7
        assert messages.read_refusal(content) == word
