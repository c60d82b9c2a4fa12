"""Envelope: opaque bytes as the content of a Flower message, and back.

One ConfigRecord with the bytes: three objects per message, the fewest that Flower allows. What many
requests have in common travels in a record of its own, which Flower stores and uploads once. Every
other record has a nonce, so that no node can guess the ID of another node's message or object.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from flwr.app import ConfigRecord, RecordDict

OWN, COMMON = "fedveil", "fedveil-common"  # records
BODY, NONCE = "body", "nonce"  # their values


def sealed(body: bytes, common: ConfigRecord | None = None) -> RecordDict:
    """The content of a message whose bytes are `body`, followed by those of `common`."""
    own = ConfigRecord({BODY: body, NONCE: secrets.token_bytes(16)})
    return RecordDict({OWN: own} if common is None else {OWN: own, COMMON: common})


def common_record(body: bytes) -> ConfigRecord:
    """The record of bytes that several messages have in common."""
    return ConfigRecord({BODY: body})


def opened(content: RecordDict) -> bytes | None:
    """The bytes of a message, or None if the message has another form."""
    return joined_bodies(content.values())


def joined_bodies(records: Iterable[object]) -> bytes | None:
    """The bytes in one record with a nonce, and at most one without, in any order."""
    bodies: dict[bool, list[bytes]] = {True: [], False: []}
    for record in records:
        body = record.get(BODY) if isinstance(record, ConfigRecord) else None
        if not isinstance(record, ConfigRecord) or not isinstance(body, bytes):
            return None
        bodies[NONCE in record].append(body)
    own, common = bodies[True], bodies[False]
    return b"".join(own + common) if len(own) == 1 and len(common) <= 1 else None
