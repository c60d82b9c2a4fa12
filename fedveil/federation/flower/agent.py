"""agent: the resident process of a node, which answers requests on a local Unix socket.

It holds what must not be in the hands of the app that Flower ships: data, keys, ledger and the
installed fedveil. It answers one request at a time. A request that is broken, slow or too large
ends its own connection and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import socket
import stat
import time
from pathlib import Path

from fedveil.errors import UserError
from fedveil.federation.flower.app.frames import (
    ANSWERED,
    FAILED,
    LIMIT,
    REPLY,
    REQUEST,
    FrameError,
    receive,
    receive_body,
    send,
)
from fedveil.federation.flower.app.frames import call as call_frames
from fedveil.federation.flower.stopping import on_signals
from fedveil.federation.transport import Handler
from fedveil.ledger.lock import FileLock

SECONDS = 30.0  # for a request to arrive, and for a reply to be read
LONGEST_PATH = 107  # bytes, of a Unix socket on Linux
WAITING = 8  # connections

log = logging.getLogger(__name__)


class Agent:
    """Answers requests at a socket, one at a time, until `stop`."""

    def __init__(
        self,
        path: Path,
        handler: Handler,
        *,
        group: str | None = None,
        limit: int = LIMIT,
        seconds: float = SECONDS,
    ) -> None:
        self._path, self._handler, self._limit, self._seconds = path, handler, limit, seconds
        self._lock = FileLock(path.with_name(path.name + ".lock"), f"The agent's socket {path}")
        self._lock.take()
        _clear(path)
        self._server = _bound(path, group)
        self._wake, self._woken = socket.socketpair()
        self._stopped = False

    def serve(self) -> None:
        """Answer requests until `stop`. A request that has arrived is answered before."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._stopped:
                if any(key.fileobj is self._server for key, _ in ready.select()):
                    self._accept()

    def stop(self) -> None:
        """Make `serve` return. Safe to call from a signal handler or another thread."""
        self._stopped = True
        self._wake.send(b"\0")

    def close(self) -> None:
        """Remove the socket and release its lock."""
        for each in (self._server, self._wake, self._woken):
            each.close()
        self._path.unlink(missing_ok=True)
        self._lock.release()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as problem:
            log.warning("The agent could not accept a connection: %s", problem)
            return
        with connection:
            try:
                self._answer(connection)
            except FrameError as problem:
                log.warning("A connection to the agent ended: %s", problem.word)

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + self._seconds
        (size,) = REQUEST.unpack(receive(connection, REQUEST.size, deadline))
        reply = self._handled(receive_body(connection, size, deadline, self._limit))
        frame = REPLY.pack(FAILED, 0) if reply is None else REPLY.pack(ANSWERED, len(reply)) + reply
        send(connection, frame, time.monotonic() + self._seconds)

    def _handled(self, request: bytes) -> bytes | None:
        """The handler's reply, or None if it fails. The reason stays in this process's log."""
        try:
            return self._handler(request)
        except Exception:
            log.exception("The agent could not answer a request.")
            return None


def listen(
    path: Path,
    handler: Handler,
    *,
    group: str | None = None,
    limit: int = LIMIT,
    seconds: float = SECONDS,
) -> None:
    """Answer requests at the socket `path` until SIGTERM or SIGINT. Call it in the main thread.

    The first signal lets the current request finish. A second one ends the process at once. The
    socket has mode 0600, or 0660 for the given group.
    """
    agent = Agent(path, handler, group=group, limit=limit, seconds=seconds)
    with contextlib.closing(agent), on_signals(agent.stop):
        agent.serve()


def call(path: Path, request: bytes, seconds: float = 600.0, limit: int = LIMIT) -> bytes:
    """The reply of the agent at a socket, or a UserError that says what failed."""
    try:
        return call_frames(path, request, seconds, limit)
    except FrameError as problem:
        raise UserError(
            f"The agent at {path} did not answer ({problem.word}). Start it, or read its log."
        ) from None


def _clear(path: Path) -> None:
    """Remove the socket of an agent that has ended. Refuse anything else."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(
            f"The socket path {path} is longer than {LONGEST_PATH} bytes. Choose a shorter one."
        )
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise UserError(f"{path} exists and is not a socket. Choose another path.")
    if _answers(path):
        raise UserError(f"Another process listens at {path}. Stop it, or choose another path.")
    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
        return True


def _bound(path: Path, group: str | None) -> socket.socket:
    """A listening socket that nobody else could open at any moment."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        server.bind(str(path))
        if group is not None:
            shutil.chown(path, group=group)
            path.chmod(0o660)
        server.listen(WAITING)
    except (OSError, LookupError) as problem:
        server.close()
        raise UserError(f"Cannot listen at {path}: {problem}. Choose another path.") from None
    finally:
        os.umask(mask)
    return server
