"""Frames: a JSON header and byte parts in one message.

    length of the header (4 bytes, big-endian) · header (JSON, UTF-8) · parts one after the other

The header's `parts` lists the length of each part. Reading refuses everything that `packed` cannot
have written, before it looks at any part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.errors import UserError

HEADER = 2**16  # bytes, at most
PARTS = 8  # at most


def packed(head: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """One frame.

    >>> read(packed({"kind": "hello"}, [b"abc"]))
    ({'kind': 'hello'}, (b'abc',))
    """
    whole = {**head, "parts": [len(part) for part in parts]}
    header = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(header) > HEADER or len(parts) > PARTS:
        raise UserError(f"A frame has a header of {len(header)} bytes. Use at most {HEADER}.")
    return b"".join([len(header).to_bytes(4, "big"), header, *parts])


def read(frame: bytes, most: int | None = None) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """The header, without the lengths of its parts, and the parts."""
    if most is not None and len(frame) > most:
        raise UserError(f"A frame has {len(frame)} bytes, more than {most}. It was rejected.")
    size = int.from_bytes(frame[:4], "big")
    if len(frame) < 4 or size > min(HEADER, len(frame) - 4):
        raise UserError("A frame is shorter than its header. It was rejected.")
    head = _header(frame[4 : 4 + size])
    lengths = head.pop("parts", None)
    if not _are_lengths(lengths) or sum(lengths) != len(frame) - 4 - size:
        raise UserError("A frame's parts do not have their stated lengths. It was rejected.")
    parts, start = [], 4 + size
    for length in lengths:
        parts.append(frame[start : start + length])
        start += length
    return head, tuple(parts)


def _header(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text.decode(), parse_constant=_refuse, parse_float=_refuse)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise UserError("A frame's header is not a JSON object. It was rejected.")
    return head


def _refuse(number: str) -> None:
    """Headers have whole numbers only: 1e999 would be read as infinity."""
    raise ValueError(f"{number} is not a whole number")


def _are_lengths(lengths: object) -> bool:
    return (
        isinstance(lengths, list)
        and len(lengths) <= PARTS
        and all(type(length) is int and length >= 0 for length in lengths)
    )
