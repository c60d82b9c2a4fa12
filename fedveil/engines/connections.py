"""A connection between the first process and each other one, to detect which process left and why.

Nothing is sent while all processes run. A process that exits on its own sends a message before it
closes its connection. If a connection closes without a message, its process was killed.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

WAIT = 60.0  # seconds until all processes must be connected
TOKEN = 16  # bytes of the secret that authenticates a process
SHORT = struct.Struct("!I")

Broadcast = Callable[[bytes], bytes]  # all processes receive the first process's bytes


class Connections:
    """Sockets by the rank of the process at the other end."""

    def __init__(self, ends: dict[int, socket.socket]) -> None:
        self._ends = ends

    @classmethod
    def open(cls, rank: int, size: int, host: str, broadcast: Broadcast) -> Connections:
        """Connect the first process to each other one; the token keeps out other programs."""
        if rank:
            told = broadcast(bytes(SHORT.size + TOKEN))
            (port,) = SHORT.unpack(told[: SHORT.size])
            end = socket.create_connection((host, port), WAIT)
            end.sendall(told[SHORT.size :] + SHORT.pack(rank))
            return cls({0: end})
        with socket.create_server((host, 0)) as server:
            token = secrets.token_bytes(TOKEN)
            broadcast(SHORT.pack(server.getsockname()[1]) + token)
            server.settimeout(WAIT)
            ends: dict[int, socket.socket] = {}
            while len(ends) < size - 1:
                ends.update(_caller(server, token))
        return cls(ends)

    def leave(self, reason: str = "") -> None:
        """Announce that this process exits on its own, with the reason if there is one."""
        for end in self._ends.values():
            with suppress(OSError):
                end.sendall(b"." + reason.encode())
        self.close()

    def close(self) -> None:
        """Close without a message."""
        for end in self._ends.values():
            end.close()

    def gone(self, patience: float) -> dict[int, str | None]:
        """Connections closed now or within `patience` seconds: the reason, or None if killed."""
        ready, _, _ = select.select(list(self._ends.values()), [], [], patience)
        return {rank: _last_words(end) for rank, end in self._ends.items() if end in ready}


def _caller(server: socket.socket, token: bytes) -> dict[int, socket.socket]:
    end, _ = server.accept()
    end.settimeout(WAIT)
    said = _exactly(end, TOKEN + SHORT.size)
    if not secrets.compare_digest(said[:TOKEN], token):
        end.close()
        return {}
    return {SHORT.unpack(said[TOKEN:])[0]: end}


def _exactly(end: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count and (more := end.recv(count - len(said))):
        said += more
    return said


def _last_words(end: socket.socket) -> str | None:
    said = b""
    with suppress(OSError):
        while more := end.recv(4096):
            said += more
    return said[1:].decode(errors="replace") if said else None
