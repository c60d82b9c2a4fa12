"""Objects: the parts of a Flower message that are fetched one by one, and the bytes in them.

A message is a tree of a Message, a RecordDict and its records. Only the records have our bytes. The
metadata that counts is in the announcement, which the SuperLink has checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedveil.federation.flower.app.envelope import joined_bodies

RECORDS = 2  # of a message, at most


def record_ids(tree: Any) -> list[str]:
    """The object IDs of the records of a message. Empty if the message has another form."""
    if len(tree.children) != 1:
        return []
    records = tree.children[0].children
    if len(records) > RECORDS or any(record.children for record in records):
        return []
    return [record.object_id for record in records]


def other_ids(tree: Any) -> list[str]:
    """The object IDs of the RecordDict and the Message, for a tree that has records."""
    return [tree.children[0].object_id, tree.object_id]


def bytes_in(contents: Iterable[bytes]) -> bytes | None:
    """The bytes of a message with these records, or None if it is not one of ours."""
    from flwr.app import ConfigRecord

    try:
        return joined_bodies([ConfigRecord.inflate(content) for content in contents])
    except Exception:  # Flower's readers raise many kinds on garbage
        return None
