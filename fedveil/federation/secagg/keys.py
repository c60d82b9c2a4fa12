"""Keys of one round: two X25519 pairs, signed by a client's identity.

A record is sent before its round's model is known. So it is bound to agreement, opening, round and
client only. Everything that is later derived from it is bound to the session: the context and all
records of the round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.federation.secagg.primitives import KEY, SIGNATURE, Identity, Pair, is_point, is_signed
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.shamir import Entropy
from fedveil.federation.secagg.terms import VERSION, RoundContext, place

RECORD = 2 * KEY + SIGNATURE  # bytes


@dataclass(frozen=True)
class KeyRecord:
    """The public keys of one client for one round: for boxes and for masks, with a signature."""

    box: bytes
    mask: bytes
    signature: bytes

    @classmethod
    def parse(cls, content: bytes) -> KeyRecord:
        """The record in these bytes; refused if a key is not canonical or of low order."""
        if len(content) != RECORD:
            raise Refusal("malformed", "A key record has the wrong length. It was refused.")
        box, mask, signature = content[:KEY], content[KEY : 2 * KEY], content[2 * KEY :]
        if not (is_point(box) and is_point(mask)) or box == mask:
            raise Refusal("keys", "A public key is not canonical or of low order. It was refused.")
        return cls(box, mask, signature)

    def plain(self) -> bytes:
        """The bytes that `parse` reads."""
        return self.box + self.mask + self.signature

    def signed(self, where: bytes, client: int, identity: bytes) -> bool:
        """Whether the client has signed these keys for this agreement, opening and round."""
        return is_signed(identity, self.signature, _text(where, client, self.box, self.mask))


@dataclass(frozen=True, repr=False)
class RoundKeys:
    """The two key pairs of a client for one round, and their record."""

    round: int
    box: Pair
    mask: Pair
    record: KeyRecord

    @classmethod
    def draw(cls, where: bytes, round: int, client: int, identity: Identity, entropy: Entropy) -> (
        RoundKeys
    ):  # fmt: skip
        """Fresh pairs, signed."""
        box, mask = Pair(entropy(KEY)), Pair(entropy(KEY))
        signature = identity.sign(_text(where, client, box.public, mask.public))
        return cls(round, box, mask, KeyRecord(box.public, mask.public, signature))


def context_place(context: RoundContext) -> bytes:
    """What the records of this round are bound to."""
    return place(context.agreement, context.opening, context.round)


def session_of(
    context: RoundContext, roster: Mapping[int, bytes], records: Mapping[int, KeyRecord]
) -> bytes:
    """SHA-256 of the context and of all public keys of the round: clients that differ in any of
    them share no key.
    """
    told = hashlib.sha256(VERSION + b"/session" + context.digest(roster))
    for client in sorted(records):
        told.update(client.to_bytes(4, "big") + records[client].box + records[client].mask)
    return told.digest()


def have_duplicates(records: Mapping[int, KeyRecord]) -> bool:
    """Whether a public key occurs twice."""
    keys = [key for record in records.values() for key in (record.box, record.mask)]
    return len(set(keys)) < len(keys)


def _text(where: bytes, client: int, box: bytes, mask: bytes) -> bytes:
    return VERSION + b"/keys" + where + client.to_bytes(4, "big") + box + mask
