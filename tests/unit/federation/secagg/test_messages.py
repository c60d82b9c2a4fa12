"""Messages: what is written is read, and there is no second form of anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.secagg import messages
from fedveil.federation.secagg.messages import (
    BOX,
    Kind,
    Reader,
    RevealReply,
    SharesReply,
    SharesRequest,
)
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.shamir import ELEMENT, PRIME
from fedveil.federation.secagg.terms import MOST_CLIENTS
from tests.unit.federation.secagg.test_hostile_server import keys_of
from tests.unit.federation.secagg.world import World

CLIENTS = st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=20).map(sorted)


def test_requests_and_replies_are_read_as_they_were_written() -> None:
    asked = World().shares_request()
    assert SharesRequest.read(asked.write()) == asked
    shares = SharesReply(b"s" * 32, b"c" * 32, (b"b" * BOX, b"d" * BOX))
    assert SharesReply.read(shares.write(), 2) == shares
    reveal = RevealReply(b"s" * 32, (0, PRIME - 1), keys_of(2).record)
    assert RevealReply.read(reveal.write(), 2) == reveal


@settings(max_examples=50, deadline=None)
@given(CLIENTS)
def test_lists_have_one_form(clients: list[int]) -> None:
    ordered = tuple(clients)
    content = messages.written(Kind.CONSISTENCY, bytes(32), messages.write_clients(ordered))
    assert messages.read_survivors(content) == (bytes(32), ordered)
    if len(ordered) > 1:
        turned = messages.write_clients(ordered[::-1])
        with pytest.raises(Refusal):
            messages.read_survivors(messages.written(Kind.CONSISTENCY, bytes(32), turned))


@pytest.mark.parametrize("value", [PRIME, PRIME + 1, 2 ** (8 * ELEMENT) - 1])
def test_shares_are_below_the_prime(value: int) -> None:
    assert messages.element(messages.write_element(PRIME - 1)) == PRIME - 1
    with pytest.raises(Refusal):
        messages.element(messages.write_element(value))


def test_a_list_that_claims_too_many_allocates_nothing() -> None:
    claimed = (MOST_CLIENTS + 1).to_bytes(4, "big")
    with pytest.raises(Refusal, match="claims"):
        Reader(messages.written(Kind.CONSISTENCY, claimed), Kind.CONSISTENCY).clients()


def test_sizes_are_the_documented_ones() -> None:
    """docs/secagg.md, "Messages": bytes for n clients of whom all answer, with d·bits/8 packed."""
    world = World(5)
    server = world.server()
    n, packed = 5, 11
    expected = {
        "keys": (63, 134),
        "shares": (123 + 4 * n + 132 * n, 70 + 82 * (n - 1)),
        "masked": (42 + 86 * (n - 1), 38 + packed),
        "consistency": (42 + 4 * n, 102),
        "reveal": (42 + 68 * world.terms.threshold, 166 + 33 * n),
    }
    while server.stage != "done":
        stage, request = server.stage, server.requests()[2]
        world.stage(server)
        assert (len(request), len(world.replies[stage][2])) == expected[stage]
