"""What both sides derive in a session: keys of boxes and masks, and the text that survivors sign.

Each label names its purpose and its clients, and the session is HKDF's salt. So a key serves one
purpose, between two clients, in one direction, in one session.
"""

from __future__ import annotations

import hashlib

from fedveil.federation.secagg.messages import write_clients
from fedveil.federation.secagg.primitives import Pair, derive
from fedveil.federation.secagg.terms import VERSION


def box_label(sender: int, receiver: int) -> bytes:
    """The label of the key from one client to another, which the other direction does not share."""
    return VERSION + b"/box" + _named(sender, receiver)


def mask_key(own: Pair, other: bytes, session: bytes, clients: tuple[int, int]) -> bytes:
    """The key of the mask that two clients share: the smaller one adds it, the larger subtracts."""
    label = VERSION + b"/mask" + _named(min(clients), max(clients))
    return derive(own.agree(other), session, label)


def self_mask_key(seed: bytes, session: bytes, client: int) -> bytes:
    """The key of a client's own mask."""
    return derive(seed, session, VERSION + b"/self" + _named(client))


def check_value(seed: bytes, session: bytes, client: int) -> bytes:
    """A value that recognizes a restored seed, and tells nothing about the mask made of it."""
    return derive(seed, session, VERSION + b"/check" + _named(client))


def survivors_text(
    session: bytes, signer: int, sharers: tuple[int, ...], survivors: tuple[int, ...]
) -> bytes:
    """What a client signs: whose boxes it has opened, and whose messages are in the sum."""
    lists = hashlib.sha256(write_clients(sharers) + write_clients(survivors)).digest()
    return VERSION + b"/survivors" + session + _named(signer) + lists


def _named(*clients: int) -> bytes:
    return b"".join(client.to_bytes(4, "big") for client in clients)
