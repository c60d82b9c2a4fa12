"""One at a time: a lock that ends with its process, and the name of who has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fedveil.errors import UserError

PAUSE = 0.02  # seconds between two tries
NAME = 512  # bytes, more than a host's name takes


class Hold:
    """The exclusive lock on a file, for as long as this process lives or until `release`.

    The operating system lets go of it when the process ends, however it ends; what is written in
    the file only names the holder, so a dead one's text stands in nobody's way.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._file: int | None = None
        self.path, self.what = path, what

    def take(self, patience: float = 0.0) -> None:
        """Take the lock, or refuse with the holder's name after `patience` seconds."""
        if self._file is not None:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait(file, patience)
        except BaseException:
            os.close(file)
            raise
        os.pwrite(file, json.dumps(_me()).encode().ljust(NAME), 0)  # over any earlier name
        self._file = file

    def release(self) -> None:
        """Let go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.release()

    @contextlib.contextmanager
    def held(self, patience: float) -> Iterator[None]:
        """Take it, and let go at the end."""
        self.take(patience)
        try:
            yield
        finally:
            self.release()

    def _wait(self, file: int, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as problem:
                if problem.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise
            if time.monotonic() >= until:
                raise UserError(
                    f"{self.what} is in use by {_named(os.pread(file, NAME, 0))}; "
                    "wait for it to end, or end it."
                )
            time.sleep(PAUSE)


def _me() -> dict[str, object]:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _named(text: bytes) -> str:
    try:
        who = json.loads(text)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not written its name yet
        return "another process"
