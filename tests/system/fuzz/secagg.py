"""Secure aggregation under fuzzing: what a client is asked, and what a server is answered.

The first byte of an input names the stage, the rest is the message. A client answers or refuses
with a word of the list. A server gives a verdict and never fails. What is read is what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import get_args

from fedveil.federation.secagg import messages
from fedveil.federation.secagg.aggregator import STAGES, Aggregator, Taken
from fedveil.federation.secagg.messages import BOX, Kind, RevealReply, SharesReply, SharesRequest
from fedveil.federation.secagg.primitives import SIGNATURE
from fedveil.federation.secagg.refusals import Refusal
from tests.unit.federation.secagg.world import World

CLIENT = 2
ASKED = STAGES[:-1]


@cache
def _at(stage: int) -> tuple[World, Aggregator]:
    """A federation of five at the beginning of a stage."""
    world = World()
    return world, world.at(ASKED[stage])


def requests(content: bytes) -> None:
    """A request of any server, at any stage."""
    stage, request = _split(content)
    world, _ = _at(stage)
    if stage == 0:
        world.members[CLIENT] = world.member(CLIENT)
    reply = world.replied(CLIENT, request)
    if messages.kind_of(reply) is Kind.REFUSAL:
        raise Refusal(messages.read_refusal(reply), "The request was refused.")
    assert messages.kind_of(reply) == messages.kind_of(request) + 16
    assert _written_again(request) == request
    _at.cache_clear()


def replies(content: bytes) -> None:
    """A reply of any client, at any stage."""
    stage, reply = _split(content)
    _, server = _at(stage)
    verdict = server.take(CLIENT, reply)
    assert verdict in get_args(Taken)
    if verdict == "taken":
        assert _reply_again(reply) == reply
        taken = server._replies
        taken.remove(CLIENT) if isinstance(taken, set) else taken.pop(CLIENT)


def _split(content: bytes) -> tuple[int, bytes]:
    return (content[0] % len(ASKED) if content else 0), content[1:]


def _written_again(content: bytes) -> bytes:
    """A request, read and written."""
    kind = messages.kind_of(content)
    if kind is Kind.KEYS:
        return messages.keys_request(*messages.read_keys_request(content))
    if kind is Kind.SHARES:
        return SharesRequest.read(content).write()
    if kind is Kind.CONSISTENCY:
        session, clients = messages.read_survivors(content)
        return messages.written(kind, session, messages.write_clients(clients))
    size = BOX if kind is Kind.MASKED else SIGNATURE
    session, rows = messages.read_table(content, kind, size)
    return messages.written(kind, session, messages.write_table(rows))


def _reply_again(content: bytes) -> bytes:
    """A reply in a federation of five, read and written."""
    kind = messages.kind_of(content)
    readers: dict[Kind, Callable[[], tuple[bytes, ...]]] = {
        Kind.KEYS_REPLY: lambda: (messages.read_record(content).plain(),),
        Kind.SHARES_REPLY: lambda: (SharesReply.read(content, 4).write()[6:],),
        Kind.MASKED_REPLY: lambda: messages.read_masked(content),
        Kind.CONSISTENCY_REPLY: lambda: messages.read_signature(content),
        Kind.REVEAL_REPLY: lambda: (RevealReply.read(content, 5).write()[6:],),
    }
    return messages.written(kind, *readers[kind]())


def request_seeds() -> list[bytes]:
    """Whole requests of every stage."""
    return [bytes([at]) + _at(at)[1].requests()[CLIENT] for at in range(len(ASKED))]


def reply_seeds() -> list[bytes]:
    """Whole replies of every stage, and a refusal."""
    seeds = [b"\1" + messages.refusal("keys")]
    for at in range(len(ASKED)):
        world, server = _at(at)
        seeds.append(bytes([at]) + world.answer(CLIENT, server.requests()[CLIENT]))
    _at.cache_clear()
    return seeds
