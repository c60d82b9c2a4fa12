"""Frames on the agent's Unix socket: a request is length + body, a reply is status + length + body.

Both sides bound the size of a frame before they read it, and the time of the whole exchange.
Standard library only, since Flower copies this file to every node.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

LIMIT = 32 * 2**20  # bytes of a frame's body
CONNECT = 5.0  # seconds until the agent must accept a connection
REQUEST = struct.Struct("!Q")
REPLY = struct.Struct("!BQ")
ANSWERED, FAILED = 0, 1
UNREACHABLE, BROKEN, LATE = "unreachable", "broken", "late"
TOO_LARGE, REFUSED = "too-large", "failed"


class FrameError(Exception):
    """An exchange that failed. `word` is one of a few fixed words and safe to send anywhere."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


def call(path: Path | str, request: bytes, seconds: float, limit: int = LIMIT) -> bytes:
    """The agent's reply to a request, or a FrameError after at most `seconds`."""
    if len(request) > limit:
        raise FrameError(TOO_LARGE)
    deadline = time.monotonic() + seconds
    with _connected(path, min(seconds, CONNECT)) as connection:
        send(connection, REQUEST.pack(len(request)) + request, deadline)
        status, size = REPLY.unpack(receive(connection, REPLY.size, deadline))
        if status != ANSWERED:
            raise FrameError(REFUSED)
        return receive_body(connection, size, deadline, limit)


def receive_body(connection: socket.socket, size: int, deadline: float, limit: int) -> bytes:
    """The body of a frame. One above the limit is refused before it is read."""
    if size > limit:
        raise FrameError(TOO_LARGE)
    return receive(connection, size, deadline)


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes, before the deadline."""
    body = bytearray(size)
    view, got = memoryview(body), 0
    while got < size:
        _allow_until(connection, deadline)
        try:
            more = connection.recv_into(view[got:])
        except TimeoutError:
            raise FrameError(LATE) from None
        except OSError:
            raise FrameError(BROKEN) from None
        if not more:
            raise FrameError(BROKEN)
        got += more
    return bytes(body)


def send(connection: socket.socket, frame: bytes, deadline: float) -> None:
    """All bytes of a frame, before the deadline."""
    _allow_until(connection, deadline)
    try:
        connection.sendall(frame)
    except TimeoutError:
        raise FrameError(LATE) from None
    except OSError:
        raise FrameError(BROKEN) from None


def _connected(path: Path | str, seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(seconds, 0.001))
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise FrameError(UNREACHABLE) from None
    return connection


def _allow_until(connection: socket.socket, deadline: float) -> None:
    if (left := deadline - time.monotonic()) <= 0:
        raise FrameError(LATE)
    connection.settimeout(left)
